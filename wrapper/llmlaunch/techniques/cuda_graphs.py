"""Kernels are captured once and replayed as CUDA graphs."""

from __future__ import annotations

from typing import Literal

from llmlaunch.documents.keys import section
from llmlaunch.techniques.technique import technique

__all__ = ["FULL_ITERATION", "WHOLE_LAYER", "CudaGraphs", "GraphScope"]

GraphScope = Literal["full_iteration", "layer", "attn", "mlp", "moe_router", "moe_preprocess"]
FULL_ITERATION, WHOLE_LAYER = "full_iteration", "layer"


@section
class CudaGraphs:
    """The scopes are those of Megatron core."""

    cuda_graphs: tuple[str, ...] = technique(
        "megatron-lm: what is captured once and replayed as CUDA graphs: the whole iteration, whole layers, or parts "
        "of each layer; [] = nothing, absent = searched",
        default=(),
        written=tuple[GraphScope, ...] | None,
        bit_equal="the same kernels, launched at once",
        source="CUDA graphs (NVIDIA, 2019); Megatron core, cuda_graphs.py",
        saves="the host's launches of what is captured",
        costs="memory of graphs, which nothing else can use, for every micro-batch in flight",
    )
