"""Qwen 3 with experts (transformers/models/qwen3_moe and qwen3_vl_moe, 5.23). Dense layers may be anywhere
(Qwen3MoeDecoderLayer)."""

from __future__ import annotations

from dataclasses import replace

from llmlaunch.families.decoder import NO_BIAS, no_window, silu_decoder
from llmlaunch.families.family import DECODER, NORMALIZED, ConfigReader, Family, VisionClass
from llmlaunch.families.qwen_experts import EXPERT_DEFAULTS, QWEN_EXPERTS, qwen_experts, written_experts
from llmlaunch.families.vision import TEXT_DEFAULTS
from llmlaunch.models.shape import ModelShape


def read(reader: ConfigReader) -> ModelShape:
    no_window(reader)
    reader.only("attention_bias", False, why=NO_BIAS)
    shape = replace(silu_decoder(reader), qk_layernorm=True)
    return replace(shape, moe=qwen_experts(reader, shape))


FAMILY = Family(
    read=read,
    write=written_experts,
    keys=(*DECODER, *QWEN_EXPERTS, NORMALIZED),
    defaults={
        **EXPERT_DEFAULTS,
        "intermediate_size": 6144,
        "num_key_value_heads": 4,
        "attention_bias": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    aliases={"num_local_experts": "num_experts"},
    needs=("moe",),
    vision=VisionClass(
        "qwen3_vl_moe",
        deepstack=True,
        text_defaults={
            **TEXT_DEFAULTS,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
        },
        text_values={"norm_topk_prob": True},
    ),
    mark=lambda shape: shape.moe is not None and shape.qk_layernorm,
    precedence=60,
    gathered_mixture=True,
    plain_mixture={"qk_layernorm": True},
)
