"""Layers or modules that are computed again before they run backward, in place of keeping what they save."""

from __future__ import annotations

from functools import reduce
from operator import or_

import numpy as np

from llmlaunch.columns import BoolColumn, FloatColumn
from llmlaunch.layers.block import MLP_SHARE
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_SELECTIVE
from llmlaunch.memory.job import Job
from llmlaunch.timing.effects import TimeEffect
from llmlaunch.timing.layer_parts import LayerParts, Repeated
from llmlaunch.timing.products import DevicePace, SplitColumns, rates

__all__ = ["RecomputeTime"]

ATTENTION, MLP = "attn", "mlp"  # roles of blocks


class RecomputeTime(TimeEffect):
    """Layouts say what is recomputed, and the job with which method, and of which modules."""

    order = 0  # before what other techniques repeat

    def repeated(self, job: Job, at: SplitColumns, pace: DevicePace, parts: LayerParts) -> Repeated | None:
        """Forward work with its communication. Full recompute does all of a layer again, by the method "block" of some
        layers of each model chunk alone. Selective recompute does what its modules name (megatron/core/transformer/
        transformer_layer.py, core 0.19)."""
        recompute = at.layouts.recompute
        if not np.any(recompute):
            return None
        whole = parts.computed.forward + 2.0 * len(parts.layer.branches) * parts.tensor.seconds
        for exchange in (parts.context, parts.expert):
            if exchange is not None:
                whole = whole + exchange.forward
        share = _full_share(job, at)
        full = Repeated(share * whole, share * parts.mlp.kernels[0])
        selective = recompute == RECOMPUTE_SELECTIVE
        if not np.any(selective):
            return full
        some = _of_modules(job, at, pace, parts)
        return Repeated(
            np.where(selective, some.seconds, full.seconds), np.where(selective, some.kernels, full.kernels)
        )


def _full_share(job: Job, at: SplitColumns) -> FloatColumn:
    """Return the share of all layers that full recompute recomputes; 0 where it is not used."""
    lay = at.layouts
    full: FloatColumn = (lay.recompute == RECOMPUTE_FULL).astype(np.float64)
    if job.techniques.recompute_method != "block" or not np.any(lay.recompute_layers):
        return full
    counted = np.minimum(lay.recompute_layers * (at.pipeline * at.chunks) / job.shape.num_layers, 1.0)
    return full * np.where(lay.recompute_layers > 0, counted, 1.0)


def _of_modules(job: Job, at: SplitColumns, pace: DevicePace, parts: LayerParts) -> Repeated:
    """Return the forward seconds of the modules selective recompute names, and their kernels."""
    launched = parts.mlp.kernels[0]
    of_mlp = parts.products_of_every_token(at).forward  # or of a shared expert
    roles = {block.role for block in parts.layer.blocks}

    def has(*names: str) -> bool | BoolColumn:
        return reduce(or_, (at.layer.recomputes(name) for name in names))

    modules: list[tuple[bool | BoolColumn, FloatColumn, float | FloatColumn]] = [(has("layernorm"), parts.norms, 2.0)]
    if ATTENTION in roles:
        attention = parts.softmax.forward
        if parts.context is not None:
            attention = attention + parts.context.forward
        modules.insert(0, (has("core_attn"), attention, 2.0))
    up = [matrix for block in parts.layer.blocks for matrix in block.up_projections]
    if up and np.any(has("mla_up_proj")):
        up_projections = rates(job, pace, up).work(at.tokens, at.share, at.per_tensor)
        modules.append((has("mla_up_proj"), up_projections.forward, 4.0))
    if parts.expert is None and MLP in roles:
        alone = MLP_SHARE if len(roles) > 1 else 1.0
        modules.append((has("mlp"), of_mlp + parts.activation + 2.0 * parts.tensor.seconds, alone * launched))
    if parts.expert is not None:
        assert parts.mlp.experts is not None
        experts = parts.mlp.experts.forward + parts.activation + parts.expert.forward
        modules += [(has("moe"), experts, 0.6 * launched), (has("moe_act"), parts.activation, 1.0)]
        modules.append((has("shared_experts", "moe"), of_mlp, 0.0))
    seconds: FloatColumn = np.zeros(len(at))
    kernels: float | FloatColumn = 0.0 * launched
    for recomputed, more, launches in modules:
        if recomputed is True:
            seconds, kernels = seconds + more, kernels + launches
        elif recomputed is not False:
            share = np.asarray(recomputed, dtype=np.float64)
            seconds, kernels = seconds + share * more, kernels + share * launches
    return Repeated(seconds, kernels)
