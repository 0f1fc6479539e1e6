"""What stands in for mamba-ssm's fused kernel of a Mamba-2 mixer where there is no GPU: it saves for the backward pass
and makes there what mamba_ssm/ops/triton/ssd_combined.py MambaSplitConv1dScanCombinedFn does (mamba-ssm 2.3), and
computes nothing but the last projection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear


class FusedMixer(torch.autograd.Function):
    """`told` hears of the moment in which states between chunks, their gradients and both once more are there."""

    @staticmethod
    def forward(
        context: Any, columns: Any, kernel: Any, steps: Any, norm: Any, last: Any, sizes: Any, told: Any
    ) -> Any:
        batch, length, _ = columns.shape
        inner, groups, _ = sizes
        scan = columns.new_empty(batch, length, inner)
        deviations = None if norm is None else torch.empty(groups * batch * length)
        context.save_for_backward(columns, kernel, scan, steps, norm, deviations, last)
        context.sizes, context.told = sizes, told
        return linear(scan, last)

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        columns, kernel, scan, steps, norm, _, last = context.saved_tensors
        batch, length, _ = columns.shape
        inner, groups, chunk = context.sizes
        states = (kernel.shape[0] - inner) // groups // 2
        convolved, of_convolved = (columns.new_empty(batch, length, kernel.shape[0]) for _ in range(2))
        of_columns, again = torch.empty_like(columns), torch.empty_like(scan)
        outer = linear(gradient, last.t())
        gated = torch.empty_like(outer)

        def between_chunks() -> None:
            wide = [torch.empty(batch, length // chunk, inner * states) for _ in range(2)]
            narrow = [torch.empty_like(each, dtype=columns.dtype) for each in wide]
            products = torch.empty(batch, length // chunk, groups, chunk, chunk)
            decays = [torch.empty(batch * length * steps.shape[0]) for _ in range(2)]
            copied = columns.new_empty(batch, length, steps.shape[0])
            if context.told is not None:
                context.told()
            del wide, narrow, products, decays, copied

        between_chunks()
        of_last = torch.einsum("bso,bsd->od", gradient, again)
        del convolved, of_convolved, gated
        of_norm = None if norm is None else torch.zeros_like(norm)
        return of_columns, torch.zeros_like(kernel), torch.zeros_like(steps), of_norm, of_last, None, None


def fused_kernel(told: Callable[[], None] | None = None) -> Callable[..., Any]:
    """Return a function with the arguments of mamba_split_conv1d_scan_combined."""

    def kernel(columns: Any, weight: Any, bias: Any, dt_bias: Any, *decays: Any, **others: Any) -> Any:
        norm, last = others["rmsnorm_weight"], others["outproj_weight"]
        sizes = last.shape[1], others["ngroups"], others["chunk_size"]
        return FusedMixer.apply(columns, weight, dt_bias, norm, last, sizes, told)

    return kernel
