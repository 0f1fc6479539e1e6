"""The variables Megatron-LM needs beside its arguments (core 0.19), and what each follows from."""

from __future__ import annotations

from llmlaunch.backends.argument import Reason
from llmlaunch.backends.conflicts import merged_environment
from llmlaunch.backends.megatron.sharding import FIRST_STAGE
from llmlaunch.backends.megatron.techniques import technique_environment
from llmlaunch.errors import UserError
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe

__all__ = ["REASONS", "environment"]

BLACKWELL = 10.0
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
USUAL_CONNECTIONS = "8"  # CUDA's own default

REASONS = {
    "OMP_NUM_THREADS": Reason(why="one CPU thread per rank, as torchrun would set"),
    "PYTORCH_CUDA_ALLOC_CONF": Reason(
        why="expandable segments keep long runs from dying of fragmentation well under the card's size"
    ),
    "TORCH_NCCL_AVOID_RECORD_STREAMS": Reason(why="communication buffers are given back as soon as they are read"),
    CONNECTIONS: Reason(
        ("layout.tensor", "layout.context", "layout.zero_stage"),
        "1 orders collectives before the kernels they overlap with; arguments.py asserts it for tensor or context "
        "parallelism before Blackwell, and refuses it for zero_stage 2 and 3",
    ),
    "NVTE_CPU_OFFLOAD_V1": Reason(
        ("layout.offload_modules",),
        "Transformer Engine from 2.10 on would offload weights too, and arguments.py refuses to start without it",
    ),
}


def _refuse_one_connection(recipe: Recipe) -> None:
    if recipe.environment.get(CONNECTIONS) == "1":
        raise UserError(
            f"{recipe.path}: environment.{CONNECTIONS}: is '1', and with zero_stage 2 or 3 arguments.py wants another "
            "value: gathering would wait for computation; remove the line"
        )


def environment(recipe: Recipe, layout: Layout) -> dict[str, str]:
    """Raises UserError where the recipe's environment sets one that must be so to something else."""
    wanted = {
        "OMP_NUM_THREADS": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
    }
    capability = recipe.cluster.accelerator.compute_capability
    blackwell = capability is not None and float(capability) >= BLACKWELL
    sharded = layout.zero_stage >= FIRST_STAGE
    split = layout.tensor > 1 or layout.context > 1
    required = {CONNECTIONS: "1"} if split and not blackwell and not sharded else {}
    if sharded:
        _refuse_one_connection(recipe)
        wanted[CONNECTIONS] = USUAL_CONNECTIONS
    required |= technique_environment(recipe.techniques)
    return merged_environment(recipe, wanted, required, f"Megatron-LM with this layout ({layout.describe()})")
