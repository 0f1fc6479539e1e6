"""Reading a decoder that nearly every family has, and the defaults that most configuration classes share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmlaunch.documents.validate import BadKey
from llmlaunch.families.config_keys import DECODER, read_keys
from llmlaunch.families.reader import ConfigReader
from llmlaunch.families.rotary import rope
from llmlaunch.models.shape import ModelShape

NO_BIAS = "biases of attention alone are not supported: must be false"

COMMON: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
}
OLD_CLASS: Mapping[str, Any] = {
    **COMMON,
    "intermediate_size": 11008,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "head_dim": None,
    "attention_bias": False,
}
"""Defaults of the oldest classes, and of those that are made of them."""
WINDOWLESS: Mapping[str, Any] = {
    **COMMON,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
}
"""Defaults of classes that have windows in their files and in no published model."""


def without(values: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Return `values` without some keys, which a class does not have."""
    return {key: value for key, value in values.items() if key not in keys}


def decoder(reader: ConfigReader, activation: str = "hidden_act") -> ModelShape:
    """Return the shape that nearly all families begin with: gated MLPs, RMSNorm, rotary positions. Raises BadKey."""
    values = read_keys(reader, DECODER)
    base, scaling = rope(reader)
    if activation == "hidden_activation":
        reader.only(activation, "gelu_pytorch_tanh", why="only gelu_pytorch_tanh is supported")
    return ModelShape(name="", **values, rotary_base=base, rope_scaling=scaling)


def silu_decoder(reader: ConfigReader) -> ModelShape:
    """Return the same with SwiGLU. Raises BadKey for another activation."""
    reader.only("hidden_act", "silu", why="only silu (SwiGLU) is supported")
    return decoder(reader)


def biased_decoder(reader: ConfigReader) -> ModelShape:
    """Return a decoder with SwiGLU whose linear layers have biases, or none has. Raises BadKey."""
    bias = reader.flag("attention_bias")
    if bias != reader.flag("mlp_bias"):
        raise BadKey(("attention_bias",), "attention_bias and mlp_bias must be both true or both false here")
    return replace(silu_decoder(reader), linear_bias=bias)


def written_biases(shape: ModelShape) -> dict[str, Any]:
    """Return whether attention and MLP have biases."""
    return {"attention_bias": shape.linear_bias, "mlp_bias": shape.linear_bias}


def only_if_given(reader: ConfigReader, key: str, value: str | int | None) -> None:
    """Raise BadKey where `key` is written with another value."""
    if key in reader.values:
        reader.only(key, value, why=f"only {value} is supported")


def refuse_jitter(reader: ConfigReader) -> None:
    """Raise BadKey for noise on what a router sees."""
    if reader.number("router_jitter_noise") != 0:
        raise BadKey(("router_jitter_noise",), "noise on what the router sees is not supported; set it to 0")
