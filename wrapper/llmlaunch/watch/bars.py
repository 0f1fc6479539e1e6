"""A bar of memory against its prediction and limit, and a line of small bars. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llmlaunch.watch.model import Gauge

Line = tuple[tuple[str, str], ...]
"""Pieces of text, each with a style ("" for none, else words as `bold red`)."""

GAP = 2


def styled(text: str, style: str = "") -> Line:
    return ((text, style),)


def plain(line: Line) -> str:
    return "".join(text for text, _ in line).rstrip()


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


__all__ = [
    "ASCII",
    "BLOCKS",
    "Column",
    "Glyphs",
    "Line",
    "alarm",
    "bar",
    "cut",
    "fit_columns",
    "plain",
    "sparkline",
    "styled",
    "wrapped",
]


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
    return _joined(cells)


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


def _joined(cells: Sequence[tuple[str, str]]) -> Line:
    pieces: list[tuple[str, str]] = []
    for text, style in cells:
        if pieces and pieces[-1][1] == style:
            pieces[-1] = (pieces[-1][0] + text, style)
        else:
            pieces.append((text, style))
    return tuple(pieces)
