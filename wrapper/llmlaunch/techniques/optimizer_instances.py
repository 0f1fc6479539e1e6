"""Several groups of data-parallel ranks shard the optimizer, each for itself."""

from __future__ import annotations

from llmlaunch.documents.keys import section
from llmlaunch.techniques.technique import technique

__all__ = ["OptimizerInstances"]


@section
class OptimizerInstances:
    """Megatron's `--num-distributed-optimizer-instances`."""

    optimizer_instances: int = technique(
        "megatron-lm: groups of data-parallel ranks that shard the optimizer each for itself; absent = 1, all ranks",
        default=1,
        written=int | None,
        ge=1,
        le=2**16,
        source="MiCS (Zhang et al. 2022)",
        saves="nothing: each group keeps all states of the optimizer",
        costs="states of more groups; gradients and parameters travel in smaller groups, as in one rack",
    )
