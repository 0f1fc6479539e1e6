"""Gated delta nets, and attention with a gate at even distances among them (transformers/models/qwen3_next and qwen3_5,
5.23)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmlaunch.families.decoder import (
    COMMON,
    FULL,
    NO_BIAS,
    ROTARY_PERCENT,
    full_attention_period,
    only_if_given,
    silu_decoder,
)
from llmlaunch.families.family import MOST_LAYERS, ConfigKey, ConfigReader, read_keys, up_to
from llmlaunch.models.shape import LinearAttention, ModelShape

LINEAR = "linear_attention"
LINEAR_ATTENTION = (
    ConfigKey("linear_num_key_heads", "linear_attention.num_key_heads"),
    ConfigKey("linear_num_value_heads", "linear_attention.num_value_heads"),
    ConfigKey("linear_key_head_dim", "linear_attention.key_head_dim"),
    ConfigKey("linear_value_head_dim", "linear_attention.value_head_dim"),
    ConfigKey("linear_conv_kernel_dim", "linear_attention.conv_kernel", up_to(64)),
)
DELTA_NET_DEFAULTS: Mapping[str, Any] = {
    **COMMON,
    "vocab_size": 248320,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "attention_bias": False,
    "layer_types": None,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
SHARED_EXPERT_DEFAULTS: Mapping[str, Any] = {
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "router_aux_loss_coef": 0.001,
}


def delta_net_decoder(reader: ConfigReader) -> ModelShape:
    """Return a decoder whose layers are gated delta nets, and every fourth attention with a gate. Raises BadKey.

    Norms multiply by 1 + weight, but for those over the heads of the delta nets. Released files have a module for
    multi-token prediction, which transformers builds none of, and positions in three parts, which are one in text.
    """
    reader.only("attention_bias", False, why=NO_BIAS)
    only_if_given(reader, "attn_output_gate", True)
    if reader.values.get("mtp_num_hidden_layers"):
        reader.remark("multi-token prediction is left out, as transformers does")
    linear = LinearAttention(full_every=_full_every(reader), **read_keys(reader, LINEAR_ATTENTION))
    return replace(
        silu_decoder(reader),
        qk_layernorm=True,
        zero_centered_norm=True,
        attention_gate=True,
        **read_keys(reader, ROTARY_PERCENT),
        linear_attention=None if linear.full_every == 1 else linear,
    )


def _full_every(reader: ConfigReader) -> int:
    """Return the period of layers with full attention among those with linear attention; 0 if there are none."""
    layers, kinds = reader.size("num_hidden_layers", largest=MOST_LAYERS), reader.get("layer_types")
    every = reader.size("full_attention_interval") if kinds is None else full_attention_period(kinds, layers, LINEAR)
    return every if every <= layers else 0


def has_delta_net(shape: ModelShape) -> bool:
    """Return whether a shape has what only these decoders have."""
    return shape.linear_attention is not None or shape.attention_gate


def written_kinds(shape: ModelShape) -> dict[str, Any]:
    """Return the kind of each layer."""
    return {"layer_types": [LINEAR if each else FULL for each in shape.linear_pattern]}
