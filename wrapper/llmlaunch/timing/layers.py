"""Seconds of one decoder layer on one device for one micro-batch, by what they are spent on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from llmlaunch.cluster.profile import Cluster
from llmlaunch.columns import FloatColumn
from llmlaunch.frozen import frozen
from llmlaunch.layers.block import MLP_SHARE
from llmlaunch.layers.columns import LayerColumns
from llmlaunch.layers.layer import Layer
from llmlaunch.layers.matrix import adapted
from llmlaunch.memory.job import Job
from llmlaunch.techniques.requests import Adapters
from llmlaunch.timing.effects import Kernels, LayerParts, Mlps, TimeEffect, time_effects, time_effects_in_use
from llmlaunch.timing.network import context_exchange, tensor_passes
from llmlaunch.timing.products import DevicePace, Rates, SplitColumns, Work, adapter_rates, constant, rates, seconds_of

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


if TYPE_CHECKING:
    from llmlaunch.layers.mixture import Mixture


KINDS = (
    "matrix_products",
    "attention",
    "element_wise",
    "kernel_launches",
    "tensor_parallel",
    "context_parallel",
    "expert_parallel",
    "recompute",
)
ATTENTION, MLP = "attn", "mlp"  # roles of blocks
MIXING_PASSES = (4.0, 11.0)  # elements of all residual streams that are read and written around each branch, forward
# and backward (core/transformer/hyper_connection.py of Megatron-LM's development branch at d48bd6be, August 2026)


@frozen
class LayerSeconds:
    """Columns of seconds of one layer and micro-batch: its `seconds` in all, those in which the `host` launches it,
    those that compute or launch and so can hide a transfer, `forward` and `backward`, and what they are made of. None
    where no layout has such a thing. `hidden_exchange` is what of the exchange another micro-batch's passes hide."""

    seconds: FloatColumn
    host: FloatColumn
    forward: FloatColumn
    backward: FloatColumn
    linears: Work
    scores: Work
    element_wise: Work
    launches: FloatColumn
    tensor: FloatColumn
    context: Work | None
    expert: Work | None
    recomputed: FloatColumn | None
    hidden_exchange: FloatColumn | None = None

    @property
    def kinds(self) -> Mapping[str, FloatColumn]:
        """`seconds` by what they are spent on, by names of KINDS."""
        kinds = {
            "matrix_products": self.linears.both,
            "attention": self.scores.both,
            "element_wise": self.element_wise.both,
            "kernel_launches": self.launches,
            "tensor_parallel": self.tensor,
        }
        if self.context is not None:
            kinds["context_parallel"] = self.context.both
        if self.expert is not None:
            kinds["expert_parallel"] = self.expert.both
        if self.recomputed is not None:
            kinds["recompute"] = self.recomputed
        return kinds


@frozen
class Collectives:
    """Seconds that are alike in all layers: of one tensor-parallel gather or scatter, and of the exchange of a
    mixture's tokens, where nothing hides it."""

    one_pass: FloatColumn
    expert: Work | None


def forward_only(layer: LayerSeconds, at: SplitColumns) -> LayerSeconds:
    """Return a layer below all that is trained: nothing runs backward, so nothing is recomputed. Of the tensor-parallel
    passes two of a block's five are forward, or two of four without sequence parallelism (`tensor_passes`)."""
    none = np.zeros(len(at))

    def forward(work: Work | None) -> Work | None:
        return None if work is None else Work(work.forward, none)

    linears, scores = Work(layer.linears.forward, none), Work(layer.scores.forward, none)
    launches, share = layer.launches / 3.0, np.where(at.layouts.sequence_parallel > 0, 0.4, 0.5)
    alone = replace(
        layer,
        host=layer.host / 3.0,
        forward=linears.forward + scores.forward + layer.element_wise.forward + launches,
        backward=none,
        linears=linears,
        scores=scores,
        element_wise=Work(layer.element_wise.forward, none),
        launches=launches,
        tensor=share * layer.tensor,
        context=forward(layer.context),
        expert=forward(layer.expert),
        recomputed=None,
    )
    return replace(alone, seconds=sum(alone.kinds.values(), none))


def layer_seconds(
    job: Job, cluster: Cluster, at: SplitColumns, pace: DevicePace, collectives: Collectives, layer: Layer
) -> LayerSeconds:
    """Return the seconds of a layer."""
    mixture = layer.mixture
    for slower in time_effects(job, TimeEffect.pace):
        pace = slower(pace, layer)
    mlp, linears, launched = _products(job, at, pace, layer, mixture)
    softmax, scores, context = _over_sequence(job, cluster, at, pace, layer)
    element, activation, norms = _element_wise(job, at, pace, layer)
    tensor = tensor_passes(job, at, collectives.one_pass, layer)
    expert = collectives.expert if mixture is not None else None
    parts = LayerParts(layer, linears, softmax, scores, element, activation, norms, mlp, tensor, context, expert)
    for effect in time_effects(job, TimeEffect.element_wise):
        more = effect(job, at, pace, parts)
        if more is not None:
            parts = replace(parts, element_wise=parts.element_wise + more)
    return _combined(job, at, pace, parts, launched)


def _products(
    job: Job, at: SplitColumns, pace: DevicePace, layer: Layer, mixture: Mixture | None
) -> tuple[Mlps, Work, MixtureLaunches | None]:
    """Return the parts of a layer's MLPs, the seconds of all its matrix products, and the launches of a mixture."""
    c, adapters = at.layer, job.techniques.adapters
    every, of_mlps = Rates(), Rates()
    for block in layer.blocks:
        each = rates(job, pace, [matrix for matrix in block.products if not matrix.of_experts])
        if (reads := block.matrix_reads(c)) > 1.0:
            each = replace(each, per_matrix_split=reads * each.per_matrix_split)
        every = every + each
        if block.role == MLP:
            of_mlps = of_mlps + each
    linears = every.work(at.tokens, at.share, at.per_tensor)
    if adapters is not None:
        beside = [pair for pair in adapted(layer.matrices, adapters) if not pair[0].of_experts]
        linears = linears + adapter_rates(job, pace, beside).work(at.tokens, at.share, at.per_tensor)
    if mixture is None:
        return Mlps(of_mlps, _launched(job, c, layer)), linears, None
    etp, rows, local = c.expert_tensor, mixture.expert_rows(c), mixture.experts_on_device(c)
    experts = rates(job, pace, mixture.expert_matrices).work(rows, rows / etp, local / etp)
    linears = linears + experts
    if adapters is not None:
        copies, beside = mixture.busiest_copies(c), adapted(mixture.expert_matrices, adapters)
        linears = linears + adapter_rates(job, pace, beside).work(copies, copies / etp, 1.0 / etp)
    launches = mixture_launches(job, mixture, local, len(layer.blocks) - 1)
    return Mlps(of_mlps, (launches.forward, 0.0), mixture, experts), linears, launches


def _launched(job: Job, c: LayerColumns, layer: Layer) -> tuple[float, float]:
    """Return the kernels of a layer without a mixture, with those of the adapters beside its linear layers. A frozen
    matrix has no gradient: that is one kernel less, backward. An MLP in pieces launches its own for each."""
    forward, backward = (sum(each) for each in zip(*(block.kernels(job.facts) for block in layer.blocks), strict=True))
    scaled = float(sum(len(block.scaled) for block in layer.blocks))
    forward, backward = forward + scaled, backward + scaled
    adapters = job.techniques.adapters
    if adapters is not None:
        beside = float(len(adapted(layer.matrices, adapters)))
        frozen = float(sum(len(matrix.parts) for matrix in layer.matrices))
        more = job.facts.layer.kernels.adapter
        forward, backward = forward + beside * more[0], backward + beside * more[1] - frozen
    again = MLP_SHARE * (max(block.matrix_reads(c) for block in layer.blocks) - 1.0)
    return forward + again * forward, backward + again * backward


def _over_sequence(
    job: Job, cluster: Cluster, at: SplitColumns, pace: DevicePace, layer: Layer
) -> tuple[Work, Work, Work | None]:
    """Return the seconds of softmax attention, of that and of recurrences, and of context parallelism, which is None
    where no layout has any."""
    none = np.zeros(len(at))
    softmax = scores = Work(none, none)
    context: Work | None = None
    for block in layer.blocks:
        amounts = block.sequence_work(at.layer)
        if amounts is None:
            continue
        work = seconds_of(job, pace, amounts)
        scores = work if scores.forward is none else scores + work
        if block.role == ATTENTION:
            softmax = work if softmax.forward is none else softmax + work
        traffic = block.context_traffic(at.layer) if np.any(at.layouts.context > 1) else None
        if traffic is not None:
            each = context_exchange(job, cluster, at, pace, traffic, work)
            context = each if context is None else context + each
    return softmax, scores, context


def _combined(
    job: Job, at: SplitColumns, pace: DevicePace, parts: LayerParts, launched: MixtureLaunches | None
) -> LayerSeconds:
    """Return the seconds of a layer of its parts. What is launched later than the device is done, and what of exchanges
    nothing hides, follow from all of it together."""
    computed, kernels = parts.computed, parts.mlp.kernels
    forward, backward = computed.forward, computed.backward
    repeated_kernels: float | FloatColumn = 0.0
    recomputed: FloatColumn | None = None
    for effect in time_effects(job, TimeEffect.repeated):
        again = effect(job, at, pace, parts)
        if again is not None:
            backward, repeated_kernels = backward + again.seconds, repeated_kernels + again.kernels
            recomputed = again.seconds if recomputed is None else recomputed + again.seconds
    device, waits = forward + backward, parts.tensor.exposed(parts.linears.backward)
    expert, hidden = parts.expert, None
    if expert is not None:
        expert, hidden = _waited(job, at, parts, expert, (forward, backward))
    running = device + waits + sum(exchange.both for exchange in (parts.context, expert) if exchange is not None)
    if launched is not None and expert is not None:
        passes = forward + expert.forward, backward + expert.backward
        host, launches = _mixture_launches(job, pace, launched, passes, repeated_kernels)
    else:
        host, launches = _launches(job, pace, kernels[0] + kernels[1] + repeated_kernels, running)
    launching = launches * (1.0 / 3.0)
    return LayerSeconds(
        seconds=running + launches,
        host=host,
        forward=forward + launching,
        backward=backward + 2.0 * launching,
        linears=parts.linears,
        scores=parts.scores,
        element_wise=parts.element_wise,
        launches=launches,
        tensor=waits,
        context=parts.context,
        expert=expert,
        recomputed=recomputed,
        hidden_exchange=hidden,
    )


def _waited(
    job: Job, at: SplitColumns, parts: LayerParts, exchange: Work, passes: tuple[FloatColumn, FloatColumn]
) -> tuple[Work, FloatColumn | None]:
    """Return what is waited for of the exchange of tokens, and the seconds of it that the passes of another micro-batch
    hide, None where they hide none."""
    for effect in time_effects_in_use(job):
        waited = effect.waited(at, parts, exchange, passes)
        if waited is not None:
            return waited, exchange.both - waited.both if effect.pairs_microbatches else None
    return exchange, None


def _mixture_launches(
    job: Job,
    pace: DevicePace,
    launches: MixtureLaunches,
    passes: tuple[FloatColumn, FloatColumn],
    repeated: float | FloatColumn,
) -> tuple[FloatColumn, FloatColumn]:
    """Return the seconds in which the host launches a mixture layer, and those that its launches add to `passes`."""
    host = launches.host_seconds(job, pace, repeated)
    return host[0] + host[1], launches.seconds(job, pace, host, passes, repeated)


def _launches(
    job: Job, pace: DevicePace, kernels: float | FloatColumn, running: FloatColumn
) -> tuple[FloatColumn, FloatColumn]:
    """Return the seconds in which one host thread launches a layer's kernels that CUDA graphs do not hold; and those of
    gaps between kernels, or where the device would be done sooner, of what the host takes longer."""
    captured = captured_share(job, job.facts.layer.kernels.launched)
    gap = (1.0 - captured) * constant("kernel_seconds") + captured * constant("graph_kernel_seconds")
    host_seconds = pace.host_seconds_factor * constant("kernel_host_seconds") * (1.0 - captured)
    host = host_seconds * kernels + np.zeros_like(running)
    seconds: FloatColumn = np.maximum(host - running, gap * kernels)
    return host, seconds


def _element_wise(job: Job, at: SplitColumns, pace: DevicePace, layer: Layer) -> tuple[Work, FloatColumn, FloatColumn]:
    """Return the seconds of element-wise operations, and of these, forward, those of activation functions and of norms:
    bytes read and written through device memory. Norms and residual additions as the backend's kernels move them;
    fused, a gated activation reads 2 and writes 1 forward, reads 3 and writes 2 backward. A product with a constant
    reads and writes a tensor in either pass. Quantized linears cast their input forward and the gradient of their
    output backward."""
    moved, e, c = job.facts.layer.kernels, job.facts.layer.activation_bytes / pace.element_wise, at.layer
    norms = [each * e * sum(branch.norms * branch.hidden for branch in layer.branches) for each in moved.norm_elements]
    passes = []
    for each in range(2):
        stream = moved.stream_elements[each] / 2.0 * e * sum(branch.hidden for branch in layer.branches)
        passes.append((norms[each] + stream) * at.stream)
        mixed = sum(branch.stream_width for branch in layer.branches if branch.streams > 1)
        if mixed:
            passes[each] = passes[each] + (MIXING_PASSES[each] * e * mixed) * at.tokens
        if job.techniques.adapters is not None:
            passes[each] = passes[each] + e * _adapter_elements(job, at, job.techniques.adapters, layer, each)
    activation: FloatColumn | None = None
    for block in layer.blocks:
        amounts = block.memory_work(c)
        if amounts is not None:
            work = seconds_of(job, pace, amounts)
            passes = [passes[0] + work.forward, passes[1] + work.backward]
        if block.scaled:
            passes = [each + (2.0 * e * sum(block.scaled)) * at.tokens for each in passes]
        activated, gates = block.activation_columns(c), block.activation_gates
        if not isinstance(activated, float):
            forward = ((gates + 1.0 + moved.activation_elements[0]) * e) * activated
            backward = ((2.0 * gates + 1.0 + moved.activation_elements[1]) * e) * activated
            activation = forward if activation is None else activation + forward
            passes = [passes[0] + forward, passes[1] + backward]
        if job.facts.layer.quantized is not None:
            cast = [job.facts.layer.quantized.cast_bytes / pace.element_wise * each for each in block.cast_elements(c)]
            passes = [passes[0] + cast[0], passes[1] + cast[1]]
    if activation is None:
        activation = np.zeros(len(at))
    return Work(passes[0], passes[1]), activation, norms[0] * at.stream


def _adapter_elements(job: Job, at: SplitColumns, adapters: Adapters, layer: Layer, each: int) -> FloatColumn:
    """Return the elements that element-wise kernels of a layer's adapters move, forward (0) or backward (1). Those
    beside experts see every copy of a token."""
    moved, elements = job.facts.layer.kernels, np.zeros(len(at))
    for block in layer.blocks:
        for matrix, columns in adapted(block.matrices, adapters):
            rows = block.expert_rows(at.layer) / at.layer.expert_tensor if matrix.of_experts else at.share
            of_row = moved.adapter_input_elements[each] * matrix.inputs + moved.adapter_output_elements[each] * columns
            elements = elements + of_row * rows
    return elements
