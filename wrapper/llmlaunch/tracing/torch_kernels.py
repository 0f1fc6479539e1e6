"""Kernels of torch that a CPU build has no CUDA version of, and would take apart: attention, and the backward of SiLU.

Which attention runs follows aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: FlashAttention for 16-bit tensors of
one head size without a mask. What it keeps, and what its backward pass allocates beside the gradients, is that of
mha_fwd and mha_bwd (cuda/flash_attn/flash_api.cpp, torch 2.13): the gradient of queries is summed in fp32, and keys and
values that several heads share get a gradient for each head first. With a mask, or in fp32, it is memory-efficient
attention (cuda/attention_backward.cu), which wants as many heads of keys as of queries; what neither takes is computed
unfused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROWS = 128  # to which both kernels round a sequence up
HALVES = (torch.float16, torch.bfloat16)
MOST_HEAD_SIZE = 256

_unfused = torch.nn.functional.scaled_dot_product_attention


LIBRARY = torch.library.Library("aten", "IMPL")  # what it registers lives as long as it


def install() -> None:
    torch.nn.functional.scaled_dot_product_attention = attention
    LIBRARY.impl("silu_backward", lambda gradient, values: torch.empty_like(values), "CUDA")


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Tensors are [batch, heads, tokens, head size]."""
    sizes = {tensor.shape[-1] for tensor in (query, key, value)}
    flash = attn_mask is None and query.dtype in HALVES and len(sizes) == 1 and max(sizes) <= MOST_HEAD_SIZE
    if flash and max(sizes) % 8 == 0:
        return _Flash.apply(query, key, value)
    if query.shape[1] == key.shape[1]:
        if attn_mask is not None and attn_mask.dtype is torch.bool:  # attention.cpp convert_boolean_attn_mask
            attn_mask = torch.empty(attn_mask.shape, dtype=query.dtype, device=query.device)
        return _Efficient.apply(query, key, value, attn_mask)
    return _unfused(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _rounded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _by_token(like: Tensor, heads: int | None = None, size: int | None = None) -> Tensor:
    """A new tensor of this shape whose memory is ordered as [batch, tokens, heads, head size]."""
    batch, own_heads, tokens, own_size = like.shape
    shape = (batch, tokens, heads or own_heads, size or own_size)
    return torch.empty(shape, dtype=like.dtype, device=like.device).transpose(1, 2)


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, tokens, _ = query.shape
        output = _by_token(query)
        statistics = torch.empty(batch, heads, tokens, dtype=torch.float32, device=query.device)
        context.save_for_backward(query, key, value, output, statistics)
        return output

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, *_ = context.saved_tensors
        batch, heads, tokens, size = query.shape
        gradients = _by_token(query), _by_token(key), _by_token(value)
        rows, width = _rounded(tokens, ROWS), _rounded(size, 32 if size <= 128 else 64)
        working = [
            torch.empty(batch, heads, rows, dtype=torch.float32, device=query.device),
            torch.empty(batch, rows, heads, width, dtype=torch.float32, device=query.device),
        ]
        if key.shape[1] != heads:
            working += [_by_token(key, heads), _by_token(value, heads)]
        del working
        return gradients


class _Efficient(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        batch, heads, tokens, _ = query.shape
        output = _by_token(query, size=value.shape[-1])
        statistics = torch.empty(batch, heads, _rounded(tokens, 32), dtype=torch.float32, device=query.device)
        context.save_for_backward(query, key, value, mask, output, statistics)
        return output

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *_ = context.saved_tensors
        gradients = _by_token(query), _by_token(key), _by_token(value)
        batch, heads, tokens, _ = query.shape
        delta = torch.empty(batch, heads, tokens, dtype=torch.float32, device=query.device)
        working = [delta]
        if query.dtype is not torch.float32:  # the sums of blocks: kernel_backward.h workspace_size
            working += [torch.empty(t.shape, dtype=torch.float32, device=t.device) for t in (query, key, value)]
        del working
        return (*gradients, None)
