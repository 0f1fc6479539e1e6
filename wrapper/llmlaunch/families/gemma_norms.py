"""Decoders whose norms multiply by 1 + weight and whose embedding is scaled by the root of its width
(transformers/models/gemma, gemma2 and gemma3, 5.23), and those with norms behind attention and MLP, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmlaunch.documents.validate import BadKey
from llmlaunch.families.decoder import COMMON, NO_BIAS, decoder, without, written_windows
from llmlaunch.families.family import ConfigKey, ConfigReader, read_keys
from llmlaunch.models.shape import ModelShape

ACTIVATION = "gelu_pytorch_tanh"
CAPPED_LOGITS = ConfigKey("final_logit_softcapping", "logit_softcap", ConfigReader.optional_number)
SOFTCAPS = (ConfigKey("attn_logit_softcapping", "attention_softcap", ConfigReader.optional_number), CAPPED_LOGITS)
NORM_DEFAULTS: Mapping[str, Any] = {
    **COMMON,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "attention_bias": False,
}
POST_NORM_DEFAULTS: Mapping[str, Any] = {
    **without(NORM_DEFAULTS, "hidden_act"),
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": ACTIVATION,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}


def with_scaled_embedding(reader: ConfigReader, shape: ModelShape) -> ModelShape:
    """Return a decoder with these norms and this embedding. Raises BadKey."""
    reader.only("attention_bias", False, why=NO_BIAS)
    if reader.values.get("use_bidirectional_attention"):
        raise BadKey(("use_bidirectional_attention",), "only causal attention is supported; set it to false")
    return replace(shape, activation="gelu", zero_centered_norm=True, scaled_embedding=True)


def post_norm_decoder(reader: ConfigReader) -> ModelShape:
    """Return a decoder with four norms in a layer, caps and a scale of scores of its own. Raises BadKey."""
    shape = with_scaled_embedding(reader, decoder(reader, "hidden_activation"))
    scale = reader.number("query_pre_attn_scalar", above=0.0)
    return replace(
        shape,
        post_norms=True,
        attention_scale=None if scale == shape.head_dim else scale,
        **read_keys(reader, SOFTCAPS),
    )


def written_post_norms(shape: ModelShape) -> dict[str, Any]:
    """Return the windows, the activation and the scale of scores."""
    scale = shape.attention_scale or float(shape.head_dim)
    return {
        **written_windows(shape),
        "hidden_activation": ACTIVATION,
        "query_pre_attn_scalar": int(scale),
    }
