"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const tip = document.getElementById("tip");

  // --- colours: as the system has them, light, dark ----------------------------------------------------------------
  const scheme = document.getElementById("scheme");
  const schemes = ["system", "light", "dark"];
  let chosenScheme = 0;
  scheme.addEventListener("click", () => {
    chosenScheme = (chosenScheme + 1) % schemes.length;
    const name = schemes[chosenScheme];
    if (name === "system") root.removeAttribute("data-scheme"); else root.setAttribute("data-scheme", name);
    scheme.textContent = "Colours: " + name;
    scheme.setAttribute("aria-label", name === "system" ? "Colours: as the system has them" : "Colours: " + name);
    drawAll();
  });

  // --- the tooltip: text alone, never markup -----------------------------------------------------------------------
  function element(name, text, className) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  }
  function showTip(title, rows, box) {
    tip.replaceChildren(element("b", title));
    if (rows.length) {
      const list = element("div", undefined, "rows");
      for (const [name, value] of rows) list.append(element("span", name), element("span", value));
      tip.append(list);
    }
    tip.hidden = false;
    const width = tip.offsetWidth, height = tip.offsetHeight, wide = root.clientWidth;
    const left = Math.min(Math.max(box.left + box.width / 2 - width / 2, 12), Math.max(wide - width - 12, 12));
    const above = box.top - height - 10;
    const top = above > 6 ? above : box.bottom + 10;
    tip.style.left = left + window.scrollX + "px";
    tip.style.top = top + window.scrollY + "px";
  }
  function hideTip() { tip.hidden = true; }
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });

  function tipOf(node) {
    if (node.dataset.tip) {
      const [title, ...lines] = node.dataset.tip.split("\n");
      return [title, lines.map((line) => { const at = line.lastIndexOf("\t"); return [line.slice(0, at), line.slice(at + 1)]; })];
    }
    const cell = data.cells[Number(node.dataset.cell)];
    const rows = (cell.rows || []).slice();
    for (const [term, size] of cell.terms || []) rows.push([data.terms[term], size + " GiB"]);
    return [cell.title, rows];
  }
  for (const node of document.querySelectorAll("[data-tip], [data-cell]")) {
    const show = () => { node.setAttribute("aria-describedby", "tip"); showTip(...tipOf(node), node.getBoundingClientRect()); };
    const hide = () => { node.removeAttribute("aria-describedby"); hideTip(); };
    node.addEventListener("mouseenter", show);
    node.addEventListener("focus", show);
    node.addEventListener("click", show);
    node.addEventListener("mouseleave", hide);
    node.addEventListener("blur", hide);
  }

  // --- the heat map ------------------------------------------------------------------------------------------------
  const heat = document.getElementById("heat");
  if (heat) {
    for (const input of document.querySelectorAll("input[name=metric]"))
      input.addEventListener("change", () => { heat.dataset.metric = input.value; });
    const steps = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
    heat.addEventListener("keydown", (event) => {
      const step = steps[event.key], cell = event.target.closest("button.cell");
      if (!step || !cell) return;
      const rows = [...heat.tBodies[0].rows].map((row) => [...row.querySelectorAll("button.cell")]);
      const row = rows.findIndex((cells) => cells.includes(cell)), column = rows[row].indexOf(cell);
      const next = (rows[row + step[0]] || [])[column + step[1]];
      if (next) { event.preventDefault(); next.focus(); }
    });
  }

  // --- charts ------------------------------------------------------------------------------------------------------
  const SVG = "http://www.w3.org/2000/svg";
  function shape(parent, name, attributes, text) {
    const made = document.createElementNS(SVG, name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  }
  function colour(name) { return getComputedStyle(root).getPropertyValue("--" + name).trim(); }
  function niceStep(span, count) {
    const raw = span / Math.max(count, 1), power = Math.pow(10, Math.floor(Math.log10(raw)));
    for (const factor of [1, 2, 2.5, 5, 10]) if (factor * power >= raw * 0.999) return factor * power;
    return 10 * power;
  }
  function niceClock(span, count) {
    const raw = span / Math.max(count, 1);
    for (const step of [1, 5, 10, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200]) if (step >= raw) return step;
    return 86400 * niceStep(span / 86400, count);
  }
  function ticks(low, high, count, ofTime) {
    const step = (ofTime ? niceClock : niceStep)(high - low || 1, count), marks = [];
    for (let mark = Math.ceil(low / step - 1e-9) * step; mark <= high + step * 1e-6; mark += step) marks.push(Math.abs(mark) < step * 1e-9 ? 0 : mark);
    return marks;
  }
  function shown(value) {
    const size = Math.abs(value);
    if (size >= 10000) return Math.round(value).toLocaleString("en-US");
    return String(Number(value.toPrecision(4)));
  }
  function clock(seconds) {
    if (seconds < 120) return Math.round(seconds) + " s";
    if (seconds < 7200) return Math.round(seconds / 60) + " min";
    if (seconds < 172800) return Number((seconds / 3600).toFixed(1)) + " h";
    return Number((seconds / 86400).toFixed(1)) + " d";
  }
  // Where nobody sampled for long, between two attempts, nothing is drawn.
  function unbroken(points, ofTime) {
    if (!ofTime || points.length < 3) return points.length ? [points] : [];
    const gaps = points.slice(1).map((p, index) => p[0] - points[index][0]);
    const usual = gaps.slice().sort((a, b) => a - b)[Math.floor(gaps.length / 2)], parts = [[points[0]]];
    gaps.forEach((gap, index) => { if (gap > 4 * usual + 60) parts.push([]); parts[parts.length - 1].push(points[index + 1]); });
    return parts;
  }
  const LEFT = 58, RIGHT = 14, TOP = 14, BOTTOM = 44;

  function lines(place, chart) {
    const wide = Math.max(place.clientWidth, 240), high = wide < 520 ? 250 : 300;
    const points = chart.series.flatMap((series) => series.points);
    const rules = chart.rules || [];
    let lowX = Math.min(...points.map((p) => p[0])), highX = Math.max(...points.map((p) => p[0]));
    if (lowX === highX) { lowX -= 1; highX += 1; }
    const values = points.flatMap((p) => (p.length > 2 ? [p[2], p[3]] : [p[1]])).concat(rules.map((rule) => rule.value));
    let lowY = chart.zero ? 0 : Math.min(...values), highY = Math.max(...values);
    if (lowY === highY) { lowY -= Math.abs(lowY) / 10 || 1; highY += Math.abs(highY) / 10 || 1; }
    const room = (highY - lowY) * 0.06;
    highY += room;
    if (!chart.zero) lowY -= room;
    const x = (value) => LEFT + ((value - lowX) / (highX - lowX)) * (wide - LEFT - RIGHT);
    const y = (value) => high - BOTTOM - ((value - lowY) / (highY - lowY)) * (high - TOP - BOTTOM);
    const xText = chart.clock ? clock : shown;

    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `0 0 ${wide} ${high}`);
    svg.setAttribute("aria-hidden", "true");
    for (const mark of ticks(lowY, highY, 5)) {
      shape(svg, "line", { class: "axis", x1: LEFT, x2: wide - RIGHT, y1: y(mark), y2: y(mark) });
      shape(svg, "text", { x: LEFT - 9, y: y(mark) + 4, "text-anchor": "end" }, shown(mark));
    }
    shape(svg, "line", { class: "base", x1: LEFT, x2: wide - RIGHT, y1: high - BOTTOM, y2: high - BOTTOM });
    for (const mark of ticks(lowX, highX, wide < 520 ? 4 : 8, chart.clock)) {
      if (!chart.clock && !Number.isInteger(mark)) continue;
      shape(svg, "text", { x: x(mark), y: high - BOTTOM + 19, "text-anchor": "middle" }, xText(mark));
    }
    shape(svg, "text", { x: (LEFT + wide - RIGHT) / 2, y: high - 6, "text-anchor": "middle" }, chart.x);
    for (const mark of chart.marks || []) {
      if (mark < lowX || mark > highX) continue;
      shape(svg, "line", { class: "restart", x1: x(mark), x2: x(mark), y1: TOP, y2: high - BOTTOM });
    }
    for (const series of chart.series) {
      const fill = colour(series.look);
      for (const part of unbroken(series.points, chart.clock)) {
        const ranged = part.filter((p) => p.length > 2);
        if (ranged.length < 2) continue;
        const upper = ranged.map((p) => `${x(p[0])},${y(p[3])}`), lower = ranged.map((p) => `${x(p[0])},${y(p[2])}`).reverse();
        shape(svg, "polygon", { class: "range", points: upper.concat(lower).join(" "), fill });
      }
      for (const part of unbroken(series.points, chart.clock)) {
        if (part.length > 1) shape(svg, "polyline", { class: "curve", points: part.map((p) => `${x(p[0])},${y(p[1])}`).join(" "), stroke: fill });
        else shape(svg, "circle", { cx: x(part[0][0]), cy: y(part[0][1]), r: 3.5, fill });
      }
    }
    const lastHeld = Math.max(...chart.series.map((series) => series.points[series.points.length - 1][1]));
    for (const rule of rules) {
      shape(svg, "line", { class: "rule", x1: LEFT, x2: wide - RIGHT, y1: y(rule.value), y2: y(rule.value), stroke: colour(rule.look) });
      shape(svg, "text", { class: "name", x: wide - RIGHT, y: y(rule.value) + (rule.value < lastHeld ? 16 : -6), "text-anchor": "end", fill: colour("ink") }, rule.name);
    }
    const cursor = shape(svg, "line", { class: "cursor", x1: -9, x2: -9, y1: TOP, y2: high - BOTTOM, visibility: "hidden" });
    const dots = chart.series.map((series) => shape(svg, "circle", { r: 4.5, fill: colour(series.look), stroke: colour("sheet"), "stroke-width": 2, visibility: "hidden" }));
    place.replaceChildren(svg);

    const stops = [...new Set(points.map((p) => p[0]))].sort((a, b) => a - b);
    let at = stops.length - 1;
    function point(index) {
      at = Math.min(Math.max(index, 0), stops.length - 1);
      const rows = [], box = place.getBoundingClientRect(), scale = box.width / wide;
      chart.series.forEach((series, number) => {
        const near = series.points.find((p) => p[0] === stops[at]);
        dots[number].setAttribute("visibility", near ? "visible" : "hidden");
        if (!near) return;
        dots[number].setAttribute("cx", x(near[0]));
        dots[number].setAttribute("cy", y(near[1]));
        const range = near.length > 2 && near[2] !== near[3] ? ` (${shown(near[2])} to ${shown(near[3])})` : "";
        rows.push([series.name, shown(near[1]) + " " + chart.unit + range]);
      });
      for (const rule of rules) rows.push([rule.name, shown(rule.value) + " " + chart.unit]);
      cursor.setAttribute("visibility", "visible");
      cursor.setAttribute("x1", x(stops[at]));
      cursor.setAttribute("x2", x(stops[at]));
      const left = box.left + x(stops[at]) * scale;
      showTip((chart.clock ? "after " : chart.x + " ") + xText(stops[at]), rows, { left, width: 0, top: box.top + TOP, bottom: box.top + 60 });
    }
    function leave() {
      cursor.setAttribute("visibility", "hidden");
      dots.forEach((dot) => dot.setAttribute("visibility", "hidden"));
      hideTip();
    }
    place.onpointermove = (event) => {
      const box = place.getBoundingClientRect(), wanted = lowX + ((((event.clientX - box.left) * wide) / box.width - LEFT) / (wide - LEFT - RIGHT)) * (highX - lowX);
      let best = 0;
      stops.forEach((stop, index) => { if (Math.abs(stop - wanted) < Math.abs(stops[best] - wanted)) best = index; });
      point(best);
    };
    place.onpointerleave = leave;
    place.onfocus = () => point(at);
    place.onblur = leave;
    place.onkeydown = (event) => {
      const far = event.shiftKey ? Math.ceil(stops.length / 20) : 1;
      if (event.key === "ArrowRight") { event.preventDefault(); point(at + far); }
      if (event.key === "ArrowLeft") { event.preventDefault(); point(at - far); }
    };
  }

  function drawAll() {
    for (const id in data.charts || {}) {
      const place = document.getElementById(id);
      if (place) lines(place, data.charts[id]);
    }
  }
  drawAll();
  let width = root.clientWidth;
  window.addEventListener("resize", () => { if (root.clientWidth !== width) { width = root.clientWidth; hideTip(); drawAll(); } });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
})();
