"""DeepSeek-V3 and Kimi K2 (transformers/models/deepseek_v3, 5.23). Files have modules for multi-token prediction, which
transformers builds none of."""

from __future__ import annotations

from llmlaunch.families.decoder import COMMON, only_if_given
from llmlaunch.families.family import ConfigReader, Family
from llmlaunch.families.latent_attention import (
    DEEPSEEK_ROUTER,
    GROUPS,
    LATENT_DEFAULTS,
    LATENT_MIXTURE,
    latent_decoder,
    remark_prediction,
    sigmoid_router,
    written_latent,
)
from llmlaunch.models.shape import ModelShape


def read(reader: ConfigReader) -> ModelShape:
    only_if_given(reader, "scoring_func", "sigmoid")
    only_if_given(reader, "topk_method", "noaux_tc")
    remark_prediction(reader)
    return latent_decoder(reader, sigmoid_router(reader))


def has_mark(shape: ModelShape) -> bool:
    return shape.mla is not None and shape.moe is not None and shape.moe.router.expert_bias


FAMILY = Family(
    read=read,
    write=written_latent,
    keys=(*LATENT_MIXTURE, *DEEPSEEK_ROUTER),
    defaults={
        **COMMON,
        **LATENT_DEFAULTS,
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "max_position_embeddings": 4096,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
    },
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    other_keys=GROUPS,
    needs=("moe", "mla"),
    same=("kimi_k2",),
    mark=has_mark,
    precedence=100,
    balances_experts=False,
)
