"""Multi-latent attention before DeepSeek's experts, and the indexer that chooses its keys (transformers/models/
deepseek_v2, deepseek_v3, deepseek_v32 and glm_moe_dsa, 5.23)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmlaunch.documents.validate import BadKey
from llmlaunch.families.config_keys import ConfigKey, decoder_without, if_any, read_keys
from llmlaunch.families.decoder import COMMON, NO_BIAS, only_if_given
from llmlaunch.families.deepseek_experts import DEEPSEEK_EXPERTS, deepseek_decoder, sigmoid_router, written_routed
from llmlaunch.families.reader import ConfigReader
from llmlaunch.models.shape import Indexer, MlaShape, ModelShape, Router

LATENT = (
    ConfigKey("q_lora_rank", "mla.q_lora_rank", if_any),
    ConfigKey("kv_lora_rank", "mla.kv_lora_rank"),
    ConfigKey("qk_nope_head_dim", "mla.qk_head_dim"),
    ConfigKey("qk_rope_head_dim", "mla.qk_pos_emb_head_dim"),
    ConfigKey("v_head_dim", "mla.v_head_dim"),
)
INDEXER = (
    ConfigKey("index_n_heads", "indexer.heads"),
    ConfigKey("index_head_dim", "indexer.head_dim"),
    ConfigKey("index_topk", "indexer.topk"),
)
LATENT_MIXTURE = (*decoder_without("head_dim", "num_key_value_heads"), *LATENT, *DEEPSEEK_EXPERTS)
LATENT_DEFAULTS: Mapping[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "attention_bias": False,
}
INDEXED_DEFAULTS: Mapping[str, Any] = {
    **COMMON,
    **LATENT_DEFAULTS,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "index_head_dim": 128,
    "index_topk": 2048,
}


def latent_decoder(reader: ConfigReader, router: Router) -> ModelShape:
    """Return a decoder with latent attention and DeepSeek's experts. Raises BadKey."""
    reader.only("attention_bias", False, why=NO_BIAS)
    shape = deepseek_decoder(reader, router)
    mla = MlaShape(**read_keys(reader, LATENT))
    return replace(
        shape,
        mla=mla,
        num_query_groups=shape.num_attention_heads,
        head_dim=mla.qk_head_dim + mla.qk_pos_emb_head_dim,
    )


def indexed_decoder(reader: ConfigReader) -> ModelShape:
    """Return a decoder whose queries attend to the keys that an indexer chooses. Raises BadKey."""
    reader.only("mlp_bias", False, None, why=NO_BIAS)
    for key in ("mlp_layer_types", "index_topk_pattern"):
        only_if_given(reader, key, None)
    only_if_given(reader, "index_topk_freq", 1)
    chosen = reader.values.get("indexer_types")
    if chosen is not None and (not isinstance(chosen, list) or any(kind != "full" for kind in chosen)):
        raise BadKey(
            ("indexer_types",), "layers that share what another has chosen are not supported: all must be full"
        )
    only_if_given(reader, "scoring_func", "sigmoid")
    only_if_given(reader, "topk_method", "noaux_tc")
    if reader.values.get("num_nextn_predict_layers"):
        reader.remark("multi-token prediction is left out, as transformers does")
    shape = latent_decoder(reader, sigmoid_router(reader))
    return replace(shape, indexer=Indexer(**read_keys(reader, INDEXER)))


def written_latent(shape: ModelShape) -> dict[str, Any]:
    """Return what latent attention and its experts have beside the rows. The class works head_dim out of the other
    widths, and would take another for the width of its rotary positions."""
    assert shape.mla is not None
    return {
        **written_routed(shape),
        "head_dim": shape.mla.qk_pos_emb_head_dim,
        "num_key_value_heads": shape.num_query_groups,
    }
