"""DeepSeek's experts: the first layers are dense, shared experts are as wide as the others, and experts may stand in
groups of which a token chooses some (transformers/models/deepseek_v2, deepseek_v3 and glm4_moe, 5.23)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmlaunch.families.config_keys import NORMALIZED, SCALED, ConfigKey, read_keys
from llmlaunch.families.decoder import only_if_given, silu_decoder
from llmlaunch.families.local_experts import TOPK, coefficient, mixture_of
from llmlaunch.families.reader import ConfigReader
from llmlaunch.models.shape import ModelShape, MoeShape, Router

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
