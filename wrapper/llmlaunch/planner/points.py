"""Priced candidates as columns: a million layouts with their techniques, bytes and seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from llmlaunch.columns import BoolColumn, FloatColumn, IntColumn, NarrowColumn
from llmlaunch.frameworks.base import StateTechniques, StepTechniques
from llmlaunch.frozen import frozen
from llmlaunch.layout import AMOUNTS, OFFLOAD_LAYERS, RECOMPUTE_LAYERS, Layout, LayoutColumns


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
