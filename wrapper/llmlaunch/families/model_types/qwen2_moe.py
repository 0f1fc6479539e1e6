"""Qwen 1.5 and 2 with experts (transformers/models/qwen2_moe, 5.23)."""

from __future__ import annotations

from dataclasses import replace

from llmlaunch.families.decoder import no_window, silu_decoder
from llmlaunch.families.family import DECODER, NORMALIZED, QKV_BIAS, ConfigReader, Family, read_keys
from llmlaunch.families.qwen_experts import (
    EXPERT_DEFAULTS,
    QWEN_EXPERTS,
    SHARED_EXPERT,
    qwen_experts,
    with_shared_expert,
    written_experts,
)
from llmlaunch.models.shape import ModelShape


def read(reader: ConfigReader) -> ModelShape:
    no_window(reader)
    shape = replace(silu_decoder(reader), **read_keys(reader, QKV_BIAS))
    return replace(shape, moe=with_shared_expert(reader, qwen_experts(reader, shape)))


def has_mark(shape: ModelShape) -> bool:
    return shape.moe is not None and (shape.qkv_bias or shape.moe.shared_expert_ffn_hidden_size > 0)


FAMILY = Family(
    read=read,
    write=written_experts,
    keys=(*DECODER, *QWEN_EXPERTS, *SHARED_EXPERT, NORMALIZED, *QKV_BIAS),
    defaults={
        **EXPERT_DEFAULTS,
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    needs=("moe",),
    mark=has_mark,
    precedence=50,
    gathered_mixture=True,
)
