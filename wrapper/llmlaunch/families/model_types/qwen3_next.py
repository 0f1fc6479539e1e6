"""Qwen3-Next: gated delta nets before Qwen's experts (transformers/models/qwen3_next, 5.23)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmlaunch.families.decoder import ROTARY_PERCENT
from llmlaunch.families.delta_net import (
    DELTA_NET_DEFAULTS,
    LINEAR_ATTENTION,
    SHARED_EXPERT_DEFAULTS,
    delta_net_decoder,
    has_delta_net,
    written_kinds,
)
from llmlaunch.families.family import DECODER, NORMALIZED, ConfigReader, Family
from llmlaunch.families.qwen_experts import (
    QWEN_EXPERTS,
    SHARED_EXPERT,
    qwen_experts,
    with_shared_expert,
    written_experts,
)
from llmlaunch.models.shape import ModelShape


def read(reader: ConfigReader) -> ModelShape:
    shape = delta_net_decoder(reader)
    return replace(shape, moe=with_shared_expert(reader, qwen_experts(reader, shape)))


def write(shape: ModelShape) -> dict[str, Any]:
    return {**written_kinds(shape), **written_experts(shape)}


FAMILY = Family(
    read=read,
    write=write,
    keys=(*DECODER, *ROTARY_PERCENT, *LINEAR_ATTENTION, *QWEN_EXPERTS, *SHARED_EXPERT, NORMALIZED),
    defaults={
        **DELTA_NET_DEFAULTS,
        **SHARED_EXPERT_DEFAULTS,
        "vocab_size": 151936,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
    },
    needs=("moe",),
    mark=lambda shape: has_delta_net(shape) and shape.moe is not None,
    precedence=220,
)
