"""Qwen 3 (transformers/models/qwen3 and qwen3_vl, 5.23): norms on queries and keys."""

from __future__ import annotations

from dataclasses import replace

from llmlaunch.families.decoder import NO_BIAS, WINDOWLESS, no_window, silu_decoder
from llmlaunch.families.family import DECODER, ConfigReader, Family, VisionClass
from llmlaunch.families.vision import TEXT_DEFAULTS
from llmlaunch.models.shape import ModelShape


def read(reader: ConfigReader) -> ModelShape:
    no_window(reader)
    reader.only("attention_bias", False, why=NO_BIAS)
    return replace(silu_decoder(reader), qk_layernorm=True)


FAMILY = Family(
    read=read,
    keys=DECODER,
    defaults={**WINDOWLESS, "head_dim": 128, "attention_bias": False},
    vision=VisionClass(
        "qwen3_vl",
        deepstack=True,
        text_defaults={
            **TEXT_DEFAULTS,
            "hidden_size": 4096,
            "intermediate_size": 22016,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "head_dim": 128,
        },
    ),
    mark=lambda shape: shape.qk_layernorm,
    precedence=30,
)
