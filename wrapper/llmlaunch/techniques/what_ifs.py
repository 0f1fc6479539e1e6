"""What no backend runs, and a recipe may ask about."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llmlaunch.documents.keys import section
from llmlaunch.techniques.technique import WHAT_IF, technique


@section
class ZeroBubble:
    """Weight gradients fill the gaps of the pipeline. No backend runs it."""

    zero_bubble: bool = technique(
        "ZB-H1: weight gradients wait for the gaps in which a stage would idle",
        default=False,
        place=WHAT_IF,
        effects=("zero_bubble",),
        source="ZB-H1 (Qi et al. 2024); 2BP (Rae et al. 2024)",
        saves="of the pipeline's bubble twice the weight gradients of the other stages",
        costs="what weight gradients are made of waits on later stages",
    )


@section
class WeightVersions:
    """A pipeline that never drains keeps several versions of the weights. No backend runs it."""

    weight_versions: int = technique(
        "Versions of the weights in flight; PipeDream-2BW keeps 2",
        default=1,
        place=WHAT_IF,
        ge=1,
        le=8,
        effects=("weight_versions",),
        source="PipeDream-2BW (Narayanan et al. 2021)",
        saves="the pipeline's bubble, and the wait for gradients of data parallelism, which travel beside the next "
        "batch",
        costs="4 bytes a parameter for each version more; gradients of weights a step old",
    )


@section
class SampledInputs:
    """A linear layer keeps a sample of its input's rows for the weight gradient. No backend runs it."""

    sampled_share: float = technique(
        "WTA-CRS: share of each linear layer's input rows kept for the weight gradient",
        default=1.0,
        place=WHAT_IF,
        gt=0,
        le=1,
        effects=("sampled_inputs",),
        source="WTA-CRS (Liu et al. 2023)",
        saves="the inputs of linear layers, but the share of their rows",
        costs="noise in the weight gradient",
    )


SOLVED_SHARE = -1.0  # in place of a share that a plan solves for its layout


@section
class Swap:
    """Activations are swapped to the host as far as its link allows, and the rest is recomputed. No backend runs it."""

    swapped_share: float = technique(
        "MEMO: share of each layer's activations swapped to the host, the rest recomputed; auto = as much as the link "
        "and host memory take",
        default=0.0,
        place=WHAT_IF,
        written=Annotated[float, Field(ge=0, le=1)] | Literal["auto"],
        on_host="activations",
        words={"auto": SOLVED_SHARE},
        effects=("swap",),
        source="MEMO (Zhao et al. 2025)",
        saves="all activations but two layers' rounding buffers",
        costs="the rest is recomputed; auto: as much as the link carries while a layer computes and as host memory "
        "holds",
    )
