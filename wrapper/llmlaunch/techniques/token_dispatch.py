"""How tokens reach their experts: gathered (Pipeline-MoE, Chen et al. 2023), by all-to-all, or by a library (DeepEP of
DeepSeek-V3, 2024; NVIDIA's HybridEP)."""

from __future__ import annotations

from typing import Literal

from llmlaunch.documents.keys import section
from llmlaunch.techniques.technique import EXPERTS, technique

__all__ = ["TokenDispatch"]

BETWEEN_EXPERTS = ("expert", "expert_tensor")
OTHER_ORDER = "the outputs of a token's experts are added up in another order"


@section
class TokenDispatch:
    """None leaves the choice to the backend."""

    token_dispatcher: str | None = technique(
        "How tokens reach their experts; absent = searched",
        default=None,
        written=Literal["alltoall", "allgather", "flex"] | None,
        rounding=OTHER_ORDER,
        matters=BETWEEN_EXPERTS,
        needs=EXPERTS,
    )
    flex_backend: str | None = technique(
        "megatron-lm: library that carries them with token_dispatcher: flex; absent = deepep",
        default=None,
        written=Literal["deepep", "hybridep"] | None,
        rounding=OTHER_ORDER,
        matters=BETWEEN_EXPERTS,
        belongs=("token_dispatcher", "flex"),
    )
