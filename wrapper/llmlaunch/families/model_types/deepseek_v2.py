"""DeepSeek-V2 (transformers/models/deepseek_v2, 5.23). Groups count by their best expert, and the chosen scores are
never made to sum to 1, whatever norm_topk_prob says."""

from __future__ import annotations

from typing import Any

from llmlaunch.families.decoder import NO_BIAS, OLD_CLASS, mixture_of, only_if_given
from llmlaunch.families.family import SCALED, ConfigReader, Family
from llmlaunch.families.latent_attention import (
    GROUPS,
    LATENT_DEFAULTS,
    LATENT_MIXTURE,
    latent_decoder,
    router_in_groups,
    written_latent,
)
from llmlaunch.models.shape import ModelShape, Router

IN_GROUPS = "group_limited_greedy"


def read(reader: ConfigReader) -> ModelShape:
    reader.only("mlp_bias", False, why=NO_BIAS)
    reader.only("topk_method", "greedy", IN_GROUPS, why=f"must be greedy or {IN_GROUPS}")
    reader.only("norm_topk_prob", False, None, why="transformers does not normalise the scores: must be false")
    only_if_given(reader, "scoring_func", "softmax")
    router = Router(normalize_topk=False)
    grouped = reader.get("topk_method") == IN_GROUPS
    return latent_decoder(reader, router_in_groups(reader, router) if grouped else router)


def write(shape: ModelShape) -> dict[str, Any]:
    grouped = mixture_of(shape).router.groups is not None
    return {**written_latent(shape), "topk_method": IN_GROUPS if grouped else "greedy"}


FAMILY = Family(
    read=read,
    write=write,
    keys=(*LATENT_MIXTURE, SCALED),
    defaults={
        **OLD_CLASS,
        **LATENT_DEFAULTS,
        "mlp_bias": False,
        "vocab_size": 102400,
        "first_k_dense_replace": 0,
        "n_group": None,
        "topk_group": None,
        "topk_method": "greedy",
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": False,
        "num_experts_per_tok": None,
        "moe_intermediate_size": 1407,
    },
    aliases={"num_experts": "n_routed_experts"},
    other_keys=GROUPS,
    needs=("moe", "mla"),
    mark=lambda shape: shape.mla is not None,
    precedence=90,
    balances_experts=False,
    whole_heads=True,
)
