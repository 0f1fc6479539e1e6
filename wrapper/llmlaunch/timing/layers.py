"""Seconds of one decoder layer on one device for one micro-batch, by what they are spent on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from operator import or_

import numpy as np

from llmlaunch.cluster.profile import Cluster
from llmlaunch.columns import BoolColumn, FloatColumn
from llmlaunch.frozen import frozen
from llmlaunch.layers.adapters import adapted
from llmlaunch.layers.block import MLP_SHARE
from llmlaunch.layers.columns import LayerColumns
from llmlaunch.layers.layer import Layer
from llmlaunch.layers.mixture import Mixture
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_SELECTIVE
from llmlaunch.memory.job import Job
from llmlaunch.techniques.adapters import Adapters
from llmlaunch.timing.constants import constant
from llmlaunch.timing.exchange import (
    TensorPasses,
    beside_another_microbatch,
    beside_exchanges,
    context_exchange,
    paging,
    tensor_passes,
)
from llmlaunch.timing.launches import MixtureLaunches, captured_share, mixture_launches
from llmlaunch.timing.network import exposed
from llmlaunch.timing.products import DevicePace, Rates, SplitColumns, Work, adapter_rates, rates, seconds_of

__all__ = ["KINDS", "Collectives", "LayerSeconds", "forward_only", "layer_seconds"]


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


@frozen
class _Mlps:
    """The parts of a layer's MLPs or mixture: the products of the MLPs, or of a shared expert and of latents, for every
    token; kernels forward of all of the layer; and of a mixture its experts' products and launches."""

    every_token: Rates
    kernels: tuple[float | FloatColumn, float | FloatColumn]
    mixture: Mixture | None = None
    experts: Work | None = None
    launches: MixtureLaunches | None = None


@frozen
class _Parts:
    """The parts of a layer before anything is recomputed, with the forward seconds of parts that can be recomputed
    alone."""

    layer: Layer
    linears: Work
    scores: Work  # of softmax attention
    element_wise: Work
    activation: FloatColumn
    norms: FloatColumn
    mlp: _Mlps
    tensor: TensorPasses
    context: Work | None
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
    mixture = next(layer.blocks_of(Mixture), None)
    if mixture is not None and job.techniques.overlaps_experts:
        pace = beside_exchanges(pace)
    mlp, linears = _products(job, at, pace, layer, mixture)
    softmax, scores, context = _over_sequence(job, cluster, at, pace, layer)
    element, activation, norms = _element_wise(job, at, pace, layer)
    tensor = tensor_passes(job, at, collectives.one_pass, layer)
    expert = collectives.expert if mixture is not None else None
    if mlp.experts is not None and mixture is not None and job.techniques.paged_stash is not None:
        others = linears + scores + element
        beside = Work(others.forward - mlp.experts.forward, others.backward - mlp.experts.backward)
        element = element + paging(job, at, pace, mixture, beside)
    parts = _Parts(layer, linears, softmax, element, activation, norms, mlp, tensor, context, expert)
    return _combined(job, at, pace, parts, scores)


def _products(
    job: Job, at: SplitColumns, pace: DevicePace, layer: Layer, mixture: Mixture | None
) -> tuple[_Mlps, Work]:
    """Return the parts of a layer's MLPs, and the seconds of all its matrix products."""
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
        return _Mlps(of_mlps, _launched(job, c, layer)), linears
    etp, rows, local = c.expert_tensor, mixture.expert_rows(c), mixture.experts_on_device(c)
    experts = rates(job, pace, mixture.expert_matrices).work(rows, rows / etp, local / etp)
    linears = linears + experts
    if adapters is not None:
        copies, beside = mixture.busiest_copies(c), adapted(mixture.expert_matrices, adapters)
        linears = linears + adapter_rates(job, pace, beside).work(copies, copies / etp, 1.0 / etp)
    launches = mixture_launches(job, mixture, local, len(layer.blocks) - 1)
    return _Mlps(of_mlps, (launches.forward, 0.0), mixture, experts, launches), linears


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


def _combined(job: Job, at: SplitColumns, pace: DevicePace, parts: _Parts, scores: Work) -> LayerSeconds:
    """Return the seconds of a layer of its parts. What is launched later than the device is done, and what of exchanges
    nothing hides, follow from all of it together."""
    linears, element, mlp, activation = parts.linears, parts.element_wise, parts.mlp, parts.activation
    tensor, context, expert = parts.tensor, parts.context, parts.expert
    forward = linears.forward + scores.forward + element.forward
    backward = linears.backward + scores.backward + element.backward
    repeated_kernels: float | FloatColumn = 0.0
    recomputed: FloatColumn | None = None
    if np.any(at.layouts.recompute):
        recomputed, repeated_kernels = _recomputed(job, at, pace, parts, forward)
        backward = backward + recomputed
    if _chunks_again(job, mlp):
        not_full = at.layouts.recompute != RECOMPUTE_FULL  # full recompute repeats it with the rest
        repeated = not_full * (mlp.every_token.work(at.tokens, at.share, at.per_tensor).forward + activation)
        repeated_kernels = repeated_kernels + MLP_SHARE * mlp.kernels[0] * not_full
        backward = backward + repeated
        recomputed = repeated if recomputed is None else recomputed + repeated
    if job.techniques.swapped_share:
        repeated = _tokens_again(job, at, forward - scores.forward)
        repeated_kernels = repeated_kernels + np.where(repeated > 0, mlp.kernels[0], 0.0)
        backward = backward + repeated
        recomputed = repeated if recomputed is None else recomputed + repeated
    device, waits = forward + backward, tensor.exposed(linears.backward)
    hidden: FloatColumn | None = None
    if expert is not None:
        waited = _waited(job, at, mlp, expert, activation, (forward, backward))
        hidden, expert = (expert.both - waited.both if job.techniques.overlaps_experts else None), waited
    running = device + waits + sum(exchange.both for exchange in (context, expert) if exchange is not None)
    if mlp.launches is not None and expert is not None:
        passes = forward + expert.forward, backward + expert.backward
        host, launches = _mixture_launches(job, pace, mlp.launches, passes, repeated_kernels)
    else:
        host, launches = _launches(job, pace, mlp.kernels[0] + mlp.kernels[1] + repeated_kernels, running)
    launching = launches * (1.0 / 3.0)
    busy = forward + launching, backward + 2.0 * launching
    seconds = running + launches
    return LayerSeconds(
        seconds, host, *busy, linears, scores, element, launches, waits, context, expert, recomputed, hidden
    )


def _waited(
    job: Job,
    at: SplitColumns,
    mlp: _Mlps,
    expert: Work,
    activation: FloatColumn,
    passes: tuple[FloatColumn, FloatColumn],
) -> Work:
    """Return what is waited for of the exchange: all of it, unless it runs beside another micro-batch's `passes` or
    beside the shared expert, whose first products run while tokens go and whose last ones while they come back
    (megatron/core/transformer/moe/shared_experts.py, core 0.19)."""
    forward, backward = passes
    if job.techniques.delay_weight_gradients:
        return beside_another_microbatch(expert, [forward + backward])
    if job.techniques.overlap_expert_communication:
        return beside_another_microbatch(expert, _beside_exchanges(at, mlp, activation, forward, backward))
    if job.techniques.overlap_shared_expert:
        shared = mlp.every_token.work(at.tokens, at.share, at.per_tensor)
        return Work(exposed(expert.forward, shared.forward), exposed(expert.backward, shared.backward))
    return expert


def _beside_exchanges(
    at: SplitColumns, mlp: _Mlps, activation: FloatColumn, forward: FloatColumn, backward: FloatColumn
) -> list[FloatColumn]:
    """Return the seconds of attention and of the mixture, forward and backward; a mixture's activation takes as long
    again backward as its inputs and outputs are more."""
    assert mlp.experts is not None
    products = mlp.experts + mlp.every_token.work(at.tokens, at.share, at.per_tensor)
    mixture = products.forward + activation, np.minimum(products.backward + activation, backward)
    return [forward - mixture[0], mixture[0], backward - mixture[1], mixture[1]]


def _chunks_again(job: Job, mlp: _Mlps) -> bool:
    """Whether a chunked MLP is recomputed before its backward pass (Luo et al. 2024, MsT)."""
    return job.techniques.mlp_chunks > 1 and job.facts.layer.mlp_chunks_recomputed and mlp.launches is None


def _tokens_again(job: Job, at: SplitColumns, forward: FloatColumn) -> FloatColumn:
    """Return the seconds of recomputing the tokens whose activations are not swapped: all of a layer but attention,
    whose output is swapped whole (MEMO, Zhao et al. 2025, section 4.1). Full recompute does it anyway. What-if."""
    share = (1.0 - job.techniques.swapped_share) * (at.layouts.recompute != RECOMPUTE_FULL)
    return np.asarray(share * forward)


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


def _recomputed(
    job: Job, at: SplitColumns, pace: DevicePace, parts: _Parts, forward: FloatColumn
) -> tuple[FloatColumn, float | FloatColumn]:
    """Return the seconds of forward work recomputed before the backward pass, with its communication, and the kernels
    launched for it. Full recompute does all of a layer again, by the method "block" of some layers of each model chunk
    alone. Selective recompute does what its modules name (megatron/core/transformer/transformer_layer.py, core 0.19).
    """
    recompute = at.layouts.recompute
    whole = forward + 2.0 * len(parts.layer.branches) * parts.tensor.seconds
    for exchange in (parts.context, parts.expert):
        if exchange is not None:
            whole = whole + exchange.forward
    share = _full_share(job, at)
    recomputed, kernels = share * whole, share * parts.mlp.kernels[0]
    selective = recompute == RECOMPUTE_SELECTIVE
    if not np.any(selective):
        return recomputed, kernels
    some, some_kernels = _of_modules(job, at, pace, parts)
    return np.where(selective, some, recomputed), np.where(selective, some_kernels, kernels)


def _full_share(job: Job, at: SplitColumns) -> FloatColumn:
    """Return the share of all layers that full recompute recomputes; 0 where it is not used."""
    lay = at.layouts
    full: FloatColumn = (lay.recompute == RECOMPUTE_FULL).astype(np.float64)
    if job.techniques.recompute_method != "block" or not np.any(lay.recompute_layers):
        return full
    counted = np.minimum(lay.recompute_layers * (at.pipeline * at.chunks) / job.shape.num_layers, 1.0)
    return full * np.where(lay.recompute_layers > 0, counted, 1.0)


def _of_modules(job: Job, at: SplitColumns, pace: DevicePace, parts: _Parts) -> tuple[FloatColumn, float | FloatColumn]:
    """Return the forward seconds of the modules selective recompute names, and their kernels."""
    launched = parts.mlp.kernels[0]
    of_mlp = parts.mlp.every_token.work(at.tokens, at.share, at.per_tensor).forward  # or of a shared expert
    roles = {block.role for block in parts.layer.blocks}

    def has(*names: str) -> bool | BoolColumn:
        return reduce(or_, (at.layer.recomputes(name) for name in names))

    modules: list[tuple[bool | BoolColumn, FloatColumn, float | FloatColumn]] = [(has("layernorm"), parts.norms, 2.0)]
    if ATTENTION in roles:
        attention = parts.scores.forward if parts.context is None else parts.scores.forward + parts.context.forward
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
    return seconds, kernels
