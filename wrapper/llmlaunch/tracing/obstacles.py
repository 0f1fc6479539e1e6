"""What a job may ask of Megatron that cannot be traced, or would be traced as something else: refused before it runs.

Each was met in Megatron core 0.19.2 and TransformerEngine 2.20.2; docs/tracing.md lists them for people.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from failures import Unsupported

__all__ = ["OBSTACLES", "insist_traceable"]

Asked = Callable[[Any], object]

# Flag, whether Megatron's parsed arguments ask for it, and why it cannot be traced.
OBSTACLES: tuple[tuple[str, Asked, str], ...] = (
    (
        "--fp8-format or --fp4-format",
        lambda args: args.fp8 or args.fp4,
        "8- and 4-bit products keep quantized copies that TransformerEngine's compiled part allocates "
        "(transformer_engine/pytorch/csrc/quantizer.cpp), and nothing here stands in for it",
    ),
    (
        "--use-megatron-fsdp or --use-torch-fsdp2",
        lambda args: args.use_megatron_fsdp or args.use_torch_fsdp2,
        "they shard over a mesh of devices, for which torch's fake backend has none",
    ),
    (
        "--moe-token-dispatcher-type flex",
        lambda args: args.moe_token_dispatcher_type == "flex",
        "DeepEP and HybridEP are compiled for GPUs (megatron/core/transformer/moe/token_dispatcher.py:1274)",
    ),
    (
        "--fine-grained-activation-offloading or --cpu-offloading-num-layers",
        lambda args: args.fine_grained_activation_offloading or args.cpu_offloading_num_layers,
        "TransformerEngine leaves fake tensors where they are (transformer_engine/pytorch/cpu_offload.py "
        "_check_if_offload), and the peak would be that without offload",
    ),
    (
        "--cuda-graph-impl",
        lambda args: args.cuda_graph_impl != "none" or args.enable_cuda_graph or args.external_cuda_graph,
        "graphs keep their tensors in memory pools of their own, and nothing is captured here",
    ),
    (
        "--tp-comm-overlap",
        lambda args: args.tp_comm_overlap,
        "userbuffers are allocated by TransformerEngine's compiled part "
        "(transformer_engine/pytorch/module/base.py initialize_ub)",
    ),
    (
        "--overlap-moe-expert-parallel-comm",
        lambda args: args.overlap_moe_expert_parallel_comm,
        "its schedule wants plans of pretrain_gpt.py's (megatron/core/pipeline_parallel/combined_1f1b.py:384), "
        "which the published wheel does not hold",
    ),
    (
        "--moe-paged-stash",
        lambda args: args.moe_paged_stash,
        "its kernels are Triton's, and decide what is kept (megatron/core/transformer/moe/paged_stash.py)",
    ),
)


def insist_traceable(args: Any) -> None:
    """Raises Unsupported with every obstacle that `args`, Megatron's as parsed, meet."""
    met = [f"{flag} cannot be traced: {why}" for flag, asked, why in OBSTACLES if asked(args)]
    if met:
        raise Unsupported("; ".join(met))
