"""GLM-4.5 to 4.7 (transformers/models/glm4_moe, 5.23): ordinary attention with biases on query, key and value, before
DeepSeek-V3's experts."""

from __future__ import annotations

from dataclasses import replace

from llmlaunch.families.decoder import COMMON, ROTARY_PERCENT, only_if_given
from llmlaunch.families.family import DECODER, ConfigKey, ConfigReader, Family, read_keys
from llmlaunch.families.latent_attention import (
    DEEPSEEK_EXPERTS,
    DEEPSEEK_ROUTER,
    GROUPS,
    deepseek_decoder,
    remark_prediction,
    sigmoid_router,
    written_routed,
)
from llmlaunch.models.shape import ModelShape

KEYS = (
    ConfigKey("attention_bias", "qkv_bias", ConfigReader.flag),
    ConfigKey("use_qk_norm", "qk_layernorm", ConfigReader.flag),
    *ROTARY_PERCENT,
)


def read(reader: ConfigReader) -> ModelShape:
    only_if_given(reader, "scoring_func", "sigmoid")
    remark_prediction(reader)
    return replace(deepseek_decoder(reader, sigmoid_router(reader)), **read_keys(reader, KEYS))


FAMILY = Family(
    read=read,
    write=written_routed,
    keys=(*DECODER, *DEEPSEEK_EXPERTS, *DEEPSEEK_ROUTER, *KEYS),
    defaults={
        **COMMON,
        "vocab_size": 151552,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "rms_norm_eps": 1e-5,
        "head_dim": None,
        "partial_rotary_factor": 0.5,
        "attention_bias": False,
        "use_qk_norm": False,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
    },
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    other_keys=GROUPS,
    needs=("moe",),
    wide_router=True,
    mark=lambda shape: shape.moe is not None and shape.moe.router.expert_bias,
    precedence=80,
    balances_experts=False,
)
