"""Mixture of experts under fake tensors: nobody knows how many tokens an expert gets, so every expert gets the same.

Megatron reads the counts from the device in a few places (token_dispatcher.py, experts.py, moe_utils.py of 0.19). Only
those reads are answered here; router, permutation, dispatch and experts are Megatron's own.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fake_dispatch import bare
from trace_checks import NotTraceable


@bare
class BalancedSelection(TorchDispatchMode):
    """`masked_select` by a routing map: top-k of the experts are chosen for every token."""

    def __init__(self, chosen: int, experts: int) -> None:
        super().__init__()
        self.chosen, self.experts = chosen, experts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.masked_select.default:
            values, mask = args
            return values.new_empty(_share(mask.numel(), self.chosen, self.experts))
        return func(*args, **(kwargs or {}))


def _share(count: int, chosen: int, experts: int) -> int:
    share, rest = divmod(count * chosen, experts)
    if rest:
        raise NotTraceable(f"{count} tokens x {chosen} cannot be shared evenly by {experts} experts")
    return share


def _read_counts(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """In place of MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize: what the copy to the host would have read."""
    if dispatcher.drop_and_pad or point != dispatcher.cuda_dtoh_point:
        return tokens_per_expert
    each = _share(dispatcher.routing_map.shape[0], dispatcher.config.moe_router_topk, dispatcher.num_experts)
    local, ep, tp = dispatcher.num_local_experts, dispatcher.ep_size, dispatcher.tp_size
    if dispatcher.input_splits is not None:
        dispatcher.input_splits = numpy.full(ep, each * local)
        dispatcher.output_splits = numpy.full(ep, each * local)
        dispatcher.output_splits_tp = numpy.full(tp, each * local * ep)
    if local > 1 and not dispatcher.config.moe_permute_fusion:
        dispatcher.num_global_tokens_per_local_expert = numpy.full((tp * ep, local), each)
    return numpy.full(local, each * ep * tp)


def _experts_share_rows(forward: Any) -> Any:
    """The experts of this rank split the rows they receive evenly."""

    def balanced(self: Any, rows: torch.Tensor, tokens_per_expert: Any, *rest: Any, **options: Any) -> Any:
        counts = numpy.full(self.num_local_experts, _share(rows.shape[0], 1, self.num_local_experts))
        return forward(self, rows, counts, *rest, **options)

    return balanced


class _AnyOrder:
    """Stands for the indices that chunks of tokens are sorted by. Chunks are equal, so any order takes the same memory;
    but read as the one number a fake tensor has, one chunk would be taken again and again, and its gradients summed."""

    def __init__(self, count: int) -> None:
        self.count = count

    def numel(self) -> int:  # where a process traces several jobs, this is sorted in any order once more
        return self.count

    def tolist(self) -> list[int]:
        return list(range(self.count))


def _sort_in_any_order(sort: Any) -> Any:
    """In place of moe_utils.sort_chunks_by_idxs where nothing fuses it."""

    def sorted_chunks(tokens: Any, sizes: Any, order: Any, probs: Any = None, fused: bool = False) -> Any:
        return sort(tokens, sizes, order if fused else _AnyOrder(order.numel()), probs=probs, fused=fused)

    return sorted_chunks


def install(chosen: int, experts: int) -> None:
    """Answer Megatron's reads of token counts as balanced routing would.

    Raises NotTraceable, during the run, when tokens x `chosen` is no multiple of `experts`.
    """
    from megatron.core.transformer.moe import experts as expert_layers
    from megatron.core.transformer.moe import token_dispatcher

    permute = token_dispatcher.permute

    def permute_balanced(tokens: Any, routing_map: Any, *rest: Any, num_out_tokens: Any = None, **options: Any) -> Any:
        count = _share(routing_map.numel(), chosen, experts)
        return permute(tokens, routing_map, *rest, num_out_tokens=count, **options)

    token_dispatcher.permute = permute_balanced
    token_dispatcher.sort_chunks_by_idxs = _sort_in_any_order(token_dispatcher.sort_chunks_by_idxs)
    token_dispatcher.MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _read_counts
    for layer in (expert_layers.TEGroupedMLP, expert_layers.SequentialMLP):
        layer.forward = _experts_share_rows(layer.forward)
