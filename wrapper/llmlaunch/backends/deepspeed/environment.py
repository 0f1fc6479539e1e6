"""The variables DeepSpeed's ranks need, and what each follows from."""

from __future__ import annotations

from llmlaunch.backends.argument import Reason
from llmlaunch.backends.conflicts import merged_environment
from llmlaunch.recipe.types import Recipe

__all__ = ["CPU_ACCELERATOR", "MALLOC", "REASONS", "environment"]

# glibc keeps freed blocks of up to 32 MiB once it has seen some. With these thresholds tensors go back to the kernel,
# and resident memory is what the tensors need (docs/deepspeed-memory.md, "Resident memory on a CPU").
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072"}
CPU_ACCELERATOR = {"DS_ACCELERATOR": "cpu"}

_FREED = Reason(("cluster",), "without a GPU the peak is resident memory: freed tensors go back to the kernel")
REASONS = {
    "OMP_NUM_THREADS": Reason(why="one CPU thread per rank, as torchrun would set"),
    "TOKENIZERS_PARALLELISM": Reason(why="each rank reads its own text; threads of tokenizers would fight for cores"),
    "PYTORCH_CUDA_ALLOC_CONF": Reason(
        why="expandable segments keep long runs from dying of fragmentation well under the card's size"
    ),
    "DS_ACCELERATOR": Reason(("cluster",), "the cluster has no GPU, and DeepSpeed would look for one"),
    "MALLOC_MMAP_THRESHOLD_": _FREED,
    "MALLOC_TRIM_THRESHOLD_": _FREED,
}


def environment(recipe: Recipe) -> dict[str, str]:
    """Raises UserError where the recipe sets one that must be so to something else."""
    wanted = {"TOKENIZERS_PARALLELISM": "false"}
    if not recipe.techniques.steps_on_the_host:  # else train.sh shares out the cores of the node
        wanted["OMP_NUM_THREADS"] = "1"
    if recipe.cluster.accelerator.kind == "gpu":
        return merged_environment(recipe, wanted | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, {}, "")
    because = f"cluster {recipe.cluster.name}, which has no GPU,"
    return merged_environment(recipe, wanted | MALLOC, CPU_ACCELERATOR, because)
