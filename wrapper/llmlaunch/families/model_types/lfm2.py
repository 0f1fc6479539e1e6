"""What a config.json of LFM2 means (transformers/models/lfm2, 5.23)."""

from __future__ import annotations

from typing import Any

from llmlaunch.documents.validate import BadKey
from llmlaunch.families.decoder import FULL, rope
from llmlaunch.families.family import (
    ConfigKey,
    ConfigReader,
    Family,
    decoder_without,
    positive,
    read_keys,
    short,
    up_to,
)
from llmlaunch.models.shape import ModelShape, ShortConvolutionShape

CONVOLUTION = "conv"  # the class's name of a layer without attention

DECODER_KEYS = (
    *decoder_without("rms_norm_eps", "attention_dropout"),
    ConfigKey("norm_eps", "norm_epsilon", positive),
)
SHORT_CONVOLUTION = (
    ConfigKey("conv_L_cache", "short_convolution.kernel", up_to(64)),
    ConfigKey("conv_bias", "short_convolution.bias", ConfigReader.flag),
)
OTHER_NAMES = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}  # these go before


def read(reader: ConfigReader) -> ModelShape:
    """Gated short convolutions among layers of attention with norms on queries and keys. SwiGLU is as wide as is
    written, or two thirds of it, rounded up."""
    named = {key: reader.values[other] for other, key in OTHER_NAMES.items() if other in reader.values}
    reader.values = {**reader.values, **named}
    width = _adjusted(reader) if reader.flag("block_auto_adjust_ff_dim") else reader.size("intermediate_size")
    reader.values = {**reader.values, "intermediate_size": width}
    base, scaling = rope(reader)
    values = read_keys(reader, DECODER_KEYS)
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


def write(shape: ModelShape) -> dict[str, Any]:
    """The width of an MLP as it is, which the class would round, and all layers where none has a convolution."""
    convolution = shape.short_convolution
    layers = range(shape.num_layers) if convolution is None else convolution.attention_layers
    return {"block_auto_adjust_ff_dim": False, "full_attn_idxs": list(layers)}


FAMILY = Family(
    read=read,
    write=write,
    keys=(*DECODER_KEYS, *SHORT_CONVOLUTION),
    defaults={
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
    },
    mark=lambda shape: shape.short_convolution is not None,
    precedence=200,
    whole_sequences=True,
)
