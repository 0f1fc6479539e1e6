"""Selective and full recompute: activations that the backward pass computes again. How they are recomputed, and how
many layers, is the layout's to say."""

from __future__ import annotations

from typing import Literal

from llmlaunch.documents.keys import section
from llmlaunch.techniques.technique import EXPERTS, LATENT_ATTENTION, SHARED_EXPERT, technique

__all__ = ["Recompute", "RecomputeModule"]

RecomputeModule = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]
AGAIN = "the same kernels run again, on the same input and with the same random numbers"


@section
class Recompute:
    """Names of modules are those of Megatron's selective recompute. Without `recompute_modules`, it takes the backend's
    default."""

    recompute_modules: tuple[str, ...] = technique(
        "What recompute: selective recomputes; absent = searched",
        default=(),
        written=tuple[RecomputeModule, ...] | None,
        min_length=1,
        bit_equal=AGAIN,
        belongs=("recompute", "selective"),
        needs={"moe": EXPERTS, "moe_act": EXPERTS, "shared_experts": SHARED_EXPERT, "mla_up_proj": LATENT_ATTENTION},
        source="Korthikanti et al. 2022, section 5",
        saves="what the named modules save",
        costs="their forward pass once more",
    )
    recompute_method: str = technique(
        "recompute: full keeps the input of groups of layers (uniform), or recomputes some layers of each model chunk "
        "only (block); absent = uniform where full is pinned, else searched",
        default="uniform",
        written=Literal["uniform", "block"] | None,
        bit_equal=AGAIN,
        belongs=("recompute", "full"),
        source="Chen et al. 2016; Korthikanti et al. 2022, section 5",
        saves="all a layer saves but its input; block: of some layers, uniform: all but one input in each group",
        costs="up to one more forward pass",
    )
