"""GPT-OSS (transformers/models/gpt_oss, 5.23): biases everywhere, the router's included; every second layer attends to
everything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmlaunch.families.decoder import (
    COMMON,
    LOCAL_EXPERTS,
    alternating_window,
    auxiliary,
    local_experts,
    silu_decoder,
    written_auxiliary,
    written_windows,
)
from llmlaunch.families.family import MIXTURE_DECODER, ConfigReader, Family
from llmlaunch.models.shape import CLAMP, CLAMPED, ModelShape, Router


def read(reader: ConfigReader) -> ModelShape:
    reader.only("attention_bias", True, why="attention has biases, as the experts have: must be true")
    reader.only("swiglu_alpha", 1.702, why="gates are multiplied by 1.702 before their sigmoid")
    reader.only("swiglu_limit", CLAMP, why=f"gate and up are held within {CLAMP}")
    shape = replace(
        silu_decoder(reader),
        linear_bias=True,
        activation=CLAMPED,
        attention_sinks=True,
        sliding_window=alternating_window(reader, 2, None),
    )
    return replace(shape, moe=local_experts(reader, shape, Router(**auxiliary(reader))))


def write(shape: ModelShape) -> dict[str, Any]:
    scaling = {"rope_scaling": {"rope_type": "default"}} if shape.rope_scaling is None else {}
    return {**written_windows(shape), **scaling, **written_auxiliary(shape)}


FAMILY = Family(
    read=read,
    write=write,
    keys=(*MIXTURE_DECODER, *LOCAL_EXPERTS),
    defaults={
        **COMMON,
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "attention_bias": True,
        "sliding_window": 128,
        "layer_types": None,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "router_aux_loss_coef": 0.001,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    aliases={"num_experts": "num_local_experts"},
    needs=("moe",),
    mark=lambda shape: shape.attention_sinks,
    precedence=240,
    wide_norms=True,
)
