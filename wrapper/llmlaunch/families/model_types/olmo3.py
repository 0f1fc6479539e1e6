"""OLMo 3 (transformers/models/olmo3, 5.23). Norms are behind attention and MLP; scaling changes the positions of layers
without a window alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmlaunch.families.decoder import (
    FULL,
    NO_BIAS,
    OLD_CLASS,
    WINDOWED,
    alternating_window,
    local_base,
    silu_decoder,
    windowed_base,
    written_scaling,
    written_windows,
)
from llmlaunch.families.family import DECODER, ConfigReader, Family
from llmlaunch.models.shape import ModelShape


def read(reader: ConfigReader) -> ModelShape:
    reader.only("attention_bias", False, why=NO_BIAS)
    local = windowed_base(reader, "rope_theta")
    return replace(
        silu_decoder(reader),
        qk_layernorm=True,
        qk_norm_of_all_heads=True,
        norms_after_alone=True,
        sliding_window=alternating_window(reader, 4, local),
    )


def write(shape: ModelShape) -> dict[str, Any]:
    """The class takes one base for layers of both kinds, and another for those with a window among its parameters."""
    full = {"rope_type": "default"} if shape.rope_scaling is None else written_scaling(shape.rope_scaling)
    parameters = {
        FULL: full | {"rope_theta": shape.rotary_base},
        WINDOWED: {"rope_type": "default", "rope_theta": local_base(shape)},
    }
    return {**written_windows(shape), "rope_parameters": parameters, "rope_scaling": None}


FAMILY = Family(
    read=read,
    write=write,
    keys=DECODER,
    defaults={
        **OLD_CLASS,
        "vocab_size": 50304,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "sliding_window": 4096,
        "layer_types": None,
    },
    mark=lambda shape: shape.norms_after_alone,
    precedence=190,
    wide_norms=True,
    has_plain_plan=False,
)
