"""The searched space as a grid: how the model is split down, micro-batch size across, the best layout in each cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from llmlaunch.columns import NarrowColumn
from llmlaunch.planner.changes import as_pin
from llmlaunch.planner.no_legal_layout import tightest_rule
from llmlaunch.planner.plan import Candidate, Plan
from llmlaunch.planner.points import Points
from llmlaunch.planner.search import SearchResult
from llmlaunch.planner.setting import Setting

MOST_SAFE, MOST_UNSAFE = 24, 8  # rows a grid shows
SPLIT = ("tensor", "context", "pipeline")
ZERO = ("zero_stage", "recompute")  # the rows where the model is not split at all
Row = tuple[int, ...]


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
    """The rows that are shown: the chosen one, and those that are the fastest or closest to fitting."""
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
    rule = tightest_rule(narrowed, sizes_alone=True)[0] or tightest_rule(narrowed)[0]
    if rule is None:
        return Cell(refused=("devices", "the pins leave no split of the devices"))
    return Cell(refused=(rule.key, rule.sentence))


def _group(fields: tuple[str, ...], row: Row) -> int:
    """The model-parallel product, or the ZeRO stage where the model is not split."""
    return prod(row) if fields == SPLIT else row[0]
