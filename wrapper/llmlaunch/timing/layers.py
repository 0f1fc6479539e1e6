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
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_SELECTIVE
from llmlaunch.memory.job import Job
from llmlaunch.memory.layer_bytes import job_columns
from llmlaunch.models.kinds import kind_shares
from llmlaunch.models.linears import attention_linears, latent_linears, mlp_linears
from llmlaunch.techniques import Adapters
from llmlaunch.timing.compressed import compressed_element_wise, compressed_rates
from llmlaunch.timing.constants import constant
from llmlaunch.timing.exchange import (
    TensorPasses,
    beside_another_microbatch,
    beside_exchanges,
    expert_exchange,
    paging,
    tensor_passes,
)
from llmlaunch.timing.launches import MixtureLaunches, captured_share, mixture_launches
from llmlaunch.timing.network import exposed
from llmlaunch.timing.products import (
    DevicePace,
    Rates,
    SplitColumns,
    Work,
    adapted_linears,
    adapted_of_mixture,
    adapter_rates,
    mean_mixer_rates,
    mixed_columns,
    part_share,
    rates,
)
from llmlaunch.timing.recurrent import MAMBA_KERNELS, mixers

__all__ = ["KINDS", "LayerSeconds", "dense_layer", "forward_only", "mixture_layer"]


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
TILE_ROWS = 128.0  # rows of a tile of a grouped product: every expert's tokens fill whole ones
MLP_SHARE = 0.4  # of a dense layer's kernels
# Elements that the biases of experts move for each of a routed token, forward and backward. The second bias is weighted
# by the router and added expert by expert: a product is written, read with the output and written, the experts put
# together; backward, the gradient times the weight and times the bias is written and summed, and put together
# (megatron/core/transformer/moe/experts.py TEGroupedMLP._apply_bias, core 0.19).
BIAS_ELEMENTS = (6.0, 8.0)


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
class _Mlp:
    """The parts in which a dense layer and a mixture differ: the products of the MLP, or of shared experts, for every
    token; elements that leave the activation function; kernels forward and backward; and of a mixture the copies of
    tokens that are routed, the experts' products and their launches."""

    rates: Rates
    activated: FloatColumn
    kernels: tuple[float | FloatColumn, float | FloatColumn]
    copies: FloatColumn | None = None
    experts: Work | None = None
    launches: MixtureLaunches | None = None


@frozen
class _Parts:
    """The parts of a layer before anything is recomputed, with the forward seconds of parts that can be recomputed
    alone."""

    linears: Work
    scores: Work
    element_wise: Work
    activation: FloatColumn
    norms: FloatColumn
    mlp: _Mlp
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


def dense_layer(job: Job, cluster: Cluster, at: SplitColumns, pace: DevicePace, one_pass: FloatColumn) -> LayerSeconds:
    """Return a layer with one MLP, or the mean of layers of one part each that are no mixtures; `one_pass` are the
    seconds of one tensor-parallel gather or scatter."""
    share = 1.0 if job.shape.mamba is None else part_share(job.shape, "mlp")
    width = share * job.shape.ffn_hidden_size
    products = rates(job, pace, mlp_linears(job.shape, float(job.shape.ffn_hidden_size))).of_share(share)
    pieces = job.techniques.mlp_chunks  # each reads the matrices and adds to their gradients by itself
    products = replace(products, per_matrix_split=pieces * products.per_matrix_split)
    launched = _with_adapters(job, _launched(job))
    kernels = tuple(count + MLP_SHARE * count * (pieces - 1) for count in launched)
    return _layer(job, cluster, at, pace, one_pass, _Mlp(products, width * at.share, (kernels[0], kernels[1])))


def _launched(job: Job) -> tuple[float, float]:
    """Return the kernels of a dense layer, or of the mean of layers of one part each."""
    forward, backward = job.facts.kernels.launched
    if job.shape.mamba is None:
        return forward, backward
    mamba, attention, mlp = (part_share(job.shape, part) for part in ("mamba", "attention", "mlp"))
    usual = (1.0 - MLP_SHARE) * attention + MLP_SHARE * mlp
    return usual * forward + mamba * MAMBA_KERNELS[0], usual * backward + mamba * MAMBA_KERNELS[1]


def _with_adapters(job: Job, launched: tuple[float, float]) -> tuple[float, float]:
    """Return the kernels of a layer with those of the adapters beside its linear layers. A frozen matrix has no
    gradient: that is one kernel less, backward."""
    adapters = job.techniques.adapters
    if adapters is None:
        return launched
    adapted, frozen = (float(len(adapted_linears(job.shape, targets))) for targets in (adapters.targets, None))
    forward, backward = job.facts.kernels.adapter
    return launched[0] + adapted * forward, launched[1] + adapted * backward - frozen


def mixture_layer(
    job: Job, cluster: Cluster, at: SplitColumns, pace: DevicePace, one_pass: FloatColumn
) -> LayerSeconds:
    """Return a layer with a mixture of experts: every device's experts get, of all tokens of its expert group, as many
    copies as its own tokens are routed to, the busiest device `expert_imbalance` times that. Experts that one kernel
    multiplies have their activation function and its quantization at the end of that kernel."""
    moe = job.shape.moe
    assert moe is not None
    if job.techniques.overlaps_experts:
        pace = beside_exchanges(pace)
    etp = at.layouts.expert_tensor.astype(np.float64)
    factor = job.facts.expert_imbalance
    if moe.capacity_factor is not None:
        factor = min(factor, moe.capacity_factor)
    copies = (factor * moe.topk) * at.share * etp
    local = moe.num_experts / at.layouts.expert
    rows = TILE_ROWS * local * np.ceil(copies / (TILE_ROWS * local))
    width, beside = float(moe.ffn_hidden_size), float(moe.shared_expert_ffn_hidden_size)
    products = mlp_linears(job.shape, width, job.shape.expert_width)
    experts = rates(job, pace, products).work(rows, rows / etp, local / etp)
    launches = mixture_launches(job, local)
    activated = (0.0 if job.facts.experts_fused else width / etp) * copies + beside * at.share
    every_token = (*(mlp_linears(job.shape, beside) if beside else ()), *latent_linears(job.shape))
    shared = rates(job, pace, every_token) if every_token else Rates()
    mlp = _Mlp(shared, activated, (launches.forward, 0.0), copies, experts, launches)
    return _layer(job, cluster, at, pace, one_pass, mlp)


def _adapters(job: Job, adapters: Adapters, at: SplitColumns, pace: DevicePace, mlp: _Mlp) -> Work:
    """Return the seconds of the adapters' products. Those beside experts see every copy of a token."""
    shape = job.shape
    if mlp.copies is None or shape.moe is None:
        linears = adapted_linears(shape, adapters.targets)
        return adapter_rates(job, pace, linears).work(at.tokens, at.share, at.per_tensor)
    every_token, experts = adapted_of_mixture(shape, shape.moe, adapters.targets)
    etp = at.layouts.expert_tensor.astype(np.float64)
    beside_experts = adapter_rates(job, pace, experts).work(mlp.copies, mlp.copies / etp, 1.0 / etp)
    return adapter_rates(job, pace, every_token).work(at.tokens, at.share, at.per_tensor) + beside_experts


def _layer(
    job: Job, cluster: Cluster, at: SplitColumns, pace: DevicePace, one_pass: FloatColumn, mlp: _Mlp
) -> LayerSeconds:
    mixture, compressed = mlp.copies is not None, job.shape.compressed_attention is not None
    every = (compressed_rates(job, pace) if compressed else mean_mixer_rates(job, pace, mixture)) + mlp.rates
    linears = every.work(at.tokens, at.share, at.per_tensor)
    if mlp.experts is not None:
        linears = linears + mlp.experts
    if job.techniques.adapters is not None:
        linears = linears + _adapters(job, job.techniques.adapters, at, pace, mlp)
    ordinary, scores, context = mixers(job, cluster, at, pace, mixture)
    element, activation, norms = _element_wise(job, at, pace, mlp)
    if compressed or job.shape.residual_streams > 1:
        element = element + compressed_element_wise(job, pace, at)
    tensor = tensor_passes(job, at, one_pass, mixture)
    expert = expert_exchange(job, cluster, at) if mixture else None
    parts = _Parts(linears, ordinary, element, activation, norms, mlp, tensor, context, expert)
    if mlp.experts is not None and mlp.copies is not None and job.techniques.paged_stash is not None:
        others = linears + scores + element
        beside = Work(others.forward - mlp.experts.forward, others.backward - mlp.experts.backward)
        element = element + paging(job, pace, mlp.copies, beside)
    forward = linears.forward + scores.forward + element.forward
    backward = linears.backward + scores.backward + element.backward
    repeated_kernels: float | FloatColumn = 0.0
    recomputed: FloatColumn | None = None
    if np.any(at.layouts.recompute):
        recomputed, repeated_kernels = _recomputed(job, at, pace, parts, forward)
        backward = backward + recomputed
    if _chunks_again(job, mlp):
        not_full = at.layouts.recompute != RECOMPUTE_FULL  # full recompute repeats it with the rest
        repeated = not_full * (mlp.rates.work(at.tokens, at.share, at.per_tensor).forward + activation)
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
    mlp: _Mlp,
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
        shared = mlp.rates.work(at.tokens, at.share, at.per_tensor)
        return Work(exposed(expert.forward, shared.forward), exposed(expert.backward, shared.backward))
    return expert


def _beside_exchanges(
    at: SplitColumns, mlp: _Mlp, activation: FloatColumn, forward: FloatColumn, backward: FloatColumn
) -> list[FloatColumn]:
    """Return the seconds of attention and of the mixture, forward and backward; a mixture's activation takes as long
    again backward as its inputs and outputs are more."""
    assert mlp.experts is not None
    products = mlp.experts + mlp.rates.work(at.tokens, at.share, at.per_tensor)
    mixture = products.forward + activation, np.minimum(products.backward + activation, backward)
    return [forward - mixture[0], mixture[0], backward - mixture[1], mixture[1]]


def _chunks_again(job: Job, mlp: _Mlp) -> bool:
    """Whether a chunked MLP is recomputed before its backward pass (Luo et al. 2024, MsT)."""
    return job.techniques.mlp_chunks > 1 and job.facts.mlp_chunks_recomputed and mlp.copies is None


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
    captured = captured_share(job, job.facts.kernels.launched)
    gap = (1.0 - captured) * constant("kernel_seconds") + captured * constant("graph_kernel_seconds")
    host_seconds = pace.host_seconds_factor * constant("kernel_host_seconds") * (1.0 - captured)
    host = host_seconds * kernels + np.zeros_like(running)
    seconds: FloatColumn = np.maximum(host - running, gap * kernels)
    return host, seconds


def _element_wise(job: Job, at: SplitColumns, pace: DevicePace, mlp: _Mlp) -> tuple[Work, FloatColumn, FloatColumn]:
    """Return the seconds of element-wise operations: bytes read and written through device memory. Norms, residual
    additions and rotary positions as the backend's kernels move them; fused, a gated activation reads 2 and writes 1
    forward, reads 3 and writes 2 backward. A mixture permutes its tokens there and back, and after a plain exchange
    sorts them by the device's experts and back. Quantized linears cast their input forward and the gradient of their
    output backward."""
    shape, moved, e = job.shape, job.facts.kernels, job.facts.activation_bytes / pace.element_wise
    h, activated, outer = float(shape.hidden_size), mlp.activated, float(shape.expert_width)
    gates, blocks = 2.0 if shape.gated_mlp else 1.0, 2.0 if shape.mamba is None else 1.0
    queries, projected = mixed_columns(shape, mlp.copies is not None)
    turned = shape.mamba is None or shape.position_embedding == "rope"
    rotated = e * turned * sum(share * (kind.query_width + kind.key_value_width) for kind, share in kind_shares(shape))
    norms, passes = [], []
    for each in range(2):
        norms.append(moved.norm_elements[each] * shape.norms_per_layer * e * h)
        around = norms[each] + moved.stream_elements[each] * blocks / 2.0 * e * h
        passes.append(around * at.stream + (moved.rotary_elements[each] * rotated) * at.share)
        if mlp.copies is not None:
            slower = constant("element_wise_efficiency") / constant("permutation_efficiency")
            passes[each] = passes[each] + (slower * e * outer) * _permuting_passes(job, at) * mlp.copies
            if shape.linear_bias and not job.facts.experts_fused:
                passes[each] = passes[each] + (BIAS_ELEMENTS[each] * e * h) * mlp.copies
        if job.techniques.adapters is not None:
            passes[each] = passes[each] + (_adapter_elements(job, job.techniques.adapters, each) * e) * at.share
    activation = ((gates + 1.0 + moved.activation_elements[0]) * e) * activated
    forward = passes[0] + activation
    backward = passes[1] + ((2.0 * gates + 1.0 + moved.activation_elements[1]) * e) * activated
    if job.facts.quantized is not None:
        cast = job.facts.quantized.cast_bytes / pace.element_wise
        blocks -= 1.0 if mlp.copies is not None and not mlp.rates.per_row_split else 0.0
        routed = 0.0 if mlp.copies is None else outer * mlp.copies
        inputs = (blocks * h) * at.tokens + routed + queries * at.share
        outputs = (blocks * h) * at.tokens + routed + projected * at.share
        forward = forward + cast * (inputs + activated)
        backward = backward + cast * (outputs + gates * activated)
    return Work(forward, backward), activation, norms[0] * at.stream


def _adapter_elements(job: Job, adapters: Adapters, each: int) -> float:
    """Return the elements a token that element-wise kernels of a layer's adapters move, forward (0) or backward (1)."""
    linears, moved = adapted_linears(job.shape, adapters.targets), job.facts.kernels
    inputs = moved.adapter_input_elements[each] * sum(linear.inputs for linear in linears)
    return inputs + moved.adapter_output_elements[each] * sum(linear.outputs for linear in linears)


def _permuting_passes(job: Job, at: SplitColumns) -> float | FloatColumn:
    """Return how often a routed token is read or written to be permuted, there and back."""
    moe = job.shape.moe
    assert moe is not None
    if job.techniques.token_dispatcher in ("flex", "allgather"):
        return 4.0
    return np.where(moe.num_experts > at.layouts.expert, 8.0, 4.0)


def _recomputed(
    job: Job, at: SplitColumns, pace: DevicePace, parts: _Parts, forward: FloatColumn
) -> tuple[FloatColumn, float | FloatColumn]:
    """Return the seconds of forward work recomputed before the backward pass, with its communication, and the kernels
    launched for it. Full recompute does all of a layer again, by the method "block" of some layers of each model chunk
    alone. Selective recompute does what its modules name (megatron/core/transformer/transformer_layer.py, core 0.19).
    """
    recompute = at.layouts.recompute
    whole = forward + 4.0 * parts.tensor.seconds
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
    mixture = parts.expert is not None
    launched = parts.mlp.kernels[0]
    of_mlp = parts.mlp.rates.work(at.tokens, at.share, at.per_tensor).forward  # or of shared experts

    def has(*names: str) -> bool | BoolColumn:
        return reduce(or_, (job_columns(job, at.layouts).recomputes(name) for name in names))

    attention = parts.scores.forward if parts.context is None else parts.scores.forward + parts.context.forward
    modules: list[tuple[bool | BoolColumn, FloatColumn, float | FloatColumn]] = [(has("core_attn"), attention, 2.0)]
    if job.shape.mla is not None and np.any(has("mla_up_proj")):
        up = [linear for linear in attention_linears(job.shape)[:-1] if linear.divided == "outputs"]
        up_projections = rates(job, pace, up).work(at.tokens, at.share, at.per_tensor)
        modules.append((has("mla_up_proj"), up_projections.forward, 4.0))
    modules.append((has("layernorm"), parts.norms, 2.0))
    if not mixture:
        modules.append((has("mlp"), of_mlp + parts.activation + 2.0 * parts.tensor.seconds, MLP_SHARE * launched))
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
