"""Mixtures in every layer whose experts are as wide as `intermediate_size` (`num_local_experts`), and the auxiliary
loss of the classes that have one."""

from __future__ import annotations

from typing import Any

from llmlaunch.documents.validate import BadKey
from llmlaunch.families.config_keys import ConfigKey, read_keys
from llmlaunch.families.reader import ConfigReader
from llmlaunch.models.shape import ModelShape, MoeShape, Router

TOPK = ConfigKey("num_experts_per_tok", "moe.topk")
LOCAL_EXPERTS = (
    ConfigKey("num_local_experts", "moe.num_experts"),
    TOPK,
    ConfigKey("intermediate_size", "moe.ffn_hidden_size"),
)


def local_experts(reader: ConfigReader, shape: ModelShape, router: Router) -> MoeShape:
    """Return a mixture in every layer of `shape`. Raises BadKey."""
    pattern = (1,) * shape.num_layers
    return MoeShape(**read_keys(reader, LOCAL_EXPERTS), layer_pattern=pattern, router=router)


def auxiliary(reader: ConfigReader) -> dict[str, Any]:
    """Return the keys of a router that say the class's auxiliary loss. Raises BadKey."""
    weight = coefficient(reader, "router_aux_loss_coef")
    return {"balancing": "aux_loss" if weight else "none", "aux_loss_coeff": weight}


def coefficient(reader: ConfigReader, key: str) -> float:
    """Return a weight that is no less than 0. Raises BadKey."""
    value = reader.number(key)
    if value < 0:
        raise BadKey((key,), f"must be at least 0, not {value}")
    return value


def mixture_of(shape: ModelShape) -> MoeShape:
    """Return the mixture of a shape that has one."""
    assert shape.moe is not None
    return shape.moe


def written_auxiliary(shape: ModelShape) -> dict[str, Any]:
    """Return the auxiliary loss of the classes that have one: computed where the router's logits are put out."""
    router = mixture_of(shape).router
    weight = router.aux_loss_coeff if router.balancing == "aux_loss" else 0.0
    return {"output_router_logits": weight > 0, "router_aux_loss_coef": weight}
