"""Qwen 2 and 2.5 (transformers/models/qwen2, 5.23): biases on queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from llmlaunch.families.decoder import WINDOWLESS, no_window, silu_decoder
from llmlaunch.families.family import DECODER, ConfigReader, Family
from llmlaunch.models.shape import ModelShape


def read(reader: ConfigReader) -> ModelShape:
    no_window(reader)
    return replace(silu_decoder(reader), qkv_bias=True)


FAMILY = Family(
    read=read,
    keys=DECODER,
    defaults=WINDOWLESS,
    mark=lambda shape: shape.qkv_bias,
    precedence=20,
)
