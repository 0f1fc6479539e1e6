"""Mistral (transformers/models/mistral, 5.23)."""

from __future__ import annotations

from dataclasses import replace

from llmlaunch.families.decoder import COMMON, silu_decoder, whole_window, written_window
from llmlaunch.families.family import DECODER, ConfigReader, Family
from llmlaunch.models.shape import ModelShape


def read(reader: ConfigReader) -> ModelShape:
    return replace(silu_decoder(reader), sliding_window=whole_window(reader))


FAMILY = Family(
    read=read,
    write=written_window,
    keys=DECODER,
    defaults={**COMMON, "head_dim": None, "sliding_window": 4096},
    mark=lambda shape: shape.sliding_window is not None,
    precedence=10,
)
