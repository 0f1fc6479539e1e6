"""How tokens reach their experts: gathered, by all-to-all, or by a library."""

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
        source="Pipeline-MoE (Chen et al. 2023)",
        saves="with allgather the buffers of the all-to-all",
        costs="every expert-parallel rank sees all tokens of its group",
    )
    flex_backend: str | None = technique(
        "megatron-lm: library that carries them with token_dispatcher: flex; absent = deepep",
        default=None,
        written=Literal["deepep", "hybridep"] | None,
        rounding=OTHER_ORDER,
        matters=BETWEEN_EXPERTS,
        belongs=("token_dispatcher", "flex"),
        source="DeepEP (DeepSeek-V3, 2024); HybridEP (NVIDIA)",
        saves="nothing that is estimated: a token crosses the network once, however many of its experts are there",
        costs="a library of its own on the nodes, and its buffers, which the estimate does not know",
    )
