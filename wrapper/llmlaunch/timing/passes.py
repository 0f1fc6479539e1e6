"""Seconds of a step's forward and backward passes: everything but the parameter update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import reduce

import numpy as np

from llmlaunch.cluster.profile import Cluster
from llmlaunch.columns import BoolColumn, FloatColumn, IntColumn
from llmlaunch.frozen import frozen
from llmlaunch.layers.columns import Size
from llmlaunch.layers.model import model_of
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.activations import kept_by_layer
from llmlaunch.memory.job import Job, without_layers
from llmlaunch.timing.effects import TimeEffect, time_effects, time_effects_in_use
from llmlaunch.timing.layers import KINDS, LayerSeconds
from llmlaunch.timing.network import copied, exposed, host_link_bytes_per_second, pipeline_hop
from llmlaunch.timing.products import SplitColumns, constant, split_of
from llmlaunch.timing.stages import (
    FullestStage,
    Pieces,
    Stages,
    heads_layers,
    heads_seconds,
    of_counts,
    pieces,
    stages,
    stages_in_balance,
)

PIECE = 4096  # layouts worked out together
WHOLE = 1e-9  # a whole number of layers by their seconds may come out more by this share
LOADER_WORKERS = 2.0  # Megatron's --num-workers by default, and what other loaders are usually given


@frozen
class PassSeconds:
    """Columns of seconds of a step's passes, `total`, and what can hide the transfers of data parallelism: seconds that
    one micro-batch computes forward and backward on the busiest stage, and how many times that where they happen once
    a step. `host_slack` are the seconds of one micro-batch on that stage in which the host has nothing to launch."""

    job: Job
    cluster: Cluster
    layouts: LayoutColumns
    microbatches: FloatColumn
    total: FloatColumn
    hiding_forward: FloatColumn
    hiding_backward: FloatColumn
    hiding_times: FloatColumn
    host_slack: FloatColumn

    def take(self, index: BoolColumn | IntColumn) -> PassSeconds:
        """Return the layouts that an index array or a mask selects."""
        columns = {
            f.name: getattr(self, f.name)[index] for f in fields(self) if f.name not in ("job", "cluster", "layouts")
        }
        return PassSeconds(self.job, self.cluster, self.layouts.take(index), **columns)

    @property
    def terms(self) -> Mapping[str, FloatColumn]:
        """`total` by what it is spent on, computed on demand, because a search of a million layouts does not need
        it."""
        passes = _passes(self.job, self.cluster, self.layouts, self.microbatches)
        terms = {name: self.microbatches * column for name, column in _slowest_by_kind(self.job, passes).items()}
        for name, column in passes.beside.items():
            terms[name] = terms[name] + column if name in terms else column
        return terms


@frozen
class _Passes:
    """The parts of a step's passes; `beside` holds by term what is not the work of the slowest stage."""

    at: SplitColumns
    pieces: Pieces
    stages: Stages
    beside: Mapping[str, FloatColumn]
    total: FloatColumn
    hiding: tuple[FloatColumn, FloatColumn, FloatColumn]
    host_slack: FloatColumn


def pass_seconds(
    job: Job,
    cluster: Cluster,
    layouts: LayoutColumns,
    microbatches: IntColumn | None = None,
) -> PassSeconds:
    """Return every layout's passes. Nothing here depends on the ZeRO stage, the gradients' type or where the optimizer
    is.

    The passes are computed a piece at a time: columns of a few thousand rows stay in the processor's cache.
    """
    if microbatches is None:
        microbatches = layouts.num_microbatches(job.workload.global_batch_size)
    m = np.maximum(microbatches.astype(np.float64), 1.0)
    parts = [slice(start, start + PIECE) for start in range(0, max(len(layouts), 1), PIECE)]
    blocks = [_passes(job, cluster, layouts.take(part), m[part]) for part in parts]
    columns = zip(*((block.total, *block.hiding, block.host_slack) for block in blocks), strict=True)
    return PassSeconds(job, cluster, layouts, m, *(np.concatenate(column) for column in columns))


def _passes(job: Job, cluster: Cluster, layouts: LayoutColumns, m: FloatColumn) -> _Passes:
    """Return the passes of one piece. With stages that take S seconds for a micro-batch, the slowest of them S*, a step
    of m micro-batches takes `m S* + (sum S - S*) / v`: the pipeline fills and drains once, in 1/v of the time where
    each rank runs v chunks in turn (Narayanan et al. 2021, section 2.2). The slowest stage is shown by kind of work,
    the rest is the bubble."""
    at = split_of(job, layouts)
    parts = pieces(job, cluster, at)
    stages_ = stages(job, layouts, parts.seconds)
    beside = _beside(job, cluster, at, m, stages_, _bubble(job, at, parts, stages_), _unpaired_exchange(job, parts))
    forward, backward = _compute(parts, stages_)
    if moves_activations(job, layouts):
        moving = moving_seconds(job, cluster, layouts, stages_.layers)
        beside["host_transfers"] = m * (copied(cluster, moving, forward) + copied(cluster, moving, backward))
    work = m * stages_.slowest_seconds
    for column in beside.values():
        work = work + column
    slack = np.maximum(stages_.slowest_seconds - _launched(parts, stages_), 0.0)
    return _Passes(at, parts, stages_, beside, work, (forward, backward, _times(job, at, m)), slack)


def _beside(
    job: Job,
    cluster: Cluster,
    at: SplitColumns,
    m: FloatColumn,
    stages_: Stages,
    bubble: FloatColumn,
    unpaired: FloatColumn | None,
) -> dict[str, FloatColumn]:
    """Return what passes take beside the work of the slowest stage and its transfers to the host, by term."""
    beside = {
        "pipeline_bubble": bubble,
        "pipeline_transfer": _transfer(job, cluster, at, m, stages_),
        "stragglers": _stragglers(at, m * stages_.slowest_seconds + bubble),
    }
    if job.facts.host.loader_mask and not job.facts.host.loader_mask_kept:
        beside["data_loading"] = m * np.maximum(_loading(job, at.layouts) - stages_.slowest_seconds, 0.0)
    if unpaired is not None:
        beside["expert_parallel"] = unpaired
    return beside


def passes_in_balance(
    job: Job,
    cluster: Cluster,
    layouts: LayoutColumns,
    few: LayoutColumns,
    few_of: IntColumn,
    parts: Pieces,
    fullest: FullestStage,
) -> FloatColumn:
    """Return the seconds of every layout's passes if each stage took its share of all seconds, whatever layers it
    holds, and the slowest no less than the layers that some stage holds at least (the `fullest`): no such cut of the
    layers is faster. Layers take as long as in the one of a `few` layouts at `few_of`, of which `parts` are the parts.
    """
    at, seconds = split_of(job, layouts), parts.seconds.take(few_of)
    m = np.maximum(layouts.num_microbatches(job.workload.global_batch_size).astype(np.float64), 1.0)
    stages_ = stages_in_balance(job, layouts, seconds, fullest)
    bubble = np.zeros(len(at))
    if fills_and_drains(job):
        bubble = np.maximum(stages_.all_seconds - stages_.slowest_seconds, 0.0) / at.chunks
    unpaired = _unpaired_exchange(job, parts)
    beside = _beside(job, cluster, at, m, stages_, bubble, None if unpaired is None else unpaired[few_of])
    beside.pop("data_loading", None)  # a slower stage waits less for it
    if moves_activations(job, few) and job.techniques.trained_layers is None and not np.any(few.offload_layers):
        beside["host_transfers"] = m * _least_host_transfers(job, cluster, at, stages_, few, few_of, parts)
    total: FloatColumn = m * stages_.slowest_seconds + sum(beside.values())
    return total


def _least_host_transfers(
    job: Job,
    cluster: Cluster,
    at: SplitColumns,
    stages_: Stages,
    few: LayoutColumns,
    few_of: IntColumn,
    parts: Pieces,
) -> FloatColumn:
    """Return the seconds that transfers to the host add to one micro-batch at least. The slowest stage holds whole
    layers, and of the more frequent class no fewer than fill its seconds beside an end and all layers of the other
    class; the transfers of those are hidden by no more than these and all layers of the other class compute. Each
    layer of a class takes as long as the slowest kind of it, and moves as little as the one that moves least."""
    model = model_of(job.shape)
    classes, counts = model.classes, [sum(model.counts[place] for place in kinds) for kinds in model.classes]
    kind = int(counts[1] > counts[0])
    layer, other = ([parts.layers[place] for place in each] for each in (classes[kind], classes[1 - kind]))
    seconds = parts.seconds.take(few_of)
    last = seconds.last + heads_seconds(job, seconds)
    rest = stages_.slowest_seconds - np.where(at.pipeline > 1.0, np.maximum(seconds.first, last), seconds.first + last)
    each = moving_seconds_of_layers(job, cluster, few, 1.0)
    spare, moving = counts[1 - kind], reduce(np.minimum, (each[place] for place in classes[kind]))[few_of]

    def most(layers: Sequence[LayerSeconds], name: str) -> FloatColumn:
        columns: list[FloatColumn] = [getattr(each, name)[few_of] for each in layers]
        return reduce(np.maximum, columns) if columns else np.zeros(len(few_of))

    layers = np.ceil(np.maximum(rest - spare * most(other, "seconds"), 0.0) / most(layer, "seconds") * (1.0 - WHOLE))
    forward, backward = (
        copied(cluster, layers * moving, layers * most(layer, name) + spare * most(other, name))
        for name in ("forward", "backward")
    )
    return forward + backward


def _slowest_by_kind(job: Job, passes: _Passes) -> dict[str, FloatColumn]:
    """Return the seconds of one micro-batch on the slowest stage, by kind: its layers and the ends it holds."""
    parts, stages_ = passes.pieces, passes.stages
    kinds: dict[str, FloatColumn] = {}
    on_slowest = [
        *zip(parts.layers, stages_.layers, heads_layers(job), strict=True),
        *((layer, count, 0) for layer, count in zip(parts.frozen, stages_.frozen, strict=True)),
    ]
    for layer, held, of_heads in on_slowest:
        count = held + of_heads * stages_.heads
        for kind, column in layer.kinds.items():
            kinds[kind] = kinds[kind] + count * column if kind in kinds else count * column
    for kind, column in parts.ends.last.items():
        kinds[kind] = kinds[kind] + stages_.last * column if kind in kinds else stages_.last * column
    for kind, column in parts.ends.first.items():
        kinds[kind] = kinds[kind] + stages_.first * column if kind in kinds else stages_.first * column
    return {kind: kinds[kind] for kind in KINDS if kind in kinds}


def fills_and_drains(job: Job) -> bool:
    """Whether the slowest stage of a pipeline waits once a step for all others to fill and drain."""
    return all(effect.fills_and_drains for effect in time_effects_in_use(job))


def _bubble(job: Job, at: SplitColumns, parts: Pieces, stages_: Stages) -> FloatColumn:
    """Return the seconds in which the slowest stage waits for the others to fill and drain."""

    def weight_gradients() -> FloatColumn:
        # the backward pass of a product is that of its input, as long as forward, and the weights'
        others = [count - slowest for count, slowest in zip(model_of(job.shape).counts, stages_.layers, strict=True)]
        return of_counts(others, [layer.linears.backward - layer.linears.forward for layer in parts.layers])

    bubble: FloatColumn = np.maximum(stages_.all_seconds - stages_.slowest_seconds, 0.0) / at.chunks
    for effect in time_effects(job, TimeEffect.bubble):
        bubble = effect(at, bubble, weight_gradients)
    return bubble


def _unpaired_exchange(job: Job, parts: Pieces) -> FloatColumn | None:
    """Return the seconds of exchange that no other micro-batch hides; None where none does at all. The first
    micro-batch goes forward through all layers before there is a backward pass, and the last goes back through all of
    them after the last forward pass, however the layers are cut into stages and chunks."""
    layers = zip(model_of(job.shape).counts, heads_layers(job), parts.layers, strict=True)
    hidden = [(count + more) * each.hidden_exchange for count, more, each in layers if each.hidden_exchange is not None]
    return reduce(np.add, hidden) if hidden else None


def _transfer(job: Job, cluster: Cluster, at: SplitColumns, m: FloatColumn, stages_: Stages) -> FloatColumn:
    """Return the seconds of pipeline transfers. The hidden critical path of 1F1B: a micro-batch's round trip through
    all stages is waited for once for every p micro-batches (Pipette, Yim et al. 2024, section 4). Interleaved chunks
    send while the next one runs: what a chunk does not hide is waited for, what it hides takes its share of the device,
    and the first round trip is waited for."""
    p, v = at.pipeline, at.chunks
    if not np.any(at.layouts.pipeline > 1):
        return np.zeros(len(at))
    message = (job.facts.residual_bytes * job.shape.stream_width) * at.stream
    hop = pipeline_hop(cluster, at.tensor * at.context * at.data, p, message)
    hops = p - 1.0
    if job.techniques.heads_before_loss:  # the last message is as many times as long as there are predictions
        hops = hops + job.shape.mtp_num_layers
    trips = 2.0 * hops * hop
    plain: FloatColumn = np.ceil(m / p) * trips
    if not np.any(at.layouts.virtual_pipeline > 1):
        return plain
    hidden = trips + 2.0 * m * exposed(v * hop, stages_.slowest_seconds / 3.0)
    return np.where(v > 1.0, hidden, plain)


def _stragglers(at: SplitColumns, passes: FloatColumn) -> FloatColumn:
    """Return slack for the slowest device: devices of one kind differ in the clock they sustain, by a deviation that is
    a share of the passes' seconds, and all wait for the slowest, which of W devices lies sqrt(2 ln W) deviations below
    the mean (extreme values of normal variables)."""
    devices = at.tensor * at.pipeline * at.context * at.data
    first = devices[:1]
    few = first if np.all(devices == first) else devices  # all layouts of a search have as many
    slack: FloatColumn = straggler_share(few) * passes
    return slack


def straggler_share(devices: FloatColumn) -> FloatColumn:
    """Return the share of the passes' seconds that all of so many `devices` wait for the slowest of them."""
    share: FloatColumn = constant("straggler_spread") * np.sqrt(2.0 * np.log(devices))
    return share


def _loading(job: Job, layouts: LayoutColumns) -> FloatColumn:
    """Return the seconds until the loader has the next micro-batch where every sample brings its own s x s attention
    mask: made on the host entry by entry, by a few workers."""
    entries = float(job.workload.sequence_length) ** 2 * layouts.micro_batch_size
    return np.asarray(constant("mask_entry_seconds") / LOADER_WORKERS * entries)


def _compute(parts: Pieces, stages_: Stages) -> tuple[FloatColumn, FloatColumn]:
    """Return the (forward, backward) seconds of one micro-batch in the layers of the slowest stage."""
    counts, layers = (*stages_.layers, *stages_.frozen), (*parts.layers, *parts.frozen)
    backward = of_counts(stages_.layers, [layer.backward for layer in parts.layers])
    return of_counts(counts, [layer.forward for layer in layers]), backward


def _launched(parts: Pieces, stages_: Stages) -> FloatColumn:
    """Return the seconds in which the host launches one micro-batch of the layers of the slowest stage."""
    counts, layers = (*stages_.layers, *stages_.frozen), (*parts.layers, *parts.frozen)
    return of_counts(counts, [layer.host for layer in layers])


def _times(job: Job, at: SplitColumns, m: FloatColumn) -> FloatColumn:
    """Return the number of micro-batches whose passes run beside transfers that happen once a step: one, and where a
    rank runs v chunks in turn, p of all chunks but one, because buckets belong to a chunk (megatron/core/distributed/
    param_and_grad_buffer.py, core 0.19)."""
    if not np.any(at.layouts.virtual_pipeline > 1):
        times = np.ones(len(at))
    else:
        times = (1.0 + (at.chunks - 1.0) * at.pipeline) / at.chunks
    for effect in time_effects(job, TimeEffect.hiding_times):
        times = effect(at, m, times)
    return times


def moves_activations(job: Job, layouts: LayoutColumns) -> bool:
    """Whether any layout's activations wait in host memory."""
    return any(moves(job, layouts) for moves in time_effects(job, TimeEffect.moves))


def moving_seconds(job: Job, cluster: Cluster, layouts: LayoutColumns, layers: Sequence[Size]) -> FloatColumn:
    """Return the seconds that one micro-batch's activations of a stage with so many layers of each kind travel to host
    memory, and again back."""
    each = moving_seconds_of_layers(job, cluster, layouts, reduce(np.add, layers))
    return reduce(np.add, (count * seconds for count, seconds in zip(layers, each, strict=True)))


def moving_seconds_of_layers(
    job: Job, cluster: Cluster, layouts: LayoutColumns, layers: Size
) -> tuple[FloatColumn, ...]:
    """Return the seconds that one micro-batch's activations of a layer of each kind travel to host memory, on a stage
    with so many layers."""
    rows, rate = without_layers(job, layouts), host_link_bytes_per_second(cluster)
    moved: Sequence[FloatColumn] = [np.zeros_like(kept) for kept in kept_by_layer(job, rows)]
    for effect in time_effects(job, TimeEffect.moved):
        moved = effect(job, rows, layers, moved)
    return tuple(each / rate for each in moved)
