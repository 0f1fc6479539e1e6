"""Multi-latent attention, the indexer that chooses its keys, and DeepSeek's experts: the first layers are dense, shared
experts are as wide as the others, and experts may stand in groups of which a token chooses some (transformers/models/
deepseek_v2, deepseek_v3, deepseek_v32, glm_moe_dsa and glm4_moe, 5.23)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmlaunch.documents.validate import BadKey
from llmlaunch.families.decoder import COMMON, NO_BIAS, TOPK, coefficient, mixture_of, only_if_given, silu_decoder
from llmlaunch.families.family import NORMALIZED, SCALED, ConfigKey, ConfigReader, decoder_without, if_any, read_keys
from llmlaunch.models.shape import Indexer, MlaShape, ModelShape, MoeShape, Router

DEEPSEEK_EXPERTS = (
    ConfigKey("n_routed_experts", "moe.num_experts"),
    TOPK,
    ConfigKey("moe_intermediate_size", "moe.ffn_hidden_size"),
)
DEEPSEEK_ROUTER = (NORMALIZED, SCALED)
GROUPS = {"moe.router.groups": "n_group", "moe.router.group_topk": "topk_group"}


def deepseek_decoder(reader: ConfigReader, router: Router) -> ModelShape:
    """Return a decoder with these experts. Raises BadKey."""
    only_if_given(reader, "moe_layer_freq", 1)
    shape = silu_decoder(reader)
    dense = reader.size("first_k_dense_replace", least=0)
    experts = read_keys(reader, DEEPSEEK_EXPERTS)
    moe = MoeShape(
        **experts,
        shared_expert_ffn_hidden_size=reader.size("n_shared_experts", least=0) * experts["ffn_hidden_size"],
        layer_pattern=tuple(int(i >= dense) for i in range(shape.num_layers)),
        router=replace(router, **read_keys(reader, (SCALED,)), **_balancing(reader)),
    )
    return replace(shape, moe=moe)


def sigmoid_router(reader: ConfigReader) -> Router:
    """Return a router that is balanced by a bias; one group of experts is none. Raises BadKey."""
    router = Router("sigmoid", expert_bias=True, **read_keys(reader, (NORMALIZED,)))
    return router_in_groups(reader, router) if reader.size("n_group") > 1 else router


def router_in_groups(reader: ConfigReader, router: Router) -> Router:
    """Return a router with the groups of a file. Raises BadKey."""
    return replace(router, groups=reader.size("n_group"), group_topk=reader.size("topk_group"))


def remark_prediction(reader: ConfigReader) -> None:
    """Remark that modules for multi-token prediction, which the file may have, are left out."""
    more = reader.values.get("num_nextn_predict_layers")
    if more:
        reader.remark(
            f"num_nextn_predict_layers={more} is left out, as transformers does; model.mtp_num_layers trains it with "
            "Megatron-LM"
        )


def _balancing(reader: ConfigReader) -> dict[str, Any]:
    """DeepSeek's own code has an auxiliary loss, that of transformers none."""
    if reader.values.get("aux_loss_alpha") is None:
        return {"balancing": "none", "aux_loss_coeff": 0.0}
    by_sequence = reader.values.get("seq_aux", True)
    kind = "seq_aux_loss" if by_sequence else "aux_loss"
    return {"balancing": kind, "aux_loss_coeff": coefficient(reader, "aux_loss_alpha")}


def written_routed(shape: ModelShape) -> dict[str, Any]:
    """Return the dense layers, the shared experts, and how tokens choose their experts."""
    moe = mixture_of(shape)
    router, grouped = moe.router, moe.router.groups is not None
    config: dict[str, Any] = {
        "n_shared_experts": moe.shared_expert_ffn_hidden_size // moe.ffn_hidden_size,
        "first_k_dense_replace": (*moe.layer_pattern, 1).index(1),
        "n_group": router.groups if grouped else 1,
        "topk_group": router.group_topk if grouped else 1,
        "norm_topk_prob": router.normalize_topk,
    }
    if router.balancing != "none":  # for other code than transformers', which has no such loss
        config |= {"aux_loss_alpha": router.aux_loss_coeff, "seq_aux": router.balancing == "seq_aux_loss"}
    return config


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
