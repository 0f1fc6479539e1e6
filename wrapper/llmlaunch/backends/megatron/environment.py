"""The variables Megatron-LM needs beside its arguments (core 0.19), and what each follows from."""

from __future__ import annotations

from llmlaunch.backends.argument import Reason
from llmlaunch.backends.conflicts import merged_environment
from llmlaunch.backends.megatron.techniques import technique_environment
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe

__all__ = ["REASONS", "environment"]

BLACKWELL = 10.0

REASONS = {
    "OMP_NUM_THREADS": Reason(why="one CPU thread per rank, as torchrun would set"),
    "PYTORCH_CUDA_ALLOC_CONF": Reason(
        why="expandable segments keep long runs from dying of fragmentation well under the card's size"
    ),
    "TORCH_NCCL_AVOID_RECORD_STREAMS": Reason(why="communication buffers are given back as soon as they are read"),
    "CUDA_DEVICE_MAX_CONNECTIONS": Reason(
        ("layout.tensor", "layout.context"),
        "orders collectives before the kernels they overlap with; arguments.py asserts it for tensor or context "
        "parallelism before Blackwell",
    ),
    "NVTE_CPU_OFFLOAD_V1": Reason(
        ("layout.offload_modules",),
        "Transformer Engine from 2.10 on would offload weights too, and arguments.py refuses to start without it",
    ),
}


def environment(recipe: Recipe, layout: Layout) -> dict[str, str]:
    """Raises UserError where the recipe's environment sets one that must be so to something else."""
    wanted = {
        "OMP_NUM_THREADS": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
    }
    capability = recipe.cluster.accelerator.compute_capability
    blackwell = capability is not None and float(capability) >= BLACKWELL
    split = layout.tensor > 1 or layout.context > 1
    required = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if split and not blackwell else {}
    required |= technique_environment(recipe.techniques)
    return merged_environment(recipe, wanted, required, f"Megatron-LM with this layout ({layout.describe()})")
