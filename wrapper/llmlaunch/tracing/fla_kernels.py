"""A stand-in for the kernels of flash-linear-attention that Megatron core's gated delta nets call: what each keeps for
its backward pass, allocates beside it and hands back.

The names and their allocations are those of flash-linear-attention 0.4 (fla/modules/convolution.py, modules/l2norm.py,
ops/gated_delta_rule/chunk.py and wy_fast.py, ops/common/chunk_delta_h.py and chunk_o.py), which core 0.19 asks for.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from torch import Tensor

CHUNK = 64  # tokens


def _fp32(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


class _Convolution(torch.autograd.Function):  # type: ignore[misc]
    """CausalConv1dFunction: the activation is computed again from what is kept of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x = x.contiguous()  # input_guard
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_x, gradient = torch.empty_like(x), gradient.contiguous()
        batch, tokens, _ = x.shape
        parts = _fp32(x, batch * -(-tokens // CHUNK), *weight.shape)
        return of_x, parts.sum(0).to(weight)


class _Norm(torch.autograd.Function):  # type: ignore[misc]
    """L2NormFunction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        ctx.save_for_backward(y, _fp32(x, *x.shape[:-1]))
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.empty_like(gradient.contiguous())


class _DeltaRule(torch.autograd.Function):  # type: ignore[misc]
    """ChunkGatedDeltaRuleFunction: WY representation, states between chunks, output. All but the inverse of each
    chunk's triangular system is made again for the backward pass."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        q, k, v, g, beta = (each.contiguous() for each in (q, k, v, g, beta))
        sums = _fp32(g, *g.shape)
        products = _fp32(k, *k.shape[:-1], CHUNK)
        inverse = torch.empty(products.shape, dtype=k.dtype, device=k.device)
        del products
        states = _states(k, v)
        ctx.save_for_backward(q, k, v, sums, beta, inverse)
        output = torch.empty_like(v)
        del states
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        q, k, v, sums, beta, _ = ctx.saved_tensors
        gradient = gradient.contiguous()
        states = _states(k, v)
        of_v = torch.empty_like(gradient)
        of_states, of_v = _between_chunks(k, v), torch.empty_like(of_v)
        of_q, of_k, of_w, of_sums = (
            torch.empty_like(q),
            torch.empty_like(k),
            torch.empty_like(k),
            torch.empty_like(sums),
        )
        more_of_k, of_v, of_beta = torch.empty_like(k), torch.empty_like(of_v), torch.empty_like(beta)
        more_of_sums = torch.empty_like(sums)
        of_k.add_(more_of_k)
        of_sums.add_(more_of_sums)
        del states, of_states, of_w
        return of_q, of_k, of_v, torch.empty_like(of_sums), of_beta


def _between_chunks(k: Tensor, v: Tensor) -> Tensor:
    batch, tokens, heads, width = k.shape
    return torch.empty((batch, -(-tokens // CHUNK), heads, width, v.shape[-1]), dtype=k.dtype, device=k.device)


def _states(k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """w and u of the WY representation, the states, and the values as they are written into them."""
    return torch.empty_like(k), torch.empty_like(v), _between_chunks(k, v), torch.empty_like(v)


def causal_conv1d(x: Tensor, weight: Tensor, **options: Any) -> tuple[Tensor, None]:
    return _Convolution.apply(x, weight), None


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, None]:
    return _DeltaRule.apply(q, k, v, g, beta), None


MODULES = {
    "fla": {},
    "fla.modules": {},
    "fla.modules.convolution": {"causal_conv1d": causal_conv1d},
    "fla.modules.l2norm": {"l2norm": _Norm.apply},
    "fla.ops": {},
    "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
}


def install() -> None:
    """Put the stand-in where Megatron core imports the package."""
    for name, functions in MODULES.items():
        module = types.ModuleType(name)
        module.__dict__.update(functions, __path__=[])
        sys.modules[name] = module
