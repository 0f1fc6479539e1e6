"""Predicted against rehearsed bytes of one pipeline rank, by term."""

from __future__ import annotations

from dataclasses import dataclass

from llmlaunch.memory.terms import OUTSIDE_TORCH
from llmlaunch.rehearsal.rehearsed import ON_TRACE, RehearsedRank

__all__ = ["CACHE", "Line", "Peak", "compared", "headline"]

CACHE = "allocator_cache"


@dataclass(frozen=True)
class Line:
    """One term of what torch's allocator handed out. `rehearsed_bytes` None: what was alive could not be told apart."""

    term: str
    predicted_bytes: int
    rehearsed_bytes: int | None


@dataclass(frozen=True)
class Peak:
    """The same peak predicted and rehearsed. `kind` is "allocated", or "device" of what a process has on a GPU by NVML,
    without NCCL. `rehearsed_bytes` None: nobody saw it."""

    kind: str
    predicted_bytes: int
    rehearsed_bytes: int | None

    @property
    def difference(self) -> float | None:
        """How far the rehearsed peak is above the predicted one, as a share of it: 0.02 is 2 % more."""
        if self.rehearsed_bytes is None or not self.predicted_bytes:
            return None
        return self.rehearsed_bytes / self.predicted_bytes - 1.0


def compared(rank: RehearsedRank) -> tuple[Line, ...]:
    """By the estimate's terms, in its order; then terms that only the rehearsal knows. Terms that are nothing in both
    are left out."""
    predicted = {name: count for name, count in rank.predicted.terms.items() if name not in (CACHE, *OUTSIDE_TORCH)}
    names = dict.fromkeys((*predicted, *rank.terms))
    lines = (Line(name, predicted.get(name, 0), rank.terms.get(name, 0) if rank.terms else None) for name in names)
    return tuple(line for line in lines if line.predicted_bytes or line.rehearsed_bytes)


def headline(rank: RehearsedRank) -> Peak:
    """The one peak that is compared: what a trace counts exactly, or all that a process has on a GPU but NCCL's."""
    predicted = rank.predicted
    if rank.on == ON_TRACE or rank.process_bytes is None:
        return Peak("allocated", predicted.allocated_bytes, rank.allocated_bytes)
    alone = predicted.device_bytes - predicted.terms.get("communicators", 0)
    return Peak("device", alone, rank.process_bytes)
