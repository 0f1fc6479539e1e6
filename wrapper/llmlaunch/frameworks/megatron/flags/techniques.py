"""The techniques that a layout goes with: recompute, offload, the loss, overlap, CUDA graphs."""

from __future__ import annotations

from typing import get_args

from llmlaunch.frameworks.megatron.cuda_graphs import MODULES_SINCE, graph_implementation
from llmlaunch.frameworks.megatron.facts import FUSED_LOSSES
from llmlaunch.frameworks.megatron.flags.row import (
    MODEL,
    PARSED,
    Flag,
    PlannedJob,
    SinceThen,
    Space,
    alias,
    chosen,
    flag,
    one_of,
    within,
)
from llmlaunch.frameworks.megatron.techniques import modules_of
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_SELECTIVE
from llmlaunch.techniques.switches import FULL_ITERATION, WHOLE_LAYER, GraphScope
from llmlaunch.techniques.treatments import OffloadModule, RecomputeModule

ADAM, DDP = "optimizer", "ddp"  # sections of Bridge
MOST_LAYERS = 10_000


def _selective(job: PlannedJob) -> bool:
    return job.layout.recompute == RECOMPUTE_SELECTIVE


def _full(job: PlannedJob) -> bool:
    return job.layout.recompute == RECOMPUTE_FULL


def _granularity(job: PlannedJob) -> object:
    return {RECOMPUTE_SELECTIVE: "selective", RECOMPUTE_FULL: "full"}.get(job.layout.recompute)


def _recomputed_layers(job: PlannedJob) -> int:
    if job.layout.recompute_layers:
        return job.layout.recompute_layers
    chunks = job.layout.pipeline * job.layout.virtual_pipeline
    all_of_a_chunk = max(job.layout.layers_by_stage, default=job.shape.num_layers // chunks)
    return 1 if job.techniques.recompute_method == "uniform" else all_of_a_chunk


def _read_modules(space: Space) -> object:
    if space.get("recompute_granularity") != "selective":
        return None
    return [name for name in space["recompute_modules"] if name in get_args(RecomputeModule)]


def _in_full(space: Space) -> bool:
    return space.get("recompute_granularity") == "full"


RECOMPUTE_ROWS: tuple[Flag, ...] = (
    flag(
        "--recompute-granularity",
        "layout.recompute",
        write=_granularity,
        read=lambda space: space.get("recompute_granularity") or "none",
    ),
    flag(
        "--recompute-modules",
        "layout.recompute_modules",
        write=lambda job: modules_of(job.techniques),
        when=_selective,
        read=_read_modules,
    ),
    *within(
        _in_full,
        flag("--recompute-method", "layout.recompute_method", when=_full, read=lambda space: space["recompute_method"]),
        flag(
            "--recompute-num-layers",
            "layout.recompute_layers",
            write=_recomputed_layers,
            when=_full,
            read=lambda space: min(space["recompute_num_layers"], space.get("num_layers") or MOST_LAYERS),
        ),
    ),
    alias("--recompute-activations", "layout.recompute"),
    alias("--checkpoint-activations", "layout.recompute", subject="old names and tests"),
)


def _moves_modules(job: PlannedJob) -> bool:
    return bool(job.techniques.offload_modules)


def _moved_modules(space: Space) -> list[str]:
    fine = bool(space.get("fine_grained_activation_offloading"))
    return [name for name in space.get("offload_modules") or () if fine and name in get_args(OffloadModule)]


def _moved_layers(space: Space) -> int:
    return space.get("cpu_offloading_num_layers") or 0


def _moved_share(space: Space) -> object:
    part = (space.get("activation_offload_fraction") or 1.0) < 1.0
    return space["activation_offload_fraction"] if _moved_modules(space) and part else None


def _instances(space: Space) -> object:
    instances = space.get("num_distributed_optimizer_instances") or 1
    return instances if space.get("use_distributed_optimizer") and instances > 1 else None


def _moves_optimizer(job: PlannedJob) -> bool:
    return bool(job.techniques.offload_optimizer)


def _moved_optimizer(space: Space) -> object:
    fraction = space.get("optimizer_offload_fraction")
    return (1.0 if fraction is None else fraction) if space.get("optimizer_cpu_offload") else 0.0


# What is not offloaded is pinned when it is read, too: a search would choose it.
OFFLOAD_ROWS: tuple[Flag, ...] = (
    chosen("--fine-grained-activation-offloading", keys="layout.offload_modules", when=_moves_modules),
    flag(
        "--offload-modules",
        "layout.offload_modules",
        when=_moves_modules,
        read=lambda space: None if _moved_layers(space) else _moved_modules(space),
    ),
    flag(
        "--activation-offload-fraction",
        "layout.offload_fraction",
        form=repr,
        when=lambda job: _moves_modules(job) and job.techniques.offload_fraction < 1.0,
        read=_moved_share,
        since=SinceThen("offload-fraction-since-0.19", lambda recipe: recipe.techniques.offload_fraction < 1.0),
    ),
    flag(
        "--cpu-offloading-num-layers",
        "layout.offload_layers",
        ((f"{MODEL}.cpu_offloading", True), (f"{MODEL}.cpu_offloading_num_layers", PARSED)),
        form=lambda layers: layers or None,
        read=lambda space: None if _moved_modules(space) else _moved_layers(space),
    ),
    flag(
        "--num-distributed-optimizer-instances",
        "layout.optimizer_instances",
        DDP,
        form=lambda instances: instances if instances > 1 else None,
        read=_instances,
    ),
    flag("--optimizer-cpu-offload", "layout.offload_optimizer", ADAM, write=_moves_optimizer, reads={}),
    flag(
        "--optimizer-offload-fraction",
        "layout.offload_optimizer",
        ADAM,
        form=repr,
        when=_moves_optimizer,
        read=_moved_optimizer,
    ),
    chosen(
        "--use-precision-aware-optimizer",
        keys="layout.offload_optimizer",
        why="--optimizer-cpu-offload needs it",
        when=_moves_optimizer,
        added="the offloaded optimizer needs it",
        subject="formats of the optimizer",
        bridge=None,
    ),
    chosen(
        "--overlap-cpu-optimizer-d2h-h2d",
        bridge=ADAM,
        keys="layout.offload_optimizer",
        why="hides the copies behind the step",
        when=_moves_optimizer,
        added="hides the copies of the offloaded optimizer",
        only_helps=True,
        subject="how the optimizer steps",
    ),
)


def _fused_loss(job: PlannedJob) -> object:
    return job.techniques.loss if job.techniques.loss in FUSED_LOSSES else None


def _read_loss(space: Space) -> object:
    return "native" if space.get("cross_entropy_loss_fusion") else None  # core 0.19 refuses te as unstable


DELAYED, EXCHANGE = "layout.delay_weight_gradients", "layout.overlap_expert_communication"


def _wide_gradients(job: PlannedJob) -> bool:
    return job.training.gradient_dtype == "fp32" and job.recipe.workload.precision == "fp16"


LOSS_ROWS: tuple[Flag, ...] = (
    flag("--cross-entropy-loss-fusion", "layout.loss", write=lambda job: _fused_loss(job) is not None, read=_read_loss),
    flag(
        "--cross-entropy-fusion-impl",
        "layout.loss",
        write=_fused_loss,
        reads={},
        unread="Transformer Engine's kernel is refused as unstable by core 0.19",
        unsaid=lambda values: not {*values} <= {"native", "te"},
    ),
    flag(
        "--mlp-chunks-for-training",
        "layout.mlp_chunks",
        form=lambda chunks: chunks if chunks > 1 else None,
        read=lambda space: (
            space["mlp_chunks_for_training"] if (space.get("mlp_chunks_for_training") or 1) > 1 else None
        ),
        since=SinceThen("chunks-since-0.19", lambda recipe: recipe.techniques.mlp_chunks > 1),
    ),
    flag(
        "--overlap-moe-expert-parallel-comm",
        DELAYED,
        write=lambda job: job.techniques.delay_weight_gradients,
        reads={},
        why="delayed weight gradients need it",
        decides=EXCHANGE,
        bridge=None,
    ),
    flag(
        "--delay-wgrad-compute", DELAYED, ((f"{MODEL}.delay_wgrad_compute", True), (f"{DDP}.delay_wgrad_compute", True))
    ),
    flag(
        "--grad-reduce-in-bf16",
        "training.gradient_dtype",
        ((f"{DDP}.grad_reduce_in_fp32", False),),
        form=lambda dtype: dtype == "bf16",
        read=lambda space: _gradients(space),
        decides=True,
    ),
    flag(
        "--accumulate-allreduce-grads-in-fp32",
        "training.gradient_dtype",
        ((f"{DDP}.grad_reduce_in_fp32", True),),
        write=_wide_gradients,
        reads={},
        decides=True,
    ),
)


def _gradients(space: Space) -> object:
    sharded = space.get("megatron_fsdp_main_grads_dtype") == "bf16"
    if space.get("bf16") and (space.get("grad_reduce_in_bf16") or sharded):
        return "bf16"
    return "fp32" if space.get("fp16") and space.get("accumulate_allreduce_grads_in_fp32") else None


def _explicit_context(space: Space) -> object:
    kinds = space.get("cp_comm_type")
    kind = kinds[0] if isinstance(kinds, (list, tuple)) and len(kinds) == 1 else kinds
    return kind if kind in ("p2p", "a2a") and "cp_comm_type" in getattr(space, "explicit", ()) else None


OVERLAP_ROWS: tuple[Flag, ...] = (
    flag("--tp-comm-overlap", "layout.tp_comm_overlap"),
    flag(
        "--cp-comm-type",
        "layout.context_comm",
        ((f"{MODEL}.cp_comm_type", one_of),),
        read=_explicit_context,
        subject="exchange of context parallelism",
    ),
    flag(
        "--overlap-moe-expert-parallel-comm",
        EXCHANGE,
        when=lambda job: not job.techniques.delay_weight_gradients,
        read=lambda space: (
            True if space.get("overlap_moe_expert_parallel_comm") and not space.get("delay_wgrad_compute") else None
        ),
    ),
)

GRAPHS = "layout.cuda_graphs"
TRACKED = "a graph cannot replay the usual generator's offsets"
BLIND = "a graph of the whole iteration cannot look at the loss"


def _graphs(job: PlannedJob) -> tuple[str, ...]:
    return job.techniques.cuda_graphs


def _by_modules(job: PlannedJob) -> bool:
    return job.version == MODULES_SINCE


def _whole_iteration(job: PlannedJob) -> bool:
    return _graphs(job) == (FULL_ITERATION,)


def _implementation(job: PlannedJob) -> object:
    return "local" if _whole_iteration(job) and not _by_modules(job) else graph_implementation(job.techniques)


def _captured_modules(job: PlannedJob) -> object:
    """No modules are all of them."""
    named = _graphs(job) and _graphs(job) not in ((FULL_ITERATION,), (WHOLE_LAYER,))
    return _graphs(job) if named and _by_modules(job) else None


def _captured_scope(job: PlannedJob) -> object:
    return _graphs(job) if _graphs(job) and not _by_modules(job) and _graphs(job) != (WHOLE_LAYER,) else None


def _read_graphs(space: Space) -> object:
    """Parts of a layer that no recipe names (moe, mamba) are left out. Without any, whole layers are captured."""
    implementation, modules = space["cuda_graph_impl"], space["cuda_graph_modules"]
    if implementation == "none":
        return None
    known = [name for name in modules if name in get_args(GraphScope)]
    return [FULL_ITERATION] if implementation == FULL_ITERATION else known or ([] if modules else [WHOLE_LAYER])


GRAPH_ROWS: tuple[Flag, ...] = (
    flag(
        "--cuda-graph-impl",
        GRAPHS,
        write=_implementation,
        read=_read_graphs,
        unsaid=lambda values: "local" in values,
        companion="cuda_graph_modules",
    ),
    flag(
        "--cuda-graph-modules",
        GRAPHS,
        write=_captured_modules,
        reads={},
        unsaid=lambda values: not {*values} <= {*get_args(GraphScope)},
    ),
    flag("--cuda-graph-scope", GRAPHS, write=_captured_scope, reads={}, bridge=None),
    chosen(
        "--te-rng-tracker",
        bridge=(("rng.te_rng_tracker", True), (f"{MODEL}.use_te_rng_tracker", True)),
        keys=GRAPHS,
        why=TRACKED,
        when=lambda job: bool(_graphs(job)),
        added=True,
        subject="initial values",
    ),
    chosen(
        "--no-check-for-nan-in-loss-and-grad",
        bridge=(("rerun_state_machine.check_for_nan_in_loss", False), (f"{DDP}.check_for_nan_in_grad", False)),
        keys=GRAPHS,
        why=BLIND,
        when=_whole_iteration,
        added=True,
        subject="checks of numbers and nodes",
    ),
    *(alias(name, GRAPHS) for name in ("--enable-cuda-graph", "--external-cuda-graph")),
)

TECHNIQUE_FLAGS: tuple[Flag, ...] = (*RECOMPUTE_ROWS, *OFFLOAD_ROWS, *LOSS_ROWS, *OVERLAP_ROWS, *GRAPH_ROWS)
