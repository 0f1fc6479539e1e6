"""The language models of Qwen 3.5 with experts (transformers/models/qwen3_5_moe, 5.23). Every layer is a mixture:
there is no width of a dense MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmlaunch.families.decoder import ROTARY_PERCENT, without
from llmlaunch.families.delta_net import (
    DELTA_NET_DEFAULTS,
    LINEAR_ATTENTION,
    SHARED_EXPERT_DEFAULTS,
    delta_net_decoder,
    written_kinds,
)
from llmlaunch.families.family import MIXTURE_DECODER, ConfigReader, Family, VisionClass
from llmlaunch.families.qwen_experts import (
    QWEN_EXPERTS,
    SHARED_EXPERT,
    uniform_experts,
    with_shared_expert,
    written_experts,
)
from llmlaunch.models.shape import ModelShape


def read(reader: ConfigReader) -> ModelShape:
    reader.values = {**reader.values, "intermediate_size": reader.size("moe_intermediate_size")}
    shape = delta_net_decoder(reader)
    return replace(shape, moe=with_shared_expert(reader, uniform_experts(reader, shape)))


def write(shape: ModelShape) -> dict[str, Any]:
    return {**written_kinds(shape), "intermediate_size": shape.ffn_hidden_size, **written_experts(shape)}


FAMILY = Family(
    read=read,
    write=write,
    keys=(*MIXTURE_DECODER, *ROTARY_PERCENT, *LINEAR_ATTENTION, *QWEN_EXPERTS, *SHARED_EXPERT),
    defaults={
        **without(DELTA_NET_DEFAULTS, "intermediate_size"),
        **SHARED_EXPERT_DEFAULTS,
        "num_hidden_layers": 40,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    needs=("moe",),
    vision=VisionClass("qwen3_5_moe"),
)
