"""Priced candidates as columns: a million layouts with their techniques, bytes and seconds; the best that a search has
priced so far; and which of them runs and rehearsals tell of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from llmlaunch.calibration.lessons import MeasuredStep, Rehearsal
from llmlaunch.columns import BoolColumn, FloatColumn, IntColumn, NarrowColumn
from llmlaunch.frameworks.base import StateTechniques, StepTechniques
from llmlaunch.frozen import frozen
from llmlaunch.layout import AMOUNTS, OFFLOAD_LAYERS, RECOMPUTE_LAYERS, Layout, LayoutColumns
from llmlaunch.planner.search_space import SPLIT_FIELDS, all_techniques
from llmlaunch.planner.setting import Setting
from llmlaunch.recipe.types import Recipe
from llmlaunch.verdicts import TIGHT, UNSAFE


@frozen
class Rows:
    """Priced points as columns: indices of the split and of each kind of techniques, the amounts, and the costs. Bytes
    are of the worst pipeline rank's device and of a node. Whole numbers are narrow: a search may hold ten million
    points."""

    split: NarrowColumn
    step_techniques: NarrowColumn
    state_techniques: NarrowColumn
    recompute_layers: NarrowColumn
    offload_layers: NarrowColumn
    device_bytes: FloatColumn
    worst_pipeline_rank: NarrowColumn
    host_bytes: FloatColumn
    step_seconds: FloatColumn

    def __len__(self) -> int:
        return len(self.split)

    def amount(self, name: str) -> IntColumn:
        """Return one of AMOUNTS as a column of layouts."""
        amount: NarrowColumn = getattr(self, name)
        return amount.astype(np.int64)

    @property
    def renumbered(self) -> Rows:
        """The same rows over splits of their own, one each."""
        return replace(self, split=np.arange(len(self), dtype=np.int32))

    def take(self, index: BoolColumn | IntColumn | slice) -> Rows:
        """Return the rows that a mask, an index array or a slice selects."""
        return Rows(**{name: getattr(self, name)[index] for name in COLUMN_TYPES})


COLUMN_TYPES: Mapping[str, Any] = {
    f.name: np.float64 if f.name.endswith(("_bytes", "_seconds")) else np.int32 for f in fields(Rows)
}
NO_ROWS = Rows(**{name: np.zeros(0, dtype=kind) for name, kind in COLUMN_TYPES.items()})


def join_rows(blocks: Sequence[Rows]) -> Rows:
    """Concatenate blocks of rows."""
    blocks = [*blocks, NO_ROWS]
    return Rows(**{name: np.concatenate([getattr(block, name) for block in blocks]) for name in COLUMN_TYPES})


class GatheredRows:
    """Blocks of rows, one after the other, in columns with room for more, so that they need not be held twice to be
    joined. Room that is not used takes no memory: the system gives pages when they are first written to."""

    def __init__(self, room: int = 0) -> None:
        self._columns = {name: np.empty(room, dtype=kind) for name, kind in COLUMN_TYPES.items()}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, block: Rows) -> None:
        """Add a block at the end."""
        count, end = self._count, self._count + len(block)
        for name, column in self._columns.items():
            if end > len(column):
                self._columns[name] = np.empty(end + count // 2, dtype=column.dtype)
                self._columns[name][:count] = column[:count]
            self._columns[name][count:end] = getattr(block, name)
        self._count = end

    @property
    def rows(self) -> Rows:
        """The rows that were added so far, as views."""
        return Rows(**{name: column[: self._count] for name, column in self._columns.items()})


@frozen
class Points:
    """Priced candidates: `rows` over the splits and the techniques they point to."""

    splits: LayoutColumns
    step_techniques: Sequence[StepTechniques]
    state_techniques: Sequence[StateTechniques]
    rows: Rows

    def __len__(self) -> int:
        return len(self.rows.split)

    def take(self, index: BoolColumn | IntColumn | slice) -> Points:
        return replace(self, rows=self.rows.take(index))

    @property
    def compact(self) -> Points:
        """The same points over the splits that they need, one for each point."""
        rows = self.rows
        return replace(self, splits=self.splits.take(rows.split), rows=rows.renumbered)

    def techniques(self, index: int) -> tuple[StepTechniques, StateTechniques]:
        return (
            self.step_techniques[self.rows.step_techniques[index]],
            self.state_techniques[self.rows.state_techniques[index]],
        )

    def layout(self, index: int) -> Layout:
        return self._layouts_at(np.array([index])).row(0)

    @cached_property
    def layouts(self) -> LayoutColumns:
        """All points as layouts, built on first use."""
        return self._layouts_at(np.arange(len(self)))

    def column(self, name: str) -> IntColumn:
        """Return one layout field of all points without building layouts."""
        if name == "zero_stage":
            return self._zero_stages[self.rows.state_techniques]
        if name == "recompute":
            return self._recompute_codes[self.rows.step_techniques]
        if name in AMOUNTS:
            return self.rows.amount(name)
        column: IntColumn = getattr(self.splits, name)[self.rows.split]
        return column

    def _layouts_at(self, index: IntColumn) -> LayoutColumns:
        rows = self.rows.take(index)
        return replace(
            self.splits.take(rows.split),
            zero_stage=self._zero_stages[rows.state_techniques],
            recompute=self._recompute_codes[rows.step_techniques],
            recompute_layers=rows.amount(RECOMPUTE_LAYERS),
            offload_layers=rows.amount(OFFLOAD_LAYERS),
        )

    @property
    def _zero_stages(self) -> IntColumn:
        return np.array([state.zero_stage for state in self.state_techniques], dtype=np.int64)

    @property
    def _recompute_codes(self) -> IntColumn:
        return np.array([step.recompute for step in self.step_techniques], dtype=np.int64)


SLACK = 1e-9  # sums of floats do not come out the same in every order


@frozen
class Reach:
    """What a search is about, where it is not about all layouts: safe ones whose step takes at most `most_seconds`, the
    first of which has a ranking key of at most `most_key`."""

    most_seconds: float = np.inf
    most_key: float = np.inf

    @property
    def everything(self) -> bool:
        """Whether it leaves out nothing, and layouts that are not safe matter as well."""
        return bool(np.isinf(self.most_seconds))


ANYWHERE = Reach()


class Incumbents:
    """The ranking keys of the fastest safe candidates, as many as must be exact.

    `keys_of` returns the keys of points: their seconds of a step, or more, so that a lower bound of seconds is one of
    keys. As long as `whole` is true, everything is within reach, and every legal layout is priced. What is beyond
    `reach` is of no interest, whether a safe candidate is known or not. If `safe_alone`, nothing is asked about layouts
    that are not safe.
    """

    def __init__(
        self,
        exact: int,
        keys_of: Callable[[Points], FloatColumn],
        whole: bool = False,
        reach: Reach = ANYWHERE,
        safe_alone: bool = False,
    ) -> None:
        self.whole = whole
        self.reach = reach
        self.safe_alone = safe_alone
        # Whether any safe candidate is known, or only safe ones are of interest: the others need not be priced then.
        self.any_safe = not reach.everything
        self.first_safe: Points | None = None  # the first safe candidate
        self._keys_of = keys_of
        self._best = np.full(exact, np.inf)
        self._cap = reach.most_key * (1.0 + SLACK)

    @classmethod
    def of_whole(cls) -> Incumbents:
        """Return incumbents that put nothing out of reach."""
        return cls(1, lambda points: points.rows.step_seconds, whole=True)

    @property
    def key_to_beat(self) -> float:
        """The longest a candidate may take to be within reach."""
        return min(self._cap, float(self._best[-1]) * (1.0 + SLACK))

    @property
    def none(self) -> bool:
        """Whether too few safe candidates are known to put anything out of reach."""
        return bool(np.isinf(self.key_to_beat) and self.reach.everything)

    @property
    def unsafe_are_lost(self) -> bool:
        """Whether a candidate that cannot fit memory need not be priced: something safe is known, or nothing else is
        asked for."""
        return self.any_safe or self.safe_alone

    @contextmanager
    def looking_ahead(self) -> Iterator[None]:
        """Let the points that are added meanwhile put others out of reach, though they are to be added once more. Those
        that are not safe are no points then."""
        best, safe_alone, self.safe_alone = self._best, self.safe_alone, True
        yield
        self._cap, self._best, self.safe_alone = self.key_to_beat, best, safe_alone

    def in_reach(self, least_seconds: FloatColumn) -> BoolColumn:
        """Whether candidates that take at least so long may still be among those that must be exact."""
        if self.whole:
            return np.ones(least_seconds.shape, dtype=np.bool_)
        return np.less_equal(least_seconds, self.key_to_beat)

    def in_time(self, least_seconds: FloatColumn) -> BoolColumn:
        """Whether steps of candidates that take at least so long may be within `reach`."""
        return np.less_equal(least_seconds, self.reach.most_seconds * (1.0 + SLACK))

    def add(self, safe: Points) -> None:
        """Add safe points that are priced. The keys of the few that can be among the best are asked for."""
        self.any_safe |= len(safe) > 0
        if len(safe) and self.first_safe is None:
            self.first_safe = safe.take(slice(0, 1)).compact
        near = safe.take(safe.rows.step_seconds <= self._best[-1])
        if len(near):
            keys = self._keys_of(near.compact)
            self._best = np.sort(np.concatenate([self._best, keys]))[: len(self._best)]


Evidence = TypeVar("Evidence", Rehearsal, MeasuredStep)


def points_of(evidence: Iterable[Evidence], recipe: Recipe, points: Points) -> Mapping[int, Evidence]:
    """Map point indices to the evidence on exactly that layout, with the same techniques and workload."""
    by_row: dict[int, Evidence] = {}
    for one_layout in evidence:
        for row in _rows_of_layout(points, one_layout.layout):
            if same_techniques(recipe, *points.techniques(row), one_layout):
                by_row[row] = one_layout
    return by_row


def rehearsals_of_points(setting: Setting, points: Points) -> Mapping[int, Rehearsal]:
    """Map point indices to the rehearsals that decide about them: those of their own techniques, else what one that
    refutes other techniques of the same layout leads to expect."""
    by_row: dict[int, Rehearsal] = {}
    for rehearsal in _refuting(setting):
        for row in _rows_of_layout(points, rehearsal.layout):
            expected = _expected(setting, rehearsal, int(points.rows.device_bytes[row]))
            if expected is not None and (row not in by_row or by_row[row].device_bytes < expected.device_bytes):
                by_row[row] = expected
    return {**by_row, **points_of(setting.lessons.rehearsals, setting.recipe, points)}


def refuted(setting: Setting, points: Points) -> BoolColumn:
    """Return which points a rehearsal refuses, whatever their estimate."""
    result = np.zeros(len(points), dtype=np.bool_)
    if any(_refuting(setting)):
        for row, rehearsal in rehearsals_of_points(setting, points).items():
            result[row] = rehearsal.refuses(setting.limit.limit_bytes)
    return result


def evidence_of(evidence: Iterable[Evidence], recipe: Recipe, layout: Layout) -> Evidence | None:
    """Return the evidence on one layout with the techniques of `recipe`."""
    own = recipe.workload, recipe.techniques, recipe.training.gradient_dtype
    return next((e for e in evidence if e.layout == layout and _ran_with(e) == own), None)


def rehearsal_on(setting: Setting, layout: Layout, device_bytes: int) -> Rehearsal | None:
    """Return the rehearsal that decides about one layout, predicted to need `device_bytes`, with the techniques of the
    setting's recipe."""
    own = evidence_of(setting.lessons.rehearsals, setting.recipe, layout)
    others = (_expected(setting, r, device_bytes) for r in _refuting(setting) if r.layout == layout)
    return own or max((e for e in others if e is not None), key=lambda e: e.device_bytes, default=None)


def same_split(splits: LayoutColumns, layout: Layout) -> BoolColumn:
    """Whether each split has the layout's sizes: few of millions of points are then compared one by one."""
    same = np.ones(len(splits), dtype=np.bool_)
    for name in SPLIT_FIELDS:
        same &= np.equal(getattr(splits, name), getattr(layout, name))
    return same


def same_techniques(
    recipe: Recipe, step: StepTechniques, state: StateTechniques, evidence: Rehearsal | MeasuredStep
) -> bool:
    """Whether the evidence is on the workload of the recipe with these techniques."""
    return _ran_with(evidence) == (recipe.workload, all_techniques(recipe, step, state), state.gradient_dtype)


def _ran_with(evidence: Rehearsal | MeasuredStep) -> tuple[object, ...]:
    return evidence.workload, evidence.techniques, evidence.gradient_dtype


def _rows_of_layout(points: Points, layout: Layout) -> list[int]:
    rows: IntColumn = np.flatnonzero(same_split(points.splits, layout)[points.rows.split])
    return [row for row in rows.tolist() if points.layout(row) == layout]


def _refuting(setting: Setting) -> list[Rehearsal]:
    return [r for r in setting.lessons.rehearsals if not r.safe and r.workload == setting.recipe.workload]


def _expected(setting: Setting, refuting: Rehearsal, device_bytes: int) -> Rehearsal | None:
    """Return what is expected of other techniques of a refuted layout that are predicted to need `device_bytes`; None
    where they need so much less that they are safe even so."""
    expected_bytes = device_bytes + refuting.short_bytes
    if expected_bytes <= refuting.limit_bytes:
        return None
    # how much more than the card one that ran out would have taken, nobody knows
    tight = expected_bytes <= setting.limit.most_bytes and not refuting.ran_out
    sentence = f"{refuting.sentence}; with other techniques this layout is taken to be off by as much"
    verdict = {"verdict": TIGHT if tight else UNSAFE, "sentence": sentence, "device_bytes": expected_bytes}
    return replace(
        refuting,
        tight=tight,
        device_bytes=expected_bytes,
        sentence=sentence,
        details={**refuting.details, **verdict},
    )
