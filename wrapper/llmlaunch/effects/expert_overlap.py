"""The forward pass of one micro-batch beside the backward pass of another, layer by layer: tokens of one travel to
their experts while the other computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from llmlaunch.columns import BoolColumn, FloatColumn
from llmlaunch.layers.layer import Layer
from llmlaunch.layers.mixture import Mixture
from llmlaunch.memory.activations import kept_before_experts
from llmlaunch.memory.effects import Effect
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.layer_bytes import layers_of
from llmlaunch.memory.tokens import layer_input
from llmlaunch.timing.effects import LayerParts, TimeEffect
from llmlaunch.timing.network import exposed
from llmlaunch.timing.products import DevicePace, SplitColumns, Work, constant

TERM = "paired_layer"
GRADIENTS_LEFT = 4.0  # of a layer's input: what goes to other stages, and comes from them, while two passes run
STREAMS_LEFT = 5.0  # the same while the loss is computed


class ExpertOverlapEffect(Effect):
    """A layer that runs forward has its tensors beside one that runs backward."""

    def on(self, job: Job) -> bool:
        return job.techniques.overlaps_experts

    def keeps_inputs(self, job: Job, rows: RankColumns) -> bool | BoolColumn:
        """Passes that share a schedule keep their inputs."""
        return True

    def beside_layer(self, job: Job, rows: RankColumns) -> Mapping[str, FloatColumn]:
        """Layer i of one micro-batch runs with layer L - 1 - i of the one before, part by part: attention, norm, router
        and shared expert of the first save their tensors and leave its tokens permuted, before the experts of the other
        run backward; these are gone when the experts of the first run. A pipeline rank has gradients of the stream on
        their way to other stages besides (megatron/core/models/common/model_chunk_schedule_plan.py
        TransformerLayerSchedulePlan.run, core 0.19; traced)."""
        before = rows.most_of(kept_before_experts(job, rows))
        streams = np.where(rows.layouts.pipeline > 1, GRADIENTS_LEFT, 0.0) * layer_input(job, rows)
        return {TERM: np.where(_pairs(job, rows), before + permuted_tokens(job, rows) + streams, 0.0)}

    def at_the_loss(self, job: Job, rows: RankColumns) -> Mapping[str, FloatColumn]:
        """What is left of the backward pass of one micro-batch when the loss of the next is computed: its embedded
        tokens and their gradient without a pipeline, else the gradient of a layer's permuted tokens and of streams
        (the same, TransformerModelChunkSchedulePlan.run; traced)."""
        several, stream = rows.layouts.pipeline > 1, layer_input(job, rows)
        left = np.where(several, permuted_tokens(job, rows) + STREAMS_LEFT * stream, 2.0 * stream)
        return {TERM: np.where(_pairs(job, rows), left, 0.0)}


def _pairs(job: Job, rows: RankColumns) -> BoolColumn:
    """Return whether a forward pass is left for the first backward pass to run beside: not where the warm-up takes
    them all (megatron/core/pipeline_parallel/schedules.py get_pp_rank_microbatches, core 0.19)."""
    p, v = rows.layouts.pipeline, rows.layouts.virtual_pipeline
    group = p if job.microbatch_group is None else job.microbatch_group
    warm_up = np.where(v > 1, 2 * (p - rows.rank - 1) + (v - 1) * group + 1, 1)
    return np.asarray(rows.microbatches * v > warm_up)


def permuted_tokens(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the bytes of the routed tokens of one mixture on their way."""
    layers, e = layers_of(job, rows), job.facts.layer.activation_bytes
    routed = layers.of_blocks(Mixture, lambda mixture, c: e * mixture.outer * mixture.routed_tokens(c))
    return rows.most_of(layers.by_group(routed))


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
