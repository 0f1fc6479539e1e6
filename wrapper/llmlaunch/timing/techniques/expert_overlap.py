"""Tokens of one micro-batch that travel to their experts while another one computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.layers.layer import Layer
from llmlaunch.memory.job import Job
from llmlaunch.timing.constants import constant
from llmlaunch.timing.effects import TimeEffect
from llmlaunch.timing.layer_parts import LayerParts
from llmlaunch.timing.network import exposed
from llmlaunch.timing.products import DevicePace, SplitColumns, Work

__all__ = ["ExpertOverlapTime", "beside_another_microbatch"]


class ExpertOverlapTime(TimeEffect):
    """A forward pass and a backward pass of the same layer run together, each beside the other's exchange
    (`--overlap-moe-expert-parallel-comm`; combined_1f1b.py, core 0.19)."""

    pairs_microbatches = True

    def on(self, job: Job) -> bool:
        """Where it is asked for, and weight gradients do not come later, which is another schedule."""
        return job.techniques.overlap_expert_communication and not job.techniques.delay_weight_gradients

    def pace(self, pace: DevicePace, layer: Layer) -> DevicePace:
        """The kernels that send hold multiprocessors for themselves (`--moe-deepep-num-sms`), and margins keep large
        kernels of a mixture's layer off these even while nothing is sent. Passes bound by memory are as fast as
        before."""
        if not pace.multiprocessors or layer.mixture is None:
            return pace
        left = 1.0 - constant("exchange_multiprocessors") / pace.multiprocessors
        return replace(
            pace,
            wide=left * pace.wide,
            linear=left * pace.linear,
            attention_forward=left * pace.attention_forward,
            attention_backward=left * pace.attention_backward,
        )

    def waited(
        self, at: SplitColumns, parts: LayerParts, exchange: Work, passes: tuple[FloatColumn, FloatColumn]
    ) -> Work | None:
        """Attention and the mixture of either pass each run beside one way of the tokens. A mixture's activation takes
        as long again backward as its inputs and outputs are more."""
        assert parts.mlp.experts is not None
        products, (forward, backward) = parts.mlp.experts + parts.products_of_every_token(at), passes
        mixture = products.forward + parts.activation, np.minimum(products.backward + parts.activation, backward)
        beside = [forward - mixture[0], mixture[0], backward - mixture[1], mixture[1]]
        return beside_another_microbatch(exchange, beside)

    def module_host_seconds(self, seconds: float) -> float:
        """Passes of two micro-batches in turn take the host longer."""
        return constant("overlapped_schedule_host_factor") * seconds


def beside_another_microbatch(exchange: Work, beside: Sequence[FloatColumn]) -> Work:
    """Return what is waited for of an exchange that runs beside the passes of another micro-batch. `beside` are the
    seconds that the device is busy while equal parts of it travel."""
    part = exchange.both / len(beside)
    waited = sum((exposed(part, each) for each in beside), 0.0 * part)
    share = np.divide(waited, exchange.both, out=np.zeros_like(waited), where=exchange.both > 0)
    return Work(share * exchange.forward, share * exchange.backward)
