"""Stand-ins for the kernels of DeepSeek's sparse attention, which Megatron core imports by name: `flash_mla` and the
namespace DSA of `cudnn`. Output shapes only, as megatron/core/transformer/experimental_attention_variant/
dsa_cudnn_kernels.py (core 0.19) describes them (CudnnDsaInterface) and takes them apart."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

import torch
from torch import Tensor


def _fp32(*shape: int, like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


class DSA:
    """The functions that the fused path calls. A loss over all keys, not the chosen ones alone, calls others."""

    @staticmethod
    def indexer_forward_wrapper(index_q: Tensor, index_k: Tensor, *rest: Any, **options: Any) -> dict[str, Tensor]:
        return {"scores": _fp32(index_q.shape[0], index_q.shape[1], index_k.shape[1], like=index_q)}

    @staticmethod
    def indexer_top_k_wrapper(
        scores: Tensor, seq_lens: Tensor, top_k: int, next_n: int, return_val: bool
    ) -> dict[str, Tensor | None]:
        indices = torch.empty(scores.shape[0], top_k, dtype=torch.int32, device=scores.device)
        return {"indices": indices, "values": torch.empty_like(indices, dtype=torch.float32) if return_val else None}

    @staticmethod
    def sparse_attn_score_recompute_wrapper(
        query: Tensor, key: Tensor, lse: Tensor, topk_indices: Tensor, *rest: Any, **options: Any
    ) -> dict[str, Tensor]:
        return {"target": torch.empty_like(topk_indices, dtype=torch.float32)}

    @staticmethod
    def indexer_backward_wrapper(
        index_q: Tensor, weights: Tensor, index_k: Tensor, *rest: Any, **options: Any
    ) -> dict[str, Tensor]:
        inputs = {"d_index_q": index_q, "d_weights": weights, "d_index_k": index_k}
        return {name: torch.empty_like(like) for name, like in inputs.items()}

    @staticmethod
    def sparse_attention_backward_wrapper(q: Tensor, kv: Tensor, *rest: Any, **options: Any) -> dict[str, Tensor]:
        return {"dq": torch.empty_like(q), "dkv": torch.empty_like(kv)}


def flash_mla_sparse_fwd(q: Tensor, kv: Tensor, *rest: Any, d_v: int, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    tokens, heads, _ = q.shape
    output = torch.empty(tokens, heads, d_v, dtype=q.dtype, device=q.device)
    return output, _fp32(tokens, heads, like=q), _fp32(tokens, heads, like=q)


_nonzero = torch.nonzero


def _every_row(values: Tensor, **options: Any) -> Any:
    """A causal query has at least itself to attend to: none of the rows that are asked for is without keys."""
    if values.ndim == 1 and values.dtype is torch.bool and not options.get("as_tuple"):
        return torch.arange(values.shape[0], device=values.device).unsqueeze(1)
    return _nonzero(values, **options)


def install() -> None:
    """Before Megatron checks that its packages are there."""
    torch.nonzero = _every_row
    for name, content in (("flash_mla", {"flash_mla_sparse_fwd": flash_mla_sparse_fwd}), ("cudnn", {"DSA": DSA})):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__dict__.update(content)
        sys.modules[name] = module
