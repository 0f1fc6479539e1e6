"""Gemma 2 (transformers/models/gemma2, 5.23): every second layer attends to everything."""

from __future__ import annotations

from dataclasses import replace

from llmlaunch.families.decoder import alternating_window
from llmlaunch.families.family import DECODER, ConfigReader, Family
from llmlaunch.families.gemma_norms import POST_NORM_DEFAULTS, SOFTCAPS, post_norm_decoder, written_post_norms
from llmlaunch.models.shape import ModelShape


def read(reader: ConfigReader) -> ModelShape:
    return replace(post_norm_decoder(reader), sliding_window=alternating_window(reader, 2, None))


FAMILY = Family(
    read=read,
    write=written_post_norms,
    keys=(*DECODER, *SOFTCAPS),
    defaults=POST_NORM_DEFAULTS,
    mark=lambda shape: shape.post_norms,
    precedence=150,
    whole_heads=True,
)
