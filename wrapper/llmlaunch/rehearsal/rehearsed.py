"""One pipeline rank that is run alone, and what it showed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from llmlaunch.memory.estimate import RankEstimate

__all__ = ["ON_GPU", "ON_TRACE", "AskedRank", "Place", "RehearsedRank"]

Place = Literal["gpu", "trace"]
ON_GPU: Place = "gpu"
ON_TRACE: Place = "trace"


@dataclass(frozen=True)
class AskedRank:
    """A pipeline rank to run alone, and those that hold the same (itself among them)."""

    predicted: RankEstimate
    stands_for: tuple[int, ...]

    @property
    def pipeline_rank(self) -> int:
        return self.predicted.pipeline_rank


@dataclass(frozen=True)
class RehearsedRank:
    """One pipeline rank, and those in `stands_for` (itself among them), which hold the same.

    `allocated_bytes` is the peak of what torch's allocator handed out: counted in a trace, read from torch on a GPU.
    `reserved_bytes` is what that allocator took from the device for it: a replay of its rules in a trace
    (unvalidated), torch's own number on a GPU. `process_bytes` is what NVML says of the process on a GPU, with CUDA's
    context and without NCCL; None in a trace. All are what the rank had reached where it `ran_out` of memory, and None
    where nobody saw them. `terms` are the rehearsed bytes by the names of the estimate's terms, as far as what was
    alive at the peak can be told apart; they sum to `allocated_bytes`; empty where that is not known (on a GPU).
    `versions` are those of the frameworks that ran, by package; `remarks` are sentences for the person.
    `tracer_bytes` is the resident peak of the process that traced it, on this machine.
    """

    pipeline_rank: int
    on: Place
    predicted: RankEstimate
    allocated_bytes: int | None
    reserved_bytes: int | None = None
    process_bytes: int | None = None
    ran_out: bool = False
    stands_for: tuple[int, ...] = ()
    terms: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    remarks: tuple[str, ...] = ()
    tracer_bytes: int | None = None
