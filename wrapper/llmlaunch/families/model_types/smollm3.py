"""SmolLM3 (transformers/models/smollm3, 5.23): Llama with every fourth layer without rotary positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmlaunch.documents.validate import BadKey
from llmlaunch.families.decoder import COMMON, biased_decoder, no_window, written_biases
from llmlaunch.families.family import DECODER, ConfigReader, Family
from llmlaunch.models.shape import ModelShape


def read(reader: ConfigReader) -> ModelShape:
    no_window(reader)
    shape, listed = biased_decoder(reader), reader.get("no_rope_layers")
    every = reader.size("no_rope_layer_interval")
    if listed is not None:
        if not isinstance(listed, list) or len(listed) != shape.num_layers:
            raise BadKey(("no_rope_layers",), f"must list a 0 or a 1 for each of {shape.num_layers} layers; remove it")
        every = (*listed, 0).index(0) + 1
        if listed != [int((layer + 1) % every > 0) for layer in range(shape.num_layers)]:
            raise BadKey(("no_rope_layers",), "other layers than at even distances are not supported; remove it")
    return replace(shape, no_rope_every=every if every <= shape.num_layers else 0)


def write(shape: ModelShape) -> dict[str, Any]:
    """The class pads with a token that not every vocabulary has."""
    return {
        **written_biases(shape),
        "no_rope_layer_interval": shape.no_rope_every or shape.num_layers + 1,
        "pad_token_id": None,
    }


FAMILY = Family(
    read=read,
    write=write,
    keys=DECODER,
    defaults={
        **COMMON,
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": None,
        "max_position_embeddings": 32768,
        "rope_theta": 2000000.0,
        "use_sliding_window": False,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
    },
    mark=lambda shape: shape.no_rope_every > 0 and shape.moe is None,
    precedence=185,
)
