"""Mixtral (transformers/models/mixtral, 5.23)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmlaunch.families.decoder import (
    COMMON,
    LOCAL_EXPERTS,
    auxiliary,
    local_experts,
    refuse_jitter,
    silu_decoder,
    whole_window,
    written_auxiliary,
    written_window,
)
from llmlaunch.families.family import MIXTURE_DECODER, ConfigReader, Family
from llmlaunch.models.shape import ModelShape, Router


def read(reader: ConfigReader) -> ModelShape:
    shape = replace(silu_decoder(reader), sliding_window=whole_window(reader))
    refuse_jitter(reader)
    return replace(shape, moe=local_experts(reader, shape, Router(**auxiliary(reader))))


def write(shape: ModelShape) -> dict[str, Any]:
    return {**written_window(shape), **written_auxiliary(shape)}


FAMILY = Family(
    read=read,
    write=write,
    keys=(*MIXTURE_DECODER, *LOCAL_EXPERTS),
    defaults={
        **COMMON,
        "head_dim": None,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
    },
    aliases={"num_experts": "num_local_experts"},
    needs=("moe",),
    mark=lambda shape: shape.moe is not None,
    precedence=40,
    gathered_mixture=True,
)
