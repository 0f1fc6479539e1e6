"""The points of a search: which split, which words, what they come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from llmlaunch.backends.base import StateTechniques, StepTechniques
from llmlaunch.columns import FloatColumn, IntColumn
from llmlaunch.layout import Layout, LayoutColumns

__all__ = ["Points", "Rows", "join_rows"]


@dataclass(frozen=True)
class Rows:
    """Priced points as columns: which split, which words of each kind, the amounts, and what they come to. Bytes are
    of the worst pipeline rank's device and of a node."""

    split: IntColumn
    running: IntColumn
    held: IntColumn
    recompute_layers: IntColumn
    offload_layers: IntColumn
    device_bytes: FloatColumn
    worst_pipeline_rank: IntColumn
    host_bytes: FloatColumn
    step_seconds: FloatColumn

    def __len__(self) -> int:
        return len(self.split)

    def take(self, index: NDArray[np.bool_]) -> Rows:
        """The points a mask selects."""
        return Rows(**{f.name: getattr(self, f.name)[index] for f in fields(self)})


@dataclass(frozen=True)
class Points:
    """`rows` over the splits and the words they point to."""

    splits: LayoutColumns
    running: Sequence[StepTechniques]
    held: Sequence[StateTechniques]
    rows: Rows

    def __len__(self) -> int:
        return len(self.rows.split)

    def beside(self, splits: Sequence[LayoutColumns], blocks: Sequence[Rows]) -> Points:
        """These points and more: each block over splits of its own."""
        starts = np.cumsum([len(self.splits), *(len(more) for more in splits)])[: len(blocks)]
        moved = [replace(block, split=block.split + start) for block, start in zip(blocks, starts, strict=True)]
        return replace(self, splits=LayoutColumns.joined([self.splits, *splits]), rows=join_rows([self.rows, *moved]))

    def words(self, index: int) -> tuple[StepTechniques, StateTechniques]:
        return self.running[self.rows.running[index]], self.held[self.rows.held[index]]

    def layout(self, index: int) -> Layout:
        """One point as a layout."""
        return self.layouts_at(np.array([index])).row(0)

    @cached_property
    def layouts(self) -> LayoutColumns:
        """All points as layouts, made when first asked for."""
        return self.layouts_at(np.arange(len(self)))

    def column(self, name: str) -> IntColumn:
        """One field of all points, without making layouts of them."""
        if name == "zero_stage":
            return np.array([held.zero_stage for held in self.held], dtype=np.int64)[self.rows.held]
        if name == "recompute":
            return np.array([running.recompute for running in self.running], dtype=np.int64)[self.rows.running]
        if name in ("recompute_layers", "offload_layers"):
            amount: IntColumn = getattr(self.rows, name)
            return amount
        column: IntColumn = getattr(self.splits, name)[self.rows.split]
        return column

    def layouts_at(self, index: IntColumn) -> LayoutColumns:
        rows = self.rows
        stages = np.array([held.zero_stage for held in self.held], dtype=np.int64)
        codes = np.array([running.recompute for running in self.running], dtype=np.int64)
        return replace(
            self.splits.take(rows.split[index]),
            zero_stage=stages[rows.held[index]],
            recompute=codes[rows.running[index]],
            recompute_layers=rows.recompute_layers[index],
            offload_layers=rows.offload_layers[index],
        )


def join_rows(blocks: Sequence[Rows]) -> Rows:
    """One after the other."""
    return Rows(**{f.name: np.concatenate([getattr(block, f.name) for block in blocks]) for f in fields(Rows)})
