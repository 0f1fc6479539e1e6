"""How a Megatron-LM namespace splits the job, every size pinned: the inverse of frameworks/megatron/arguments.py,
sharding.py and techniques.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from llmlaunch.frameworks.megatron.namespace import HEADS, STAGES, Namespace
from llmlaunch.frameworks.megatron.sharding import STRATEGIES
from llmlaunch.recipe.layout_keys import ASKED_ONLY
from llmlaunch.techniques import FULL_ITERATION, WHOLE_LAYER, GraphScope, OffloadModule, RecomputeModule

__all__ = ["read_layout"]

# By `dest`: the size under `layout:`.
SIZES = {
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline",
    "context_parallel_size": "context",
}
OF_EXPERTS = {"expert_model_parallel_size": "expert", "expert_tensor_parallel_size": "expert_tensor"}
# Switches by `dest`; absent means off.
SWITCHES = {
    "tp_comm_overlap": "tp_comm_overlap",
    "moe_shared_expert_overlap": "overlap_shared_expert",
    "delay_wgrad_compute": "delay_weight_gradients",
}
MOST_LAYERS = 10_000
SHARDING_STAGES = {strategy: stage for stage, strategy in STRATEGIES.items()}


def read_layout(space: Namespace) -> dict[str, Any]:
    """Return the mapping `layout:`."""
    layout: dict[str, Any] = {"techniques": ASKED_ONLY} | {key: space.get(dest) or 1 for dest, key in SIZES.items()}
    if space.get("num_experts"):
        layout |= {key: space.get(dest) or 1 for dest, key in OF_EXPERTS.items()}
    if space.get("micro_batch_size"):
        layout["micro_batch_size"] = space["micro_batch_size"]
    layout["sequence_parallel"] = bool(space.get("sequence_parallel"))
    layout["zero_stage"] = zero_stage(space)
    layout["layers_by_stage"] = list(space[STAGES]) or "even"
    layout |= {HEADS: space[HEADS]} if HEADS in space else {}
    layout |= dict(_recompute(space))
    layout |= dict(_offload(space))
    layout |= {key: True for dest, key in SWITCHES.items() if space.get(dest)}
    layout |= dict(_communication(space))
    layout |= dict(_graphs(space))
    return layout


def zero_stage(space: Namespace) -> int:
    """Megatron-FSDP with a strategy that shards the optimizer alone is the distributed optimizer's stage."""
    if space.get("use_torch_fsdp2"):
        return max(STRATEGIES)
    if space.get("use_megatron_fsdp"):
        return SHARDING_STAGES.get(str(space.get("data_parallel_sharding_strategy")), 1)
    return int(bool(space.get("use_distributed_optimizer")))


def _recompute(space: Namespace) -> Iterator[tuple[str, Any]]:
    granularity = space.get("recompute_granularity") or "none"
    yield "recompute", granularity
    if granularity == "full":
        yield "recompute_method", space["recompute_method"]
        yield "recompute_layers", min(space["recompute_num_layers"], space.get("num_layers") or MOST_LAYERS)
    elif granularity == "selective":
        yield "recompute_modules", [name for name in space["recompute_modules"] if name in get_args(RecomputeModule)]


def _offload(space: Namespace) -> Iterator[tuple[str, Any]]:
    """What is not offloaded is pinned, too: a search would choose it."""
    fine = bool(space.get("fine_grained_activation_offloading"))
    modules = [name for name in space.get("offload_modules") or () if fine and name in get_args(OffloadModule)]
    layers = space.get("cpu_offloading_num_layers") or 0
    if not layers:
        yield "offload_modules", modules
    if modules and (space.get("activation_offload_fraction") or 1.0) < 1.0:
        yield "offload_fraction", space["activation_offload_fraction"]
    if not modules:
        yield "offload_layers", layers
    if space.get("use_distributed_optimizer") and (space.get("num_distributed_optimizer_instances") or 1) > 1:
        yield "optimizer_instances", space["num_distributed_optimizer_instances"]
    fraction = space.get("optimizer_offload_fraction")
    yield "offload_optimizer", (1.0 if fraction is None else fraction) if space.get("optimizer_cpu_offload") else 0.0


def _graphs(space: Namespace) -> Iterator[tuple[str, Any]]:
    """Parts of a layer that no recipe names (moe, mamba) are left out. Without any, whole layers are captured."""
    implementation, modules = space["cuda_graph_impl"], space["cuda_graph_modules"]
    scopes = [name for name in modules if name in get_args(GraphScope)]
    if implementation == FULL_ITERATION:
        yield "cuda_graphs", [FULL_ITERATION]
    elif implementation != "none":
        yield "cuda_graphs", scopes or ([] if modules else [WHOLE_LAYER])


def _communication(space: Namespace) -> Iterator[tuple[str, Any]]:
    if space.get("cross_entropy_loss_fusion"):
        yield "loss", "native"  # core 0.19 refuses te as unstable
    if (space.get("mlp_chunks_for_training") or 1) > 1:
        yield "mlp_chunks", space["mlp_chunks_for_training"]
    if space.get("overlap_moe_expert_parallel_comm") and not space.get("delay_wgrad_compute"):
        yield "overlap_expert_communication", True
    kinds = space.get("cp_comm_type")
    kind = kinds[0] if isinstance(kinds, (list, tuple)) and len(kinds) == 1 else kinds
    if kind in ("p2p", "a2a") and "cp_comm_type" in space.explicit:
        yield "context_comm", kind
    if space.get("num_experts"):
        dispatcher = space.get("moe_token_dispatcher_type")
        if dispatcher in ("allgather", "flex"):
            yield "token_dispatcher", dispatcher
        flex = space.get("moe_flex_dispatcher_backend")
        if dispatcher == "flex" and flex == "hybridep":
            yield "flex_backend", flex
            yield from _fixed_rows(space)


def _fixed_rows(space: Namespace) -> Iterator[tuple[str, Any]]:
    """Pages sized by what a first step happens to receive (a negative factor) have no size before a job runs; they are
    left out."""
    rows = space.get("moe_expert_rank_capacity_factor")
    if rows is None or rows < 1:
        return
    yield "expert_rank_capacity_factor", rows
    if not space.get("moe_paged_stash"):
        return
    device, host = (space[f"moe_paged_stash_buffer_size_factor_{where}"] for where in ("cuda", "cpu"))
    if device > 0 and host >= 0:
        page_size = space["moe_paged_stash_page_size"]
        yield "paged_stash", {"page_size": page_size, "device_factor": device, "host_factor": host}
