"""Predicted against measured peaks as an SVG file: logarithmic axes, one colour for each family."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmlaunch.errors import UserError
from llmlaunch.report.svg import svg, write_svg
from llmlaunch.report.text import gib

__all__ = ["accuracy_svg", "write_accuracy_plot"]

GIB = 2**30
SIDE, LEFT, TOP = 560.0, 80.0, 50.0  # of the square inside the axes, in SVG units
BAND = 0.10
# Okabe and Ito's colours for the colour-blind, without yellow; families beyond them start again
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")


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
        families=[
            {"name": name, "colour": COLOURS[i % len(COLOURS)], "points": _points(shown, name, axis)}
            for i, name in enumerate(names)
        ],
    )


def _points(shown: Sequence[Mapping[str, Any]], name: str, axis: Axis) -> list[dict[str, Any]]:
    """Of one family and kind; the title is what a browser shows under the pointer."""
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
