"""Qwen's experts: a width of their own, dense layers anywhere (`mlp_only_layers`), a shared expert that a sigmoid
weighs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmlaunch.documents.validate import BadKey
from llmlaunch.families.decoder import TOPK, WINDOWLESS, auxiliary, mixture_of, written_auxiliary
from llmlaunch.families.family import NORMALIZED, ConfigKey, ConfigReader, read_keys
from llmlaunch.models.shape import ModelShape, MoeShape, Router

QWEN_EXPERTS = (
    ConfigKey("num_experts", "moe.num_experts"),
    TOPK,
    ConfigKey("moe_intermediate_size", "moe.ffn_hidden_size"),
)
SHARED_EXPERT = (ConfigKey("shared_expert_intermediate_size", "moe.shared_expert_ffn_hidden_size"),)
EXPERT_DEFAULTS: Mapping[str, Any] = {
    **WINDOWLESS,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.001,
}


def qwen_experts(reader: ConfigReader, shape: ModelShape) -> MoeShape:
    """Return the mixture of the layers that are no dense ones. Raises BadKey."""
    step = reader.size("decoder_sparse_step")
    dense = reader.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(not isinstance(i, int) for i in dense):
        raise BadKey(("mlp_only_layers",), "must be a list of layer numbers")
    return MoeShape(
        **read_keys(reader, QWEN_EXPERTS),
        layer_pattern=tuple(int(i not in dense and not (i + 1) % step) for i in range(shape.num_layers)),
        router=Router(**read_keys(reader, (NORMALIZED,)), **auxiliary(reader)),
    )


def uniform_experts(reader: ConfigReader, shape: ModelShape) -> MoeShape:
    """Return a mixture in every layer, whose scores always sum to 1. Raises BadKey."""
    pattern = (1,) * shape.num_layers
    return MoeShape(**read_keys(reader, QWEN_EXPERTS), layer_pattern=pattern, router=Router(**auxiliary(reader)))


def with_shared_expert(reader: ConfigReader, experts: MoeShape) -> MoeShape:
    """Return a mixture with the shared expert of a file. Raises BadKey."""
    return replace(experts, shared_expert_gate=True, **read_keys(reader, SHARED_EXPERT))


def written_experts(shape: ModelShape) -> dict[str, Any]:
    """Return the dense layers, and how experts are balanced."""
    moe = mixture_of(shape)
    dense = [i for i, mixture in enumerate(moe.layer_pattern) if not mixture]
    return {
        "mlp_only_layers": dense,
        "norm_topk_prob": moe.router.normalize_topk,
        **written_auxiliary(shape),
    }
