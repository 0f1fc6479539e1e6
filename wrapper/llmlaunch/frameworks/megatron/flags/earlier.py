"""Flags of earlier versions of Megatron-LM that none of the stored parsers has, with what they set under today's
names."""

from __future__ import annotations

from collections.abc import Mapping

from llmlaunch.frameworks.megatron.parser import ParserFlag
from llmlaunch.frozen import frozen


@frozen
class EarlierFlag:
    """How a flag was parsed, under today's `dest`, and what else it sets."""

    parsed: ParserFlag
    sets: Mapping[str, object]


def _earlier(dest: str, kind: str | None = None, sets: str | None = None, **also: object) -> EarlierFlag:
    return EarlierFlag(ParserFlag(dest, 0 if sets else 1, sets=sets, type=kind), also)


EARLIER: Mapping[str, EarlierFlag] = {
    "--checkpoint-num-layers": _earlier("recompute_num_layers", "int"),
    "--activations-checkpoint-method": EarlierFlag(
        ParserFlag("recompute_method", 1, ("uniform", "block"), type="str"), {"recompute_granularity": "full"}
    ),
    "--activations-checkpoint-num-layers": _earlier("recompute_num_layers", "int"),
    "--fp8-hybrid": _earlier("fp8", sets="hybrid"),
    "--fp8-e4m3": _earlier("fp8", sets="e4m3"),
    "--intermediate-size": _earlier("ffn_hidden_size", "int"),
    "--no-query-key-layer-scaling": _earlier("apply_query_key_layer_scaling", sets="False"),
    "--layernorm-epsilon": _earlier("layernorm_epsilon", "float"),
    "--use-rms-norm": _earlier("normalization", sets="RMSNorm"),
    "--qk-nope-head-dim": _earlier("qk_head_dim", "int"),  # Pai-Megatron-Patch
    "--qk-rope-head-dim": _earlier("qk_pos_emb_head_dim", "int"),
    "--num-mtp-predictor": _earlier("mtp_num_layers", "int"),
    "--expert-parallel-size": _earlier("expert_model_parallel_size", "int"),
}
"""Megatron-LM 2.x: megatron/arguments.py of v2.0 to v3.0; core 0.1 to 0.8: megatron/arguments.py,
training/arguments.py."""

EARLIER_NEUTRAL: Mapping[str, str] = {
    "log_batch_size_to_tensorboard": "written by the host",
    "log_learning_rate_to_tensorboard": "written by the host",
    "no_log_learnig_rate_to_tensorboard": "written by the host",
    "transformer_timers": "written by the host",
    "data_impl": "which tokens are read, and how the host reads them",
    "mmap_warmup": "which tokens are read, and how the host reads them",
    "no_async_tensor_model_parallel_allreduce": "when a gradient travels, not where it is kept",
}
"""Those that change no GPU memory, by `dest`, with the reason (Megatron-LM 2.x to core 0.12,
megatron/training/arguments.py)."""
