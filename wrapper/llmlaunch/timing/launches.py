"""What launching the kernels of a layer costs: the gaps between them on the device, and where the device would
be done sooner, the host's own time.

Routing, permutation and exchange are many small modules, which one Python thread launches; the experts' products are
launched by a loop over the experts. Megatron asks the device how many tokens each expert gets before it launches their
products, so in each layer's forward pass the host catches up with the device; not where their number of rows is fixed.
What CUDA graphs hold is launched by none of this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.frozen import frozen
from llmlaunch.memory.job import Job
from llmlaunch.timing.constants import constant
from llmlaunch.timing.effects import Kernels, TimeEffect, time_effects, time_effects_in_use
from llmlaunch.timing.products import DevicePace

if TYPE_CHECKING:
    from llmlaunch.layers.mixture import Mixture


MIXTURE_KERNELS = (28.0, 46.0)  # of a mixture forward and backward, its experts' products aside
BLOCK_KERNELS = (12.0, 24.0)  # of another block in its layer, such as attention, and of the norm before it
# Of one expert forward and backward: a product for each matrix and gradient. In narrow formats the input of each is
# quantized by itself and the scales of both operands are rearranged (transformer_engine/pytorch/module/
# grouped_linear.py and common/swizzle/, 2.20).
EXPERT_KERNELS, QUANTIZED_EXPERT_KERNELS = (2.0, 4.0), (8.0, 14.0)
FUSED_EXPERT_KERNELS = (6.0, 10.0)  # of all experts, where one kernel multiplies for all of them
# Of one expert's biases: the second one is weighted by the router and added expert by expert, a product and a sum,
# whose gradients are two products and two sums; both gradients are added to their buffers
# (megatron/core/transformer/moe/experts.py TEGroupedMLP._apply_bias, core 0.19).
BIASED_EXPERT_KERNELS = (2.0, 6.0)


def captured_share(job: Job, kernels: tuple[float, float]) -> float:
    """Return the share of a dense layer's `kernels`, (forward, backward), that CUDA graphs hold."""
    captured = _captured(job, mixture=False)
    return 1.0 if captured is None else sum(captured) / sum(kernels)


def _captured(job: Job, mixture: bool) -> Kernels | None:
    """Return the kernels of a layer, with or without a `mixture`, that no host launches; None for all of them."""
    forward = backward = 0.0
    for effect in time_effects(job, TimeEffect.captured):
        held = effect(job, mixture)
        if held is None:
            return None
        forward, backward = forward + held[0], backward + held[1]
    return forward, backward


@frozen
class MixtureLaunches:
    """Kernels of one mixture layer, (forward, backward): those that modules launch, and those of the experts."""

    modules: tuple[float, float]
    experts: tuple[FloatColumn, FloatColumn]

    @property
    def forward(self) -> FloatColumn:
        """All kernels of a forward pass."""
        return self.modules[0] + self.experts[0]

    def host_seconds(
        self, job: Job, pace: DevicePace, repeated: float | FloatColumn
    ) -> tuple[FloatColumn, FloatColumn]:
        """Return the seconds in which the host launches a layer, (forward, backward). The backward pass launches
        `repeated` kernels more for what is recomputed."""
        each = pace.host_seconds_factor * constant("module_kernel_host_seconds")
        for effect in time_effects(job, TimeEffect.module_host_seconds):
            each = effect(each)
        expert = pace.host_seconds_factor * constant("expert_kernel_host_seconds")
        captured = _captured(job, mixture=True)
        if captured is None:
            return np.zeros_like(self.experts[0]), np.zeros_like(self.experts[1])
        return (
            each * (self.modules[0] - captured[0]) + expert * self.experts[0],
            each * (self.modules[1] - captured[1]) + expert * (self.experts[1] + repeated),
        )

    def seconds(
        self,
        job: Job,
        pace: DevicePace,
        host: tuple[FloatColumn, FloatColumn],
        device: tuple[FloatColumn, FloatColumn],
        repeated: float | FloatColumn,
    ) -> FloatColumn:
        """Return the seconds of a layer that launches add to the `device` seconds of both passes, which the host
        launches in `host` seconds."""
        captured = _captured(job, mixture=True)
        gap, graph_gap = constant("kernel_seconds"), constant("graph_kernel_seconds")
        every = self.modules[0] + self.experts[0], self.modules[1] + self.experts[1] + repeated
        if captured is None:
            return graph_gap * (every[0] + every[1])
        waits = [
            np.maximum(
                host[place] - device[place], gap * (every[place] - captured[place]) + graph_gap * captured[place]
            )
            for place in (0, 1)
        ]
        counts_asked_for = all(effect.asks_for_counts for effect in time_effects_in_use(job))
        return np.asarray(
            waits[0] + waits[1] + counts_asked_for * pace.host_seconds_factor * constant("synchronisation_seconds")
        )


def mixture_launches(job: Job, mixture: Mixture, local_experts: FloatColumn, others: int) -> MixtureLaunches:
    """Return the kernels of a layer with so many experts on each device, and so many `others` of blocks."""
    forward, backward = (mine + others * each for mine, each in zip(MIXTURE_KERNELS, BLOCK_KERNELS, strict=True))
    modules = forward, backward
    if job.facts.mixture.experts_fused:
        unit = np.ones_like(local_experts)
        return MixtureLaunches(modules, (FUSED_EXPERT_KERNELS[0] * unit, FUSED_EXPERT_KERNELS[1] * unit))
    each = EXPERT_KERNELS if job.facts.layer.quantized is None else QUANTIZED_EXPERT_KERNELS
    more = BIASED_EXPERT_KERNELS if mixture.bias else (0.0, 0.0)
    return MixtureLaunches(modules, ((each[0] + more[0]) * local_experts, (each[1] + more[1]) * local_experts))
