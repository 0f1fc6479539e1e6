"""The language models of Gemma 3 (transformers/models/gemma3, 5.23). Layers with a window have a rotary base of their
own, and scaling changes the others alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmlaunch.families.decoder import alternating_window, local_base, windowed_base
from llmlaunch.families.family import DECODER, ConfigReader, Family
from llmlaunch.families.gemma_norms import POST_NORM_DEFAULTS, SOFTCAPS, post_norm_decoder, written_post_norms
from llmlaunch.models.shape import ModelShape


def read(reader: ConfigReader) -> ModelShape:
    local = windowed_base(reader)
    every = reader.size("sliding_window_pattern")
    shape = post_norm_decoder(reader)
    return replace(shape, qk_layernorm=True, sliding_window=alternating_window(reader, every, local))


def write(shape: ModelShape) -> dict[str, Any]:
    return {**written_post_norms(shape), "rope_local_base_freq": local_base(shape)}


FAMILY = Family(
    read=read,
    write=write,
    keys=(*DECODER, *SOFTCAPS),
    defaults={
        **POST_NORM_DEFAULTS,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window_pattern": 6,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
    },
    mark=lambda shape: shape.post_norms and shape.qk_layernorm,
    precedence=160,
    whole_heads=True,
)
