"""What a config.json of LFM2 means (transformers/models/lfm2, 5.23)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmlaunch.documents.validate import BadKey
from llmlaunch.models.huggingface.keys import LFM2_DECODER, SHORT_CONVOLUTION, read_keys
from llmlaunch.models.huggingface.reader import FULL, ConfigReader, rope, short
from llmlaunch.models.shape import ModelShape, ShortConvolutionShape

__all__ = ["LFM2", "lfm2"]

CONVOLUTION = "conv"  # the class's name of a layer without attention

# What its configuration class takes for a key that a config.json leaves out.
LFM2: Mapping[str, Any] = {
    "vocab_size": 65536,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "full_attn_idxs": None,
    "layer_types": None,
}
OTHER_NAMES = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}  # these go before


def lfm2(reader: ConfigReader) -> ModelShape:
    """Gated short convolutions among layers of attention with norms on queries and keys. SwiGLU is as wide as is
    written, or two thirds of it, rounded up."""
    named = {key: reader.values[other] for other, key in OTHER_NAMES.items() if other in reader.values}
    reader.values = {**reader.values, **named}
    width = _adjusted(reader) if reader.flag("block_auto_adjust_ff_dim") else reader.size("intermediate_size")
    reader.values = {**reader.values, "intermediate_size": width}
    base, scaling = rope(reader)
    values = read_keys(reader, LFM2_DECODER)
    attention = _attention_layers(reader, values["num_layers"])
    convolution = ShortConvolutionShape(attention, **read_keys(reader, SHORT_CONVOLUTION))
    return ModelShape(
        name="",
        **values,
        rotary_base=base,
        rope_scaling=scaling,
        qk_layernorm=True,
        short_convolution=None if {*range(values["num_layers"])} <= {*attention} else convolution,
    )


def _adjusted(reader: ConfigReader) -> int:
    """Return the width that the class works out of the one that is written (Lfm2MLP.__init__)."""
    width, multiple = 2 * reader.size("intermediate_size") // 3, reader.size("block_multiple_of")
    factor = reader.optional_number("block_ffn_dim_multiplier")
    if factor is None:
        return width
    return -(-int(factor * width) // multiple) * multiple


def _attention_layers(reader: ConfigReader, layers: int) -> tuple[int, ...]:
    """Return the layers that have attention, whichever key says them; all where none does."""
    kinds, places = reader.get("layer_types"), reader.get("full_attn_idxs")
    if kinds is None and places is None:
        return tuple(range(layers))
    if kinds is None:
        if not isinstance(places, list) or any(type(at) is not int or at < 0 for at in places):
            raise BadKey(("full_attn_idxs",), f"must be a list of layer numbers, not {short(places)}")
        return tuple(places)
    if not isinstance(kinds, list) or len(kinds) != layers or {*map(str, kinds)} - {FULL, CONVOLUTION}:
        raise BadKey(
            ("layer_types",), f"must name {FULL} or {CONVOLUTION} for each of {layers} layers, not {short(kinds)}"
        )
    return tuple(at for at, kind in enumerate(kinds) if kind == FULL)
