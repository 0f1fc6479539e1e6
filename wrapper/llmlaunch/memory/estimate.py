"""The result of the estimator: bytes per pipeline rank and term."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Estimate", "RankEstimate"]


@dataclass(frozen=True)
class RankEstimate:
    """One pipeline rank. `terms` sum to `device_bytes` exactly; allocated and reserved are partial sums of them."""

    pipeline_rank: int
    terms: Mapping[str, int]
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int


@dataclass(frozen=True)
class Estimate:
    """All pipeline ranks of one layout. `peak_kind` is what `device_bytes` means: "device" on GPUs, "resident"
    on a CPU-only machine. `fault` is a law of memory that the estimate breaks (memory/guard.py): then llmlaunch is
    wrong, and nothing may be called safe by it."""

    ranks: tuple[RankEstimate, ...]
    host_bytes_per_node: int | None  # null: the nodes are not known
    peak_kind: str = "device"
    host_terms: Mapping[str, int] = field(default_factory=dict)  # they sum to host_bytes_per_node
    fault: str | None = None

    @property
    def worst(self) -> RankEstimate:
        """The rank with the largest device bytes; the first of equals."""
        return max(self.ranks, key=lambda r: (r.device_bytes, -r.pipeline_rank))
