"""MiniMax-M2 (transformers/models/minimax_m2, 5.23). Released files name the turned part of a head `rotary_dim`, and
modules for multi-token prediction, which transformers builds none of."""

from __future__ import annotations

from dataclasses import replace

from llmlaunch.families.decoder import (
    COMMON,
    LOCAL_EXPERTS,
    ROTARY_PERCENT,
    auxiliary,
    local_experts,
    only_if_given,
    refuse_jitter,
    rotary_percent,
    silu_decoder,
    written_auxiliary,
)
from llmlaunch.families.family import MIXTURE_DECODER, ConfigReader, Family
from llmlaunch.models.shape import ModelShape, Router


def read(reader: ConfigReader) -> ModelShape:
    only_if_given(reader, "scoring_func", "sigmoid")
    only_if_given(reader, "use_qk_norm", True)
    only_if_given(reader, "qk_norm_type", "per_layer")
    if reader.values.get("use_mtp"):
        reader.remark("multi-token prediction is left out, as transformers does")
    refuse_jitter(reader)
    shape, turned = silu_decoder(reader), reader.values.get("rotary_dim")
    router = Router("sigmoid", expert_bias=True, **auxiliary(reader))
    return replace(
        shape,
        qk_layernorm=True,
        qk_norm_of_all_heads=True,
        rotary_percent=rotary_percent(reader) if turned is None else reader.size("rotary_dim") / shape.head_dim,
        moe=local_experts(reader, shape, router),
    )


FAMILY = Family(
    read=read,
    write=written_auxiliary,
    keys=(*MIXTURE_DECODER, *LOCAL_EXPERTS, *ROTARY_PERCENT),
    defaults={
        **COMMON,
        "vocab_size": 200064,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "rope_theta": 5000000.0,
        "partial_rotary_factor": 1.0,
        "num_experts_per_tok": 8,
        "num_local_experts": 256,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
    },
    aliases={"num_experts": "num_local_experts"},
    needs=("moe",),
    mark=lambda shape: shape.moe is not None and shape.qk_norm_of_all_heads,
    precedence=130,
)
