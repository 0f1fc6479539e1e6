"""Gemma (transformers/models/gemma, 5.23). The class takes its old "gelu" for gelu_pytorch_tanh."""

from __future__ import annotations

from typing import Any

from llmlaunch.families.decoder import decoder
from llmlaunch.families.family import DECODER, ConfigReader, Family
from llmlaunch.families.gemma_norms import ACTIVATION, NORM_DEFAULTS, with_scaled_embedding
from llmlaunch.models.shape import ModelShape


def read(reader: ConfigReader) -> ModelShape:
    reader.only("hidden_act", ACTIVATION, "gelu", why=f"only {ACTIVATION} is supported")
    return with_scaled_embedding(reader, decoder(reader))


def write(shape: ModelShape) -> dict[str, Any]:
    return {"hidden_act": ACTIVATION}


FAMILY = Family(
    read=read,
    write=write,
    keys=DECODER,
    defaults={
        **NORM_DEFAULTS,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "hidden_act": ACTIVATION,
    },
    mark=lambda shape: shape.zero_centered_norm,
    precedence=140,
)
