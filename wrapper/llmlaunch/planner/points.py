"""Priced candidates as columns: a million layouts with their techniques, bytes and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cached_property

import numpy as np

from llmlaunch.backends.base import StateTechniques, StepTechniques
from llmlaunch.columns import BoolColumn, FloatColumn, IntColumn
from llmlaunch.frozen import frozen
from llmlaunch.layout import Layout, LayoutColumns

__all__ = ["NO_ROWS", "Points", "Rows", "join_rows"]


@frozen
class Rows:
    """Priced points as columns: indices of the split and of each kind of techniques, the amounts, and the costs. Bytes
    are of the worst pipeline rank's device and of a node."""

    split: IntColumn
    step_techniques: IntColumn
    state_techniques: IntColumn
    recompute_layers: IntColumn
    offload_layers: IntColumn
    device_bytes: FloatColumn
    worst_pipeline_rank: IntColumn
    host_bytes: FloatColumn
    step_seconds: FloatColumn

    def __len__(self) -> int:
        return len(self.split)

    def take(self, mask: BoolColumn) -> Rows:
        return Rows(**{f.name: getattr(self, f.name)[mask] for f in fields(self)})


_NONE, _NO_BYTES = np.zeros(0, dtype=np.int64), np.zeros(0)
NO_ROWS = Rows(_NONE, _NONE, _NONE, _NONE, _NONE, _NO_BYTES, _NONE, _NO_BYTES, _NO_BYTES)


def join_rows(blocks: Sequence[Rows]) -> Rows:
    """Concatenate blocks of rows."""
    blocks = [*blocks, NO_ROWS]
    return Rows(**{f.name: np.concatenate([getattr(block, f.name) for block in blocks]) for f in fields(Rows)})


@frozen
class Points:
    """Priced candidates: `rows` over the splits and the techniques they point to."""

    splits: LayoutColumns
    step_techniques: Sequence[StepTechniques]
    state_techniques: Sequence[StateTechniques]
    rows: Rows

    def __len__(self) -> int:
        return len(self.rows.split)

    def extended(self, splits: Sequence[LayoutColumns], blocks: Sequence[Rows]) -> Points:
        """Return these points and more: each block of rows over splits of its own."""
        starts = np.cumsum([len(self.splits), *(len(more) for more in splits)])[: len(blocks)]
        moved = [replace(block, split=block.split + start) for block, start in zip(blocks, starts, strict=True)]
        return replace(self, splits=LayoutColumns.joined([self.splits, *splits]), rows=join_rows([self.rows, *moved]))

    def take(self, mask: BoolColumn) -> Points:
        return replace(self, rows=self.rows.take(mask))

    @property
    def compact(self) -> Points:
        """The same points over the splits that they need, one for each point."""
        rows = self.rows
        return replace(self, splits=self.splits.take(rows.split), rows=replace(rows, split=np.arange(len(rows))))

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
        if name in ("recompute_layers", "offload_layers"):
            amount: IntColumn = getattr(self.rows, name)
            return amount
        column: IntColumn = getattr(self.splits, name)[self.rows.split]
        return column

    def _layouts_at(self, index: IntColumn) -> LayoutColumns:
        rows = self.rows
        return replace(
            self.splits.take(rows.split[index]),
            zero_stage=self._zero_stages[rows.state_techniques[index]],
            recompute=self._recompute_codes[rows.step_techniques[index]],
            recompute_layers=rows.recompute_layers[index],
            offload_layers=rows.offload_layers[index],
        )

    @property
    def _zero_stages(self) -> IntColumn:
        return np.array([state.zero_stage for state in self.state_techniques], dtype=np.int64)

    @property
    def _recompute_codes(self) -> IntColumn:
        return np.array([step.recompute for step in self.step_techniques], dtype=np.int64)
