"""Which layouts can load a checkpoint: for fallback layouts, and for fewer nodes."""

from __future__ import annotations

from llmlaunch.layers.parameters import count_parameters
from llmlaunch.layout import Layout
from llmlaunch.recipe.types import Recipe
from llmlaunch.units import GIB

# Sizes that must be the same for Megatron's distributed optimizer to find its buckets: "dp_reshardable" names them by
# model parallel rank and chunk (sharded_param_state_dp_reshardable, core/optimizer/distrib_optimizer.py, core 0.19).
# Context parallel ranks share them as data parallel ranks do.
MODEL_SPLIT = ("tensor", "pipeline", "virtual_pipeline", "expert", "expert_tensor", "layers_by_stage")
FSDP_STAGE = 2  # from this ZeRO stage on, Megatron-LM runs its FSDP
RESHARDING_FLAG = "--dist-ckpt-optim-fully-reshardable"
GATHERED_BYTES = 12.0
GATHERED_SHARE = 0.5


def reshards(recipe: Recipe, saved: Layout, loading: Layout) -> bool:
    """Return whether a checkpoint written under one layout can be loaded under another, including optimizer states.

    Recompute, offloaded activations and the micro-batch size never matter. The recipe's other settings (the format in
    which gradients accumulate, where the optimizer runs) must be the same in both.

    DeepSpeed's ZeRO loads a checkpoint only on the same number of ranks and at the same stage. Our script converts its
    checkpoints for another number of ranks unless `other_world_refusal` gives a reason against it.

    Megatron's torch_dist loads under any split of the model if `saved_by_parameter`; otherwise the split must be the
    same. Megatron-FSDP saves every parameter and its states as distributed tensors (sharded_param_state_fsdp_dtensor,
    core/optimizer/distrib_optimizer.py, core 0.19): the number of ranks over which they are sharded does not matter,
    but the tensor and expert parallel sizes do. The same holds for the format torch, whose files belong to one split
    and whose optimizer is saved whole.
    """
    if recipe.backend.script is not None or saved.zero_stage != loading.zero_stage:
        return False
    if recipe.backend.name == "deepspeed":
        return saved.data == loading.data or (
            saved.tensor == loading.tensor == 1 and not other_world_refusal(recipe, saved)
        )
    same_split = all(getattr(saved, name) == getattr(loading, name) for name in MODEL_SPLIT)
    if saved.zero_stage >= FSDP_STAGE or recipe.training.checkpoint_format == "torch":
        return same_split
    return (same_split and saved.world_size == loading.world_size) or saved_by_parameter(recipe, saved)


def other_world_refusal(recipe: Recipe, layout: Layout) -> str:
    """Return why a checkpoint of this layout cannot be loaded on another number of devices, and what to do about it.
    Return the empty text if it can.

    Our DeepSpeed script has DeepSpeed convert the checkpoint (deepspeed/checkpoint/ds_to_universal.py, 0.19.8): every
    parameter gets a file with its optimizer states. Frozen weights, AutoTP and offload have not been tried.
    """
    if recipe.backend.script is not None:
        return (
            "whether backend.script loads a checkpoint on another number of nodes is not known; leave at_least out, or "
            "train with the shipped script"
        )
    if recipe.backend.name not in ("megatron-lm", "deepspeed"):
        return f"{recipe.backend.name} was not tried on another number of nodes; leave at_least out"
    if recipe.backend.name == "deepspeed":
        if layout.tensor > 1:
            return "a DeepSpeed checkpoint cut by tensor parallelism is not converted for other ranks; pin tensor: 1"
        techniques = recipe.techniques
        if techniques.adapters is not None or techniques.trained_layers is not None:
            return "a DeepSpeed checkpoint with frozen weights is not converted for other ranks; leave at_least out"
        if techniques.offload_optimizer or techniques.offload_parameters:
            return "a DeepSpeed checkpoint of offloaded states is not converted for other ranks; take the offload out"
        return ""
    if layout.zero_stage >= FSDP_STAGE or recipe.training.checkpoint_format == "torch":
        return ""
    if saved_by_parameter(recipe, layout):
        return ""
    return (
        "to be loaded on other ranks, the optimizer states of this layout have to be gathered in host memory, "
        f"{_gathered_bytes(recipe, layout) / GIB:.0f} GiB on a node, and half of its "
        f"{recipe.cluster.host_memory_bytes / GIB:.0f} GiB may be taken; pin more tensor or pipeline ranks, or "
        "distributed_optimizer: false"
    )


def saved_by_parameter(recipe: Recipe, layout: Layout) -> bool:
    """Return whether Megatron's optimizer states are saved parameter by parameter, which any split can load.

    Without the distributed optimizer they always are. With it (--dist-ckpt-optim-fully-reshardable), every rank first
    gathers the states of its share of the model in host memory (get_parameter_state_dp_zero,
    core/optimizer/distrib_optimizer.py, core 0.19). So it is requested only if another layout may have to load the
    states and they fit in half of the node's memory.
    """
    if layout.zero_stage == 0 or RESHARDING_FLAG in recipe.backend.extra_args:
        return True
    after_oom = recipe.on_oom.layouts > 0 and recipe.on_oom.after_checkpoint != "stop"
    if not after_oom and recipe.at_least_nodes is None:
        return False
    return _gathered_bytes(recipe, layout) <= GATHERED_SHARE * recipe.cluster.host_memory_bytes


def _gathered_bytes(recipe: Recipe, layout: Layout) -> float:
    """Return the bytes of a node's host memory in which its ranks gather optimizer states."""
    shares = layout.tensor * layout.pipeline  # of dense layers; experts may be spread over more ranks, which needs less
    return GATHERED_BYTES * count_parameters(recipe.model).total / shares * recipe.cluster.devices_per_node
