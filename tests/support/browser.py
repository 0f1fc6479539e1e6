"""A real Chromium for tests: Debian's, without a window, that says every word of its console and every request."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

SIZES = {"phone": (390, 844), "desktop": (1280, 900)}
SWITCHES = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)
# Text whose contrast with what is behind it is less than WCAG 2.1 AA asks for: 4.5, of large text 3.
FAINT_TEXT = """
const parse = (text) => {
  const parts = (text.match(/[\\d.]+/g) || []).map(Number);
  return parts.length < 4 ? [...parts, 1] : parts;
};
const share = (c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : Math.pow((c / 255 + 0.055) / 1.055, 2.4));
const light = ([r, g, b]) => 0.2126 * share(r) + 0.7152 * share(g) + 0.0722 * share(b);
const behind = (node) => {
  for (let at = node; at; at = at.parentElement) {
    const ground = parse(getComputedStyle(at).backgroundColor);
    if (ground.length === 4 && ground[3] === 1) return ground;
  }
  return [255, 255, 255, 1];
};
const faint = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let text = walker.nextNode(); text; text = walker.nextNode()) {
  const node = text.parentElement;
  if (!text.data.trim() || ["SCRIPT", "STYLE"].includes(node.tagName) || !node.checkVisibility()) continue;
  const style = getComputedStyle(node), size = parseFloat(style.fontSize);
  const ink = parse(node.namespaceURI.endsWith("svg") ? style.fill : style.color);
  const [more, less] = [light(ink), light(behind(node))].sort((x, y) => y - x), ratio = (more + 0.05) / (less + 0.05);
  const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
  if (ratio < (large ? 3 : 4.5)) faint.push(`${text.data.trim().slice(0, 40)}: ${ratio.toFixed(2)}, ${node.className}`);
}
return [...new Set(faint)];
"""
INTERACTIVE = """
const all = [...document.querySelectorAll("a[href], button, input, summary, [tabindex='0']")];
all.forEach((node, number) => node.setAttribute("data-place", number));
const usable = (node) => node.checkVisibility() && !(node.type === "radio" && !node.checked);
return all.filter(usable).map((node) => +node.dataset.place);
"""


class Browser:
    """One Chromium with a profile of its own in `place`; `open` forgets what was said before."""

    def __init__(self, place: Path) -> None:
        binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
        assert binary, "no browser: apt-get install chromium"
        assert driver, "no driver of the browser: apt-get install chromium-driver"
        options = Options()
        options.binary_location = binary
        for switch in (*SWITCHES, f"--user-data-dir={place}"):
            options.add_argument(switch)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(driver))
        self.driver.get("about:blank")

    def open(self, page: Path | str, size: str = "desktop", scheme: str = "light") -> None:
        """Show a file, or an address, as on a screen of that size with that preference of colours."""
        width, height = SIZES[size]
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == "phone"}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        preference = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [preference]})
        for log in ("browser", "performance"):
            self.driver.get_log(log)
        self.driver.get(page if isinstance(page, str) else page.as_uri())

    def run(self, script: str, *values: Any) -> Any:
        return self.driver.execute_script(script, *values)

    def complaints(self) -> list[str]:
        """What the console said since the page was opened."""
        return [str(entry["message"]) for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """What the page asked for since it was opened; text it carries itself (`data:`) and what the
        browser draws its own window with are left out."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [each["params"] for each in messages if each["method"] == "Network.requestWillBeSent"]
        return [each["request"]["url"] for each in sent if not each["request"]["url"].startswith(("data:", "chrome:"))]

    def picture(self, path: Path) -> None:
        """Write the whole page as PNG."""
        width, height = self.run("return [innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self.driver.quit()
