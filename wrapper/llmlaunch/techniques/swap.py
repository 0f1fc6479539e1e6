"""Activations are swapped to the host as far as its link allows, and the rest is recomputed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llmlaunch.documents.keys import section
from llmlaunch.techniques.technique import WHAT_IF, technique

__all__ = ["SOLVED_SHARE", "Swap"]

SOLVED_SHARE = -1.0  # in place of a share that a plan solves for its layout


@section
class Swap:
    """No backend runs it."""

    swapped_share: float = technique(
        "MEMO: share of each layer's activations swapped to the host, the rest recomputed; auto = as much as the link "
        "and host memory take",
        default=0.0,
        place=WHAT_IF,
        written=Annotated[float, Field(ge=0, le=1)] | Literal["auto"],
        on_host="activations",
        words={"auto": SOLVED_SHARE},
        source="MEMO (Zhao et al. 2025)",
        saves="all activations but two layers' rounding buffers",
        costs="the rest is recomputed; auto: as much as the link carries while a layer computes and as host memory "
        "holds",
    )
