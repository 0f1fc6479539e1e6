"""The searched space as a heat map: how the model is split down, micro-batch size across, the best layout in each cell.

The colours are those of Fujii et al.'s tool: green is safe, yellow fits the card but not the limit, red is above the
card, grey is refused by a rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from llmlaunch.columns import NarrowColumn
from llmlaunch.layout import RECOMPUTE_NAMES
from llmlaunch.planner.no_legal_layout import tightest_rule, tightest_size_rule
from llmlaunch.planner.plan import Candidate, Limit, Plan
from llmlaunch.planner.points import Points
from llmlaunch.planner.relaxed_pins import as_pin
from llmlaunch.planner.search import SearchResult
from llmlaunch.planner.setting import Setting
from llmlaunch.recipe.types import Recipe
from llmlaunch.report.plan_sentences import job_text
from llmlaunch.report.svg import svg, write_svg
from llmlaunch.report.text import one_line
from llmlaunch.units import gib

__all__ = ["grid_of", "grid_svg", "write_grid_plot"]


MOST_SAFE, MOST_UNSAFE = 24, 8  # rows a picture holds
SPLIT = ("tensor", "context", "pipeline")
ZERO = ("zero_stage", "recompute")  # the rows where the model is not split at all
Row = tuple[int, ...]
CELL, ROW, GAP = 118, 24, 7  # SVG units: a cell's width and height, and the space between groups
LABEL = 74  # one field's name and values, left of the cells
MARGIN = 24
LETTER = 6.1  # mean width of a letter at 12 units
Colour = tuple[int, int, int]
# from the emptiest to the fullest of each kind
SAFE: tuple[Colour, Colour] = ((242, 250, 244), (150, 211, 166))
TIGHT: Colour = (252, 230, 157)
OVER: tuple[Colour, Colour] = ((249, 209, 200), (232, 137, 121))
REFUSED: Colour = (236, 236, 239)


@dataclass(frozen=True)
class Cell:
    """The fastest safe layout of a cell, or the chosen one; where none is safe, the legal one that needs the least;
    None where a rule refuses all, and `refused` is then that rule's key and sentence."""

    best: Candidate | None = None
    safe: bool = False
    refused: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class Grid:
    """`cells[row, micro-batch size]`; a row has one value for each of `fields`. Rows stand in groups, in order;
    `of_rows` is how many there were before the slow and the hopeless were left out."""

    fields: tuple[str, ...]
    rows: Sequence[Row]
    columns: Sequence[int]
    cells: Mapping[tuple[Row, int], Cell]
    of_rows: int

    def group(self, row: Row) -> int:
        return _group(self.fields, row)


def write_grid_plot(setting: Setting, result: SearchResult, plan: Plan, path: Path) -> None:
    """Write the heat map to `path`, whose name ends in .svg. Raises UserError where it cannot be written."""
    write_svg(path, lambda: grid_svg(setting.recipe, plan, grid_of(setting, result, plan)))


def grid_of(setting: Setting, result: SearchResult, plan: Plan | None = None) -> Grid:
    """The rows with the fastest safe layouts and those closest to fitting, every micro-batch size up to twice the
    largest that is safe in one of them. The cell of what a `plan` chose holds that, also where a fuller layout there is
    faster."""
    split = any(np.any(getattr(result.points.splits, name) > 1) for name in SPLIT)
    fields = SPLIT if split else ZERO
    best = _best(setting, result, fields)
    chosen: Row = ()
    if plan is not None and plan.safe:
        chosen = tuple(int(getattr(plan.layout, name)) for name in fields)
        best[chosen, int(plan.layout.micro_batch_size)] = Cell(plan.chosen, safe=True)
    by_row: dict[Row, list[Cell]] = {}
    for (row, _), cell in best.items():
        by_row.setdefault(row, []).append(cell)
    rows = sorted(_kept(by_row, chosen), key=lambda row: (_group(fields, row), row))
    largest = max((m for (row, m), cell in best.items() if row in rows and cell.safe), default=1)
    columns = sorted({m for (row, m) in best if row in rows and m <= 2 * largest})
    cells = {(row, m): best.get((row, m)) or _refused(setting, fields, row, m) for row in rows for m in columns}
    return Grid(fields, rows, columns, cells, len(by_row))


def _best(setting: Setting, result: SearchResult, fields: tuple[str, ...]) -> dict[tuple[Row, int], Cell]:
    """The best point of each cell: the safe one that is preferred, or the one with the least bytes where none is."""
    points, names = result.points, (*fields, "micro_batch_size")
    cell, count = np.zeros(len(points), dtype=np.int64), 1
    for name in names:
        different, place = _numbered(points, name)
        cell *= different
        cell += place
        count *= different
    some_safe = np.bincount(cell[result.safe], minlength=count) > 0
    worth = np.where(result.safe, result.preferred_seconds, result.device_bytes)
    worth[some_safe[cell] & ~result.safe] = np.inf
    least = np.full(count, np.inf)
    np.minimum.at(least, cell, worth)
    best = np.flatnonzero(worth == least[cell])
    best = best[np.unique(cell[best], return_index=True)[1]]
    places = np.stack([points.take(best).column(name) for name in names], axis=1).tolist()
    return {
        (tuple(place[:-1]), place[-1]): Cell(result.at(setting.recipe, i), bool(result.safe[i]) and not setting.widened)
        for place, i in zip(places, best.tolist(), strict=True)
    }


def _numbered(points: Points, name: str) -> tuple[int, NarrowColumn]:
    """Return how many different values a field of a layout has, and the number of each point's among them."""
    of_technique = {"zero_stage": points.state_techniques, "recompute": points.step_techniques}
    index = {"zero_stage": points.rows.state_techniques, "recompute": points.rows.step_techniques}
    values = [getattr(each, name) for each in of_technique.get(name, ())] or getattr(points.splits, name)
    different, place = np.unique(values, return_inverse=True)
    return len(different), place.astype(np.int32)[index.get(name, points.rows.split)]


def _kept(by_row: Mapping[Row, Sequence[Cell]], chosen: Row) -> list[Row]:
    """The rows of a picture: the chosen one, and those that are the fastest or closest to fitting."""
    fastest = {row: [c.best.step_seconds for c in cells if c.best and c.safe] for row, cells in by_row.items()}
    least = {row: min(c.best.device_bytes for c in by_row[row] if c.best) for row in by_row if not fastest[row]}
    safe = sorted((row for row in by_row if fastest[row]), key=lambda row: (row != chosen, min(fastest[row]), row))
    unsafe = sorted(least, key=lambda row: (least[row], row))
    return [*safe[:MOST_SAFE], *unsafe[:MOST_UNSAFE]]


def _refused(setting: Setting, fields: tuple[str, ...], row: Row, micro_batch_size: int) -> Cell:
    """The rule that stands in the way of this cell."""
    values = dict(zip((*fields, "micro_batch_size"), (*row, micro_batch_size), strict=True))
    pins = {name: pin for name, value in values.items() if (pin := as_pin(name, value)) is not None}
    narrowed = setting.with_recipe(replace(setting.recipe, pins={**setting.recipe.pins, **pins}))
    rule = tightest_size_rule(narrowed).rule or tightest_rule(narrowed).rule
    if rule is None:
        return Cell(refused=("devices", "the pins leave no split of the devices"))
    return Cell(refused=(rule.key, rule.sentence))


def _group(fields: tuple[str, ...], row: Row) -> int:
    """The model-parallel product, or the ZeRO stage where the model is not split."""
    return prod(row) if fields == SPLIT else row[0]


def grid_svg(recipe: Recipe, plan: Plan, grid: Grid) -> str:
    """The SVG text."""
    rows, height = _placed(grid, plan)
    legend = _legend(plan.limit)
    left = MARGIN + LABEL * len(grid.fields) + 16
    return svg(
        "plan_grid",
        title=one_line(f"{recipe.name}: {plan.verdict}, {plan.chosen.describe()}"),
        about=one_line(job_text(recipe)),
        remarks=_remarks(grid, plan),
        fields=[name.replace("_", " ") for name in grid.fields],
        label=LABEL,
        columns=grid.columns,
        rows=rows,
        legend=legend,
        width=max(left + CELL * len(grid.columns) + MARGIN, legend[-1]["x"] + 80 + MARGIN),
        margin=MARGIN,
        cell=CELL,
        row=ROW,
        left=left,
        height=height,
    )


def _remarks(grid: Grid, plan: Plan) -> list[str]:
    remarks = [
        f"In each cell: GiB of {plan.estimate.peak_kind} memory on the worst pipeline rank, and seconds a step, of the "
        "fastest safe layout there, or of the chosen one;",
        "where none is safe, of the one that needs the least. Data parallelism takes the devices that are left.",
    ]
    if len(grid.rows) < grid.of_rows:
        shown = f"{len(grid.rows)} of {grid.of_rows} rows are shown"
        remarks.append(f"{shown}: those with the fastest safe layouts, and of the others those closest to fitting.")
    return remarks


def _placed(grid: Grid, plan: Plan) -> tuple[list[dict[str, Any]], int]:
    """Rows from top to bottom, with a gap between groups, and their height together."""
    rows: list[dict[str, Any]] = []
    y = 0
    for before, row in zip((grid.rows[0], *grid.rows), grid.rows, strict=False):
        y += GAP if grid.group(row) != grid.group(before) else 0
        cells = [_drawn(grid.cells[row, m], plan, column) for column, m in enumerate(grid.columns)]
        rows.append({"y": y, "labels": _labels(grid, row), "cells": cells})
        y += ROW
    return rows, y


def _labels(grid: Grid, row: Row) -> list[str]:
    named = zip(grid.fields, row, strict=True)
    return [RECOMPUTE_NAMES[value] if name == "recompute" else str(value) for name, value in named]


def _drawn(cell: Cell, plan: Plan, column: int) -> dict[str, Any]:
    best = cell.best
    if best is None:
        key, sentence = cell.refused
        return {"column": column, "fill": _rgb(REFUSED), "refused": key, "title": sentence, "chosen": False}
    needs = f"{gib(best.device_bytes)} GiB on the worst pipeline rank, {best.step_seconds:.2f} s a step"
    return {
        "column": column,
        "fill": _rgb(_colour(best, cell.safe, plan.limit)),
        "refused": None,
        "title": f"{best.describe()}: {needs}",
        "memory": gib(best.device_bytes),
        "time": f"{best.step_seconds:.{_digits(best.step_seconds)}f} s",
        "safe": cell.safe,
        "chosen": best == plan.chosen,
    }


def _digits(seconds: float) -> int:
    return 0 if seconds >= 100 else 1 if seconds >= 10 else 2


def _colour(best: Candidate, safe: bool, limit: Limit) -> Colour:
    if safe:
        return _between(*SAFE, best.device_bytes / max(limit.limit_bytes, 1))
    if best.device_bytes <= limit.memory_bytes:
        return TIGHT
    return _between(*OVER, best.device_bytes / limit.memory_bytes - 1)


def _between(low: Colour, high: Colour, share: float) -> Colour:
    part = min(max(share, 0.0), 1.0)
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(low, high, strict=True))
    return red, green, blue


def _rgb(colour: Colour) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


def _legend(limit: Limit) -> list[dict[str, Any]]:
    """One after the other, each as wide as its text is likely to be."""
    entries: list[tuple[Colour | None, str]] = [
        (SAFE[1], f"safe, the deeper the fuller (limit {gib(limit.limit_bytes)} GiB)"),
        (TIGHT, f"fits the card ({gib(limit.memory_bytes)} GiB), not safe"),
        (OVER[1], "above the card"),
        (REFUSED, "refused by a rule"),
        (None, "chosen"),
    ]
    legend: list[dict[str, Any]] = []
    x = MARGIN
    for colour, text in entries:
        legend.append({"x": x, "fill": None if colour is None else _rgb(colour), "text": text})
        x += 44 + round(LETTER * len(text))
    return legend
