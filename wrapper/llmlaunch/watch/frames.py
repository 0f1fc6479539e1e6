"""Runs, drawn for a terminal of any size: one with its steps and a bar of memory for each GPU, the fullest first;
several with a line each. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from llmlaunch.report.text import one_line
from llmlaunch.units import duration, gib
from llmlaunch.watch.model import Gauge, WatchedRun, step_text

Line = tuple[tuple[str, str], ...]
"""Pieces of text, each with a style ("" for none, else words as `bold red`)."""

GAP = 2


def styled(text: str, style: str = "") -> Line:
    return ((text, style),)


def cut(line: Line, width: int) -> Line:
    """Return the line cut to `width`, without trailing spaces."""
    pieces: list[tuple[str, str]] = []
    for text, style in line:
        pieces.append((text[: max(0, width)], style))
        width -= len(text)
    while pieces and not pieces[-1][0].strip():
        pieces.pop()
    return tuple(pieces)


def wrapped(parts: Sequence[str], width: int, between: str = " | ") -> list[str]:
    """Return the parts joined into as few lines as possible; no part is split."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(between) + len(part) <= width:
            lines[-1] += between + part
        else:
            lines.append(part)
    return lines


@dataclass(frozen=True)
class Column:
    """`keep` is how long it stays where room is short: the lowest goes first. `styles` are of the cells."""

    head: str
    cells: Sequence[str]
    keep: int
    left: bool = False
    styles: Sequence[str] = ()

    @property
    def width(self) -> int:
        return max(len(self.head), *(len(cell) for cell in self.cells)) if self.cells else len(self.head)

    def text(self, row: int | None) -> tuple[str, str]:
        """Return the cell of a row, or the head (None), with its style."""
        if row is None:
            return self._aligned(self.head), "dim"
        return self._aligned(self.cells[row]), self.styles[row] if self.styles else ""

    def _aligned(self, text: str) -> str:
        return text.ljust(self.width) if self.left else text.rjust(self.width)


def fit_columns(columns: Sequence[Column], width: int) -> tuple[list[Line], int]:
    """Return the columns that fit as lines, the head first, each cell followed by a gap, and the width that is left.

    A column of empty cells is left out.
    """
    shown = [column for column in columns if any(cell not in ("", "-") for cell in column.cells)]
    while shown and sum(column.width + GAP for column in shown) > width + GAP:
        shown.remove(min(shown, key=lambda column: column.keep))
    rows = len(columns[0].cells)
    lines = [
        tuple(piece for column in shown for piece in (column.text(row), (" " * GAP, "")))
        for row in (None, *range(rows))
    ]
    return lines, max(0, width - sum(column.width + GAP for column in shown))


@dataclass(frozen=True)
class Glyphs:
    """What bars are drawn with; `steps` are of a sparkline, the lowest first."""

    used: str
    peak: str
    empty: str
    predicted: str
    limit: str
    steps: str


BLOCKS = Glyphs("█", "▒", "·", "┆", "┃", "▁▂▃▄▅▆▇█")
ASCII = Glyphs("#", "=", ".", ":", "|", "_.-=*#")


def alarm(gauge: Gauge) -> str:
    """Return the style of a gauge: red above the limit or if it is lost, yellow above the prediction, else green."""
    peak = gauge.peak_bytes or 0
    if gauge.note or (gauge.limit_bytes is not None and peak > gauge.limit_bytes):
        return "bold red"
    return "yellow" if gauge.share is not None and gauge.share > 1.0 else "green"


def scale_bytes(gauges: Sequence[Gauge]) -> int:
    """Return the bytes of a whole bar: the largest device or, without devices, the largest number to draw."""
    sizes = [size for gauge in gauges for size in (gauge.total_bytes, gauge.limit_bytes, gauge.predicted_bytes)]
    return max((size for size in (*sizes, *(gauge.peak_bytes for gauge in gauges)) if size), default=1)


def bar(gauge: Gauge, whole_bytes: int, width: int, glyphs: Glyphs) -> Line:
    """Return one bar of `width` characters: used now, up to the peak, empty; prediction and limit are marked."""
    used, peak = (_cells(size, whole_bytes, width) for size in (gauge.used_bytes, gauge.peak_bytes))
    cells = [(glyphs.used, alarm(gauge))] * min(used, width)
    cells += [(glyphs.peak, alarm(gauge))] * (min(peak, width) - len(cells))
    cells += [(glyphs.empty, "dim")] * (width - len(cells))
    for size, mark, style in (
        (gauge.predicted_bytes, glyphs.predicted, "cyan"),
        (gauge.limit_bytes, glyphs.limit, "bold magenta"),
    ):
        if size:
            cells[min(_cells(size, whole_bytes, width), width - 1)] = (mark, style)
    return tuple(("".join(text for text, _ in pieces), style) for style, pieces in groupby(cells, lambda cell: cell[1]))


def sparkline(values: Sequence[float], width: int, glyphs: Glyphs) -> str:
    """Return the last `width` values as small bars between their minimum and maximum; x stands for NaN and infinity."""
    shown = values[-width:] if width > 0 else ()
    finite = [value for value in shown if math.isfinite(value)]
    if not finite:
        return "x" * len(shown)
    least, span = min(finite), max(finite) - min(finite)
    top = len(glyphs.steps) - 1
    heights = [round((value - least) / span * top) if math.isfinite(value) and span else 0 for value in shown]
    return "".join(
        glyphs.steps[height] if math.isfinite(value) else "x" for value, height in zip(shown, heights, strict=True)
    )


def _cells(size: int | None, whole_bytes: int, width: int) -> int:
    return round((size or 0) / whole_bytes * width)


PHASE_STYLES = {"running": "green", "succeeded": "bold green", "failed": "bold red", "cancelled": "red"}
_LEAST_BAR = 10
_LONGEST_NODE = 20
_MOST_REMARKS = 4
_LEAST_TABLE = 3
_LONGEST_SPARK = 60


def frame(runs: Sequence[WatchedRun], columns: int, rows: int, now: float, glyphs: Glyphs = BLOCKS) -> list[Line]:
    """Draw one run with its GPUs, several with a line each, in at most `rows` lines, none longer than `columns`."""
    lines = _one_run(runs[0], columns, rows, now, glyphs) if len(runs) == 1 else _runs(runs, columns, rows, now, glyphs)
    return [cut(line, columns) for line in lines[: max(1, rows)]]


def _one_run(run: WatchedRun, columns: int, rows: int, now: float, glyphs: Glyphs) -> list[Line]:
    head = [*_title(run, columns), *_steps(run, columns, now, glyphs)]
    foot = _remarks(run)
    if run.gauges:
        head = [*head[: max(1, rows - _LEAST_TABLE - len(foot) - 1)], *_ages(run, columns, now)]
        room = max(_LEAST_TABLE, rows - len(head) - len(foot))
        table = _table(run, columns, room, glyphs)
        legend = _legend(run, columns, glyphs)
        spare = room - len(table) >= len(legend)
        return [*head, *table, *(legend if spare else ()), *foot]
    silent = run.phase not in ("pending", "unknown")
    return [*head, *([styled("no monitor has written yet", "dim")] if silent else []), *foot]


def _title(run: WatchedRun, columns: int) -> list[Line]:
    because = f": {one_line(run.because)}" if run.because else ""
    pieces = [(f"{run.title} ", "bold"), (run.phase, PHASE_STYLES.get(run.phase, "yellow"))]
    if sum(len(text) for text, _ in pieces) + len(because) <= columns:
        return [(*pieces, (because, ""))]
    return [tuple(pieces), *(styled(line) for line in wrapped(because.removeprefix(": ").split(" "), columns, " ")[:3])]


def _steps(run: WatchedRun, columns: int, now: float, glyphs: Glyphs) -> list[Line]:
    if run.step is None and run.loss is None:
        return []
    parts = step_text(run, with_memory=False).split(" | ")
    if run.step_at is not None and not run.ended:
        parts.append(f"logged {_ago(run.step_at, now)}")
    lines = [styled(line) for line in wrapped(parts, columns)]
    if len(run.losses) > 1:
        first, last = f"loss {run.losses[0]:.4g} ", f" {run.losses[-1]:.4g}"
        width = min(columns - len(first) - len(last), _LONGEST_SPARK)
        lines.append(((first, "dim"), (sparkline(run.losses, width, glyphs), "cyan"), (last, "dim")))
    return lines


def _ages(run: WatchedRun, columns: int, now: float) -> list[Line]:
    ages = run.memory_times
    if ages is None:
        return []
    newest, oldest = ages
    what = "resident memory" if run.peak_kind == "resident" else "GPU memory"
    parts = [f"{what}, GiB: " + ("at the end" if run.ended else f"as of {_ago(newest, now)}")]
    if not run.ended and newest - oldest > 30:
        parts[0] += f", the oldest number of {_ago(oldest, now)}"
    above = sum(gauge.share is not None and gauge.share > 1.0 for gauge in run.gauges)
    parts += [f"{above} above prediction"] if above else []
    return [styled(line, "dim") for line in wrapped(parts, columns)]


def _table(run: WatchedRun, columns: int, rows: int, glyphs: Glyphs) -> list[Line]:
    """Return a head and as many gauges as fit; those furthest below their prediction are left out first."""
    gauges = run.gauges
    if len(gauges) > rows - 1:
        worst = sorted(gauges, key=lambda g: (bool(g.note), g.share or 0.0, g.peak_bytes or 0), reverse=True)
        gauges, rest = tuple(worst[: max(1, rows - 2)]), worst[max(1, rows - 2) :]
        return [*_rows(gauges, columns, glyphs), styled(_rest(rest), "dim")]
    return _rows(gauges, columns, glyphs)


def _rows(gauges: Sequence[Gauge], columns: int, glyphs: Glyphs) -> list[Line]:
    styles = [alarm(gauge) for gauge in gauges]
    table = [
        Column("node", [one_line(gauge.node)[:_LONGEST_NODE] for gauge in gauges], 3, left=True),
        Column("gpu", [gauge.device for gauge in gauges], 2),
        Column("rank", [",".join(map(str, gauge.ranks)) or "-" for gauge in gauges], 5),
        Column("stage", ["-" if gauge.pipeline_rank is None else str(gauge.pipeline_rank) for gauge in gauges], 0),
        Column("now", [_gib(gauge.used_bytes) for gauge in gauges], 1),
        Column("peak", [_gib(gauge.peak_bytes) for gauge in gauges], 7),
        Column("of pred.", [_share(gauge) for gauge in gauges], 6, styles=styles),
    ]
    if all(gauge.share is None for gauge in gauges):
        table.pop()
    lines, room = fit_columns(table, columns)
    if room < _LEAST_BAR:
        lines, room = fit_columns(table, columns - _LEAST_BAR)
        room += _LEAST_BAR
    whole = scale_bytes(gauges)
    noted = [((gauge.note, "bold red"),) if gauge.note else bar(gauge, whole, room, glyphs) for gauge in gauges]
    return [lines[0], *((*line, *drawn) for line, drawn in zip(lines[1:], noted, strict=True))]


def _legend(run: WatchedRun, columns: int, glyphs: Glyphs) -> list[Line]:
    parts = [f"{glyphs.used} now", f"{glyphs.peak} peak", f"{glyphs.predicted} predicted", f"{glyphs.limit} limit"]
    parts.append(f"a whole bar is {gib(scale_bytes(run.gauges))} GiB")
    return [styled(line, "dim") for line in wrapped(parts, columns, "  ")]


def _remarks(run: WatchedRun) -> list[Line]:
    shown = [styled(one_line(remark), "yellow") for remark in run.remarks[:_MOST_REMARKS]]
    more = len(run.remarks) - _MOST_REMARKS
    return [*shown, styled(f"and {more} more remarks", "yellow")] if more > 0 else shown


def _rest(rest: Sequence[Gauge]) -> str:
    shares = [gauge.share for gauge in rest if gauge.share is not None]
    most = f", the fullest at {100 * max(shares):.0f} % of its prediction" if shares else ""
    return f"and {len(rest)} more{most}"


def _gib(size: int | None) -> str:
    return "-" if size is None else gib(size)


def _share(gauge: Gauge | None) -> str:
    return "-" if gauge is None or gauge.share is None else f"{100 * gauge.share:.0f} %"


def _ago(then: float, now: float) -> str:
    """Clocks of nodes differ a little: a time in the future counts as now."""
    return f"{duration(max(0.0, now - then))} ago"


_LONGEST_BAR = 30
_LONGEST_NAME = 60
_FIRST = ("running", "failed", "unknown", "pending")


def _runs(runs: Sequence[WatchedRun], columns: int, rows: int, now: float, glyphs: Glyphs) -> list[Line]:
    """Draw one line for each run; if there are too many, those that run or failed, and a count of the rest."""
    rest: Sequence[WatchedRun] = ()
    room = max(1, rows - 1)
    if len(runs) > room:
        ordered = sorted(runs, key=lambda run: _FIRST.index(run.phase) if run.phase in _FIRST else len(_FIRST))
        runs, rest = ordered[: max(1, room - 1)], ordered[max(1, room - 1) :]
    lines = _run_rows(runs, columns, now, glyphs)
    if rest:
        phases = ", ".join(f"{count} {phase}" for phase, count in Counter(run.phase for run in rest).items())
        lines.append(styled(f"and {len(rest)} more: {phases}", "dim"))
    return lines


def _run_rows(runs: Sequence[WatchedRun], columns: int, now: float, glyphs: Glyphs) -> list[Line]:
    fullest = [run.fullest for run in runs]
    table = [
        Column("run", [one_line(run.name)[:_LONGEST_NAME] for run in runs], 9, left=True),
        Column("job", [run.job for run in runs], 1),
        Column("phase", [run.phase for run in runs], 8, True, [PHASE_STYLES.get(run.phase, "yellow") for run in runs]),
        Column("step", [_step(run) for run in runs], 7),
        Column("s/step", [_number(run.step_seconds, ".3g") for run in runs], 3),
        Column("tokens/s", [_number(run.tokens_per_second, ",.0f") for run in runs], 4),
        Column("loss", [_number(run.loss, ".4g") for run in runs], 5),
        Column("peak GiB", [gib(gauge.peak_bytes) if gauge and gauge.peak_bytes else "-" for gauge in fullest], 2),
        Column("of pred.", [_share(gauge) for gauge in fullest], 6, styles=[alarm(g) if g else "" for g in fullest]),
        Column("seen", [_seen(run, now) for run in runs], 0),
    ]
    lines, room = fit_columns(table, columns)
    measured = [gauge for gauge in fullest if gauge is not None]
    if any(run.because or run.remarks for run in runs):
        room //= 2  # the other half is for words
    if not measured or room < _LEAST_BAR:
        return [lines[0], *(_with_words(line, run) for line, run in zip(lines[1:], runs, strict=True))]
    whole = scale_bytes(measured)
    width = min(room, _LONGEST_BAR)
    drawn = [bar(gauge, whole, width, glyphs) if gauge else styled(" " * width) for gauge in fullest]
    return [
        lines[0],
        *(
            _with_words((*line, *gauge, ("  ", "")), run)
            for line, gauge, run in zip(lines[1:], drawn, runs, strict=True)
        ),
    ]


def _with_words(line: Line, run: WatchedRun) -> Line:
    """Add why the run waits or what is wrong, as much as fits."""
    reasons = [run.because, *run.remarks]
    return (*line, (one_line("; ".join(word for word in reasons if word)), "yellow"))


def _step(run: WatchedRun) -> str:
    return "-" if run.step is None else f"{run.step}" + (f"/{run.steps}" if run.steps else "")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _seen(run: WatchedRun, now: float) -> str:
    ages = run.memory_times
    return "-" if ages is None or run.ended else f"{duration(max(0.0, now - ages[0]))} ago"
