"""Predicted against measured peaks as an SVG file: logarithmic axes, a marker and a colour for each family."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmlaunch.errors import UserError
from llmlaunch.report.svg import svg, write_svg
from llmlaunch.units import GIB, gib

__all__ = ["accuracy_svg", "write_accuracy_plot"]

SIDE, LEFT, TOP = 560.0, 80.0, 50.0  # of the square inside the axes, in SVG units
BAND = 0.10
# Okabe and Ito's colours for the colour-blind, without yellow, neighbours far apart in lightness.
COLOURS = ("#0072B2", "#E69F00", "#000000", "#56B4E9", "#D55E00", "#CC79A7", "#009E73")
_CIRCLE = "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z"
_SQUARE = "m-3.6 -3.6h7.2v7.2h-7.2z"
_UP = "m0 -4.8l4.4 7.6h-8.8z"
_DOWN = "m0 4.8l4.4 -7.6h-8.8z"
_DIAMOND = "m0 -5l5 5l-5 5l-5 -5z"
_HOURGLASS = "m-4 -4.4h8l-8 8.8h8z"
_CROSS = "m-4 -4l8 8m0 -8l-8 8"
_PLUS = "m-4.8 0h9.6m-4.8 -4.8v9.6"
_STAR = "m-4.8 0h9.6m-7.2 -4.2l4.8 8.4m0 -8.4l-4.8 8.4"
# SVG path from the middle of a point, and whether it is filled. 15 markers and 7 colours have no common divisor, so
# that 105 families differ, the first 15 of them also in grey.
MARKERS = (
    *((_CIRCLE, True), (_SQUARE, False), (_UP, True), (_CROSS, False), (_DIAMOND, False)),
    *((_DOWN, True), (_CIRCLE, False), (_SQUARE, True), (_PLUS, False), (_UP, False)),
    *((_DIAMOND, True), (_HOURGLASS, False), (_DOWN, False), (_HOURGLASS, True), (_STAR, False)),
)


@dataclass(frozen=True)
class Axis:
    """Both axes alike: bytes to SVG units, logarithmic from `low` to `high`."""

    low: float
    high: float

    def along(self, size: float) -> float:
        return SIDE * (math.log(size) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))

    def ticks(self) -> list[float]:
        """1, 2 and 5 times powers of ten GiB."""
        decades = range(math.floor(math.log10(self.low / GIB)), math.ceil(math.log10(self.high / GIB)) + 1)
        marks = [m * 10.0**d * GIB for d in decades for m in (1, 2, 5)]
        return [mark for mark in marks if self.low <= mark <= self.high]


def write_accuracy_plot(answer: Mapping[str, Any], path: Path) -> None:
    """Write the plot to `path`, whose name ends in .svg.

    Raises:
        UserError: another ending, nothing to plot, or a file that cannot be written.
    """
    write_svg(path, lambda: accuracy_svg(answer))


def accuracy_svg(answer: Mapping[str, Any]) -> str:
    """The SVG text of what `accuracy --json` prints. Raises UserError where no record was both measured and priced."""
    shown = [r for r in answer["records"] if r["measured_bytes"] and r["predicted_bytes"]]
    if not shown:
        raise UserError("no record has both a measured and a predicted peak: there is nothing to plot")
    sizes = [r[key] for r in shown for key in ("measured_bytes", "predicted_bytes")]
    axis = Axis(min(sizes) / 1.25, max(sizes) * 1.25)
    names = list(dict.fromkeys(f"{r['family']}, {r['peak_kind']}" for r in shown))
    return svg(
        "accuracy",
        side=SIDE,
        left=LEFT,
        top=TOP,
        ticks=[{"at": axis.along(mark), "text": _label(mark)} for mark in axis.ticks()],
        band=_band(axis),
        percent=round(100 * BAND),
        legend_width=max(300.0, 80.0 + 8.0 * max(map(len, names))),  # a letter is about 7 wide
        legend_height=40.0 + 24.0 * len(names),
        families=[{"name": name, **_look(i), "points": _points(shown, name, axis)} for i, name in enumerate(names)],
    )


def _look(number: int) -> dict[str, Any]:
    """Return how the points of family `number` are drawn, unlike those of every other."""
    marker, filled = MARKERS[number % len(MARKERS)]
    return {"colour": COLOURS[number % len(COLOURS)], "marker": marker, "filled": filled}


def _points(shown: Sequence[Mapping[str, Any]], name: str, axis: Axis) -> list[dict[str, Any]]:
    """Return the points of one family and kind; the title is what a browser shows under the pointer."""
    return [
        {
            "x": axis.along(r["measured_bytes"]),
            "y": SIDE - axis.along(r["predicted_bytes"]),
            "title": f"{r['id']}: {gib(r['measured_bytes'])} GiB measured, {gib(r['predicted_bytes'])} predicted",
        }
        for r in shown
        if f"{r['family']}, {r['peak_kind']}" == name
    ]


def _band(axis: Axis) -> list[tuple[float, float]]:
    """The corners of the band of 10 % around the diagonal; the clip of the axes cuts what stands out."""
    above, below = axis.along(axis.low * (1 + BAND)), axis.along(axis.low * (1 - BAND))
    return [(0.0, SIDE - below), (SIDE, -below), (SIDE, -above), (0.0, SIDE - above)]


def _label(size: float) -> str:
    return f"{size / GIB:g}"
