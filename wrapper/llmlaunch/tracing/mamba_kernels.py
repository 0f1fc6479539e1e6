"""A stand-in for the kernels of mamba-ssm and causal-conv1d that Megatron core's Mamba-2 mixers call: what each keeps
for its backward pass, allocates beside it and hands back.

The names and their allocations are those of mamba-ssm 2.3 (mamba_ssm/ops/triton/ssd_combined.py
MambaSplitConv1dScanCombinedFn, ssd_chunk_state.py, ssd_state_passing.py, ssd_chunk_scan.py, ssd_bmm.py and
layernorm_gated.py) and of causal-conv1d 1.6 (cpp_functions.py).
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from torch import Tensor


def _fp32(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _aligned(columns: Tensor) -> Tensor:
    """ensure_stride: the convolution reads rows that begin at multiples of eight elements."""
    return columns if columns.stride(1) % 8 == 0 else columns.contiguous()


class _Sizes:
    """Of the columns that one projection makes: gate z, input x, B and C of each group, and a step dt of each head."""

    def __init__(self, projected: Tensor, weight: Tensor, skip: Tensor, groups: int, head_dim: int, chunk: int) -> None:
        self.batch, self.tokens, _ = projected.shape
        self.heads, self.head_dim, self.groups, self.chunk = skip.shape[0], head_dim, groups, chunk
        self.inner = self.heads * head_dim
        self.state = (weight.shape[0] - self.inner) // groups // 2
        self.chunks = -(-self.tokens // chunk)

    def by_head(self, like: Tensor) -> Tensor:
        return _fp32(like, self.batch, self.heads, self.chunks, self.chunk)

    def states(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        shape = (self.batch, self.chunks, self.heads, self.head_dim, self.state)
        return torch.empty(shape, dtype=dtype, device=like.device)

    def products(self, like: Tensor) -> Tensor:
        return _fp32(like, self.batch, self.chunks, self.groups, self.chunk, self.chunk)

    def of_groups(self, like: Tensor) -> Tensor:
        """The gradient of B or of C, in parts that are summed."""
        return _fp32(like, self.batch, self.tokens, 1, self.groups, self.state).sum(2)

    def split(self, projected: Tensor) -> tuple[Tensor, ...]:
        convolved = self.inner + 2 * self.groups * self.state
        return tuple(torch.split(projected, [self.inner, convolved, self.heads], dim=-1))


class _SplitScan(torch.autograd.Function):  # type: ignore[misc]
    """MambaSplitConv1dScanCombinedFn without norm and output projection: of the forward pass the projected columns and
    the scan's output before the gate are kept, and all else is made again."""

    @staticmethod
    def forward(
        ctx: Any, projected: Tensor, weight: Tensor, bias: Tensor, step_bias: Tensor, decay: Tensor, *rest: Any
    ) -> Tensor:
        skip, ctx.chunk, ctx.head_dim, ctx.groups, ctx.state_dtype = rest
        sizes = _Sizes(projected, weight, skip, ctx.groups, ctx.head_dim, ctx.chunk)
        _, columns, _ = sizes.split(projected)
        convolved = torch.empty_like(_aligned(columns))
        steps, sums = sizes.by_head(projected), sizes.by_head(projected)
        states = sizes.states(projected, torch.float32)
        states = sizes.states(projected, ctx.state_dtype)
        products = sizes.products(projected)
        output = torch.empty(sizes.batch, sizes.tokens, sizes.inner, dtype=projected.dtype, device=projected.device)
        ungated = torch.empty_like(output)
        ctx.save_for_backward(projected, weight, bias, ungated, decay, skip, step_bias)
        del convolved, steps, sums, states, products
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        projected, weight, bias, _, decay, skip, step_bias = ctx.saved_tensors
        sizes = _Sizes(projected, weight, skip, ctx.groups, ctx.head_dim, ctx.chunk)
        _, columns, steps = sizes.split(projected)
        convolved = torch.empty_like(_aligned(columns))
        of_projected, of_columns = torch.empty_like(projected), torch.empty_like(columns)
        steps_in = steps.clone()
        steps, sums = sizes.by_head(projected), sizes.by_head(projected)
        products = sizes.products(projected)
        states = sizes.states(projected, torch.float32)
        states = sizes.states(projected, torch.float32)
        of_output = torch.empty_like(gradient)
        of_states = sizes.states(projected, torch.float32)
        of_states, states = sizes.states(projected, ctx.state_dtype), sizes.states(projected, ctx.state_dtype)
        of_steps = sizes.by_head(projected)
        of_b, after = sizes.of_groups(projected), sizes.by_head(projected)
        of_c, before = sizes.of_groups(projected), sizes.by_head(projected)
        of_products = _fp32(projected, sizes.batch, sizes.chunks, 1, sizes.groups, sizes.chunk, sizes.chunk).sum(2)
        of_sums = sizes.by_head(projected)
        del convolved, steps_in, steps, sums, products, states, of_output, of_states, of_steps
        del of_b, of_c, of_products, of_sums, after, before
        _aligned(of_columns)
        of_weight, of_bias = torch.empty_like(weight), torch.empty_like(bias)
        others = (torch.empty_like(each) for each in (step_bias, decay, skip))
        return (of_projected, of_weight, of_bias, *others, None, None, None, None)


def mamba_split_conv1d_scan_combined(
    projected: Tensor,
    weight: Tensor,
    bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    headdim: int,
    ngroups: int = 1,
    state_dtype: torch.dtype | None = None,
    **options: Any,
) -> Tensor:
    dtype = projected.dtype if state_dtype is None else state_dtype
    output: Tensor = _SplitScan.apply(projected, weight, bias, dt_bias, A, D, chunk_size, headdim, ngroups, dtype)
    return output


def mamba_chunk_scan_combined(*args: Any, state_dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    raise NotImplementedError("training runs convolution and scan in one function")


class _GroupNorm(torch.autograd.Function):  # type: ignore[misc]
    """LayerNormFn without a gate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, groups: int) -> Tensor:
        ctx.shape = x.shape
        x = x.reshape(-1, x.shape[-1])
        y = torch.empty_like(x)
        ctx.save_for_backward(x, weight, _fp32(x, groups * x.shape[0]))
        return y.reshape(ctx.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x).reshape(ctx.shape), torch.empty_like(weight), None


class RMSNorm(torch.nn.Module):  # type: ignore[misc]
    """RMSNorm of layernorm_gated.py: each group of columns has a norm of its own."""

    def __init__(self, hidden_size: int, eps: float, group_size: int, norm_before_gate: bool, device: Any, dtype: Any):
        super().__init__()
        self.eps, self.groups = eps, hidden_size // group_size
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _GroupNorm.apply(x, self.weight, self.groups)
        return y


def _inference_alone(*args: Any, **options: Any) -> Any:
    raise NotImplementedError("of inference")


MODULES: dict[str, dict[str, Any]] = {
    "causal_conv1d": {"causal_conv1d_fn": _inference_alone},
    "causal_conv1d.causal_conv1d_varlen": {"causal_conv1d_varlen_states": _inference_alone},
    "mamba_ssm": {},
    "mamba_ssm.ops": {},
    "mamba_ssm.ops.triton": {},
    "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": RMSNorm},
    "mamba_ssm.ops.triton.ssd_combined": {
        "mamba_chunk_scan_combined": mamba_chunk_scan_combined,
        "mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
    },
}


def install() -> None:
    """Put the stand-in where Megatron core imports the packages."""
    for name, functions in MODULES.items():
        module = types.ModuleType(name)
        module.__dict__.update(functions, __path__=[])
        sys.modules[name] = module
