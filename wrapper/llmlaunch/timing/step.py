"""Seconds of one training step by what they are spent on, for one layout or for a million: the passes, and the
parameter update (gradients reduced, parameters gathered, the optimizer)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import numpy as np
from numpy.typing import NDArray

from llmlaunch.cluster.profile import Cluster
from llmlaunch.columns import BoolColumn, FloatColumn, IntColumn
from llmlaunch.frozen import frozen
from llmlaunch.layers.matrix import adapted
from llmlaunch.layers.model import model_of
from llmlaunch.layout import RECOMPUTE_FULL, Layout, LayoutColumns
from llmlaunch.memory.effects import optimizer_on_device, shards_on_device
from llmlaunch.memory.estimator import candidate_ranks
from llmlaunch.memory.job import Job, all_ranks
from llmlaunch.memory.weights import RankParameters, rank_parameters, trained_parameters
from llmlaunch.timing.effects import TimeEffect, time_effects
from llmlaunch.timing.network import exposed, host_link_bytes_per_second, links, ring
from llmlaunch.timing.passes import PassSeconds, pass_seconds
from llmlaunch.timing.products import constant, pace, split_of
from llmlaunch.timing.stages import pieces

# Elements read and written through device memory for every parameter a device updates: master, two moments and gradient
# are read, the first three written; the gradient is read once more for its norm. The parameter is written in half.
UPDATED_ELEMENTS, UPDATED_PARAMETER_BYTES = 8.0, 2.0
# Of a step, at most: a backward pass multiplies twice as much, and recomputes; and the optimizer comes after it.
FORWARD_SHARE = 1 / 3
COMMUNICATION = frozenset(("tensor_parallel", "context_parallel", "expert_parallel"))


@frozen
class UpdateSeconds:
    """Raw seconds, nothing hidden. `reduce_each` and `gather_each` say where these happen for every micro-batch
    (gradients from ZeRO 2 on, parameters from ZeRO 3 on, where gathered forward and again backward, there the share
    `gather_again` of them), `reduce_overlapped` and `gather_overlapped` where they run beside passes at all.
    `later_gather_seconds` are those of each gather behind the first forward pass of a step, which second shards of the
    parameters make shorter. `gather_hooked` says where modules gather their parameters themselves, each in a hook on
    the host.

    Nothing here depends on what is recomputed or offloaded, on the switches of a step or on the micro-batch: layouts
    that differ in those alone share it. What hooks take depends on what is recomputed, so it is of the passes
    (`_gather_host_seconds`)."""

    reduce_seconds: FloatColumn
    gather_seconds: FloatColumn
    later_gather_seconds: FloatColumn
    optimizer_seconds: FloatColumn
    reduce_each: BoolColumn
    gather_each: BoolColumn
    gather_again: FloatColumn
    reduce_overlapped: BoolColumn
    gather_overlapped: BoolColumn
    gather_hooked: BoolColumn

    @classmethod
    def joined(cls, several: Sequence[UpdateSeconds]) -> UpdateSeconds:
        """Return the layouts of one after those of the other."""
        return cls(**{f.name: np.concatenate([getattr(each, f.name) for each in several]) for f in fields(cls)})

    @classmethod
    def stacked(cls, several: Sequence[UpdateSeconds]) -> UpdateSeconds:
        """Return the same layouts with several techniques, in columns of techniques x layouts."""
        return cls(**{f.name: np.stack([getattr(each, f.name) for each in several]) for f in fields(cls)})

    def take(self, index: NDArray[np.int64]) -> UpdateSeconds:
        """Return the layouts an index array selects (they may repeat)."""
        return UpdateSeconds(**{f.name: np.take(getattr(self, f.name), index, axis=-1) for f in fields(self)})


StageParameters = tuple[RankParameters, RankParameters]  # all, and those that are trained


def update_seconds(
    job: Job, cluster: Cluster, layouts: LayoutColumns, most: StageParameters | None = None
) -> UpdateSeconds:
    """Return every layout's update, on the stage with the `most` parameters, which are the same for jobs with the same
    facts and may have been counted before.

    ZeRO 0 reduces gradients everywhere, which is a scatter and a gather of them. From stage 1 on gradients are
    scattered and updated parameters gathered (Rajbhandari et al. 2020, section 7), both among the ranks that share the
    optimizer; where several groups do, each for itself, the scattered gradients are all-reduced between them
    (megatron/core/distributed/param_and_grad_buffer.py start_grad_sync, core 0.19). Dense parameters travel over data
    and context parallelism together, experts over their own data parallelism.
    """
    whole, trained = most or most_parameters(job, layouts)
    zero = layouts.zero_stage
    t, size = layouts.tensor.astype(np.float64), (layouts.data * layouts.context).astype(np.float64)
    apart = (layouts.expert * layouts.expert_tensor).astype(np.float64)
    experts = np.maximum(np.floor(t * size / apart), 1.0)
    instances = np.where(zero == 1, job.facts.states.optimizer_instances, 1)
    gradient, parameter = travelling_bytes(job)
    dense = gradient * trained.dense, parameter * whole.dense
    expert = gradient * trained.expert, parameter * whole.expert
    reduce, gather = _scatter_and_gather(cluster, size, t, instances, *dense)
    more_reduce, more_gather = _scatter_and_gather(cluster, experts, apart, instances, *expert)
    reduce, gather = reduce + more_reduce, gather + more_gather
    later = _gather_of_second_shards(job, cluster, layouts, parameter * (whole.dense + whole.expert), gather)
    if not shards_on_device(job):
        gather = gather + parameter * (whole.dense / size + whole.expert / experts) / host_link_bytes_per_second(
            cluster
        )
    shard_dense = np.where(zero > 0, size if job.facts.states.shard_over_context else layouts.data, 1) / instances
    shard_expert = np.maximum(np.where(zero > 0, experts, 1) / instances, 1.0)
    mine = trained.dense / shard_dense + trained.expert / shard_expert
    sharding, each = job.facts.states.full_sharding, zero >= 2
    if sharding is not None and sharding.keeps_stage:
        each = each & (layouts.pipeline == 1)
    sharded, beside_next = zero > 0, _beside_next_batch(job, layouts)
    return UpdateSeconds(
        reduce_seconds=np.where(zero > 0, reduce, 2.0 * reduce),
        gather_seconds=np.where(zero > 0, gather, 0.0),
        later_gather_seconds=np.where(zero > 0, later, 0.0),
        optimizer_seconds=_optimizer(job, cluster, mine) + _orthogonalization(job, cluster, layouts),
        reduce_each=each,
        gather_each=each & (zero >= 3),
        gather_again=np.full(len(layouts), _trained_share(job)),
        reduce_overlapped=(sharded & (each | (not job.facts.foreign.reduced_at_end))) | beside_next,
        gather_overlapped=((zero >= 3) if job.facts.zero.gathered_in_step else sharded) | beside_next,
        gather_hooked=zero >= 3,
    )


def _beside_next_batch(job: Job, layouts: LayoutColumns) -> BoolColumn:
    """Return for each layout whether gradients and parameters travel beside the passes of the next batch."""
    beside = np.zeros(len(layouts), dtype=np.bool_)
    for effect in time_effects(job, TimeEffect.overlaps_update):
        beside = beside | effect(layouts)
    return beside


def _scatter_and_gather(
    cluster: Cluster,
    size: FloatColumn,
    stride: FloatColumn,
    instances: NDArray[np.int64],
    gradient_bytes: FloatColumn,
    parameter_bytes: FloatColumn,
) -> tuple[FloatColumn, FloatColumn]:
    """Return the seconds in which ranks `stride` apart scatter their gradients and gather parameters, in as many groups
    as there are `instances` of the optimizer; these then all-reduce each shard's gradients."""
    shards = np.maximum(size / instances, 1.0)
    inside = links(cluster, shards, stride)
    reduce, gather = ring(inside, shards, gradient_bytes), ring(inside, shards, parameter_bytes)
    if np.any(instances > 1):
        between = links(cluster, instances.astype(np.float64), stride * shards)
        reduce = reduce + 2.0 * ring(between, instances.astype(np.float64), gradient_bytes / shards)
    return reduce, gather


def _gather_of_second_shards(
    job: Job, cluster: Cluster, layouts: LayoutColumns, parameter_bytes: FloatColumn, gather: FloatColumn
) -> FloatColumn:
    """Return the seconds of a gather among the ranks that share second shards of the parameters, from each parameter's
    first release in a step to its end (ZeRO++, Wang et al. 2023, section 4.2;
    deepspeed/runtime/zero/partition_parameters.py `all_gather_coalesced`, 0.19.8); `gather` where there are none."""
    if job.facts.zero.secondary_ranks <= 1 or not shards_on_device(job):
        return gather
    ranks = np.minimum(float(job.facts.zero.secondary_ranks), (layouts.data * layouts.context).astype(np.float64))
    within = ring(links(cluster, ranks, layouts.tensor.astype(np.float64)), ranks, parameter_bytes)
    return np.where(layouts.zero_stage >= 3, np.minimum(within, gather), gather)


def _trained_share(job: Job) -> float:
    """Return the share of the layers that run backward."""
    trained, layers = job.techniques.trained_layers, job.shape.num_layers
    return 1.0 if trained is None else min(trained, layers) / layers


def travelling_bytes(job: Job) -> tuple[float, float]:
    """Return the bytes a parameter's gradient and the parameter itself are sent in. Gradients that come and go travel
    as they are made, in the precision of the computation."""
    states, quantized = job.facts.states, job.facts.layer.quantized
    gradient = states.gradient_bytes
    if states.full_sharding is not None:
        gradient = states.full_sharding.reduced_bytes
    elif job.facts.zero.gradient_life is not None:
        gradient = states.parameter_bytes
    if quantized is None or not quantized.replaces_parameters:
        return gradient, states.parameter_bytes
    four_bits = quantized.input_bytes < 1.0
    return gradient, 0.5 if four_bits else 1.0


def most_parameters(job: Job, layouts: LayoutColumns) -> StageParameters:
    """Return the (all, trained) parameters of the rank of each layout that holds the most. Where matrices stay whole
    they depend on the ZeRO stage (`counted_by_stage`), elsewhere on the split alone."""
    rows = candidate_ranks(job, layouts)
    counts = rank_parameters(job, rows)
    trained = trained_parameters(job, rows, counts)
    if job.facts.states.matrices_whole:  # padding travels, too
        from llmlaunch.memory.layer_wise import whole_matrices

        matrices = whole_matrices(job, rows)
        padded = replace(
            counts, dense=counts.dense + matrices.dense_padding, expert=counts.expert + matrices.expert_padding
        )
        counts = trained = padded
    return _fullest(counts, rows.layout_index, len(layouts)), _fullest(trained, rows.layout_index, len(layouts))


def counted_by_stage(job: Job) -> bool:
    """Whether the parameters that travel depend on the ZeRO stage: buffers of whole matrices are padded where data
    parallelism shards the optimizer, and are not where every rank has all of it."""
    return job.facts.states.matrices_whole


def _fullest(counts: RankParameters, index: NDArray[np.int64], count: int) -> RankParameters:
    def most(column: FloatColumn) -> FloatColumn:
        largest = np.zeros(count)
        np.maximum.at(largest, index, column)
        return largest

    return replace(counts, dense=most(counts.dense), expert=most(counts.expert), largest_layer=np.zeros(0))


def _optimizer(job: Job, cluster: Cluster, mine: FloatColumn) -> FloatColumn:
    """Return the seconds of the optimizer. A device updates what it holds at memory bandwidth."""
    rate = constant("element_wise_efficiency") * cluster.accelerator.memory_bytes_per_second
    each = UPDATED_ELEMENTS * job.facts.step.state_element_bytes + UPDATED_PARAMETER_BYTES
    seconds = optimizer_on_device(job) * each / rate * mine
    for effect in time_effects(job, TimeEffect.update):
        seconds = seconds + effect(job, cluster, mine)
    return np.asarray(seconds)


def _orthogonalization(job: Job, cluster: Cluster, layouts: LayoutColumns) -> FloatColumn | float:
    """Return the seconds in which the slowest device of each layout orthogonalizes its matrices, in bf16."""
    if not job.facts.states.matrices_whole:
        return 0.0
    from llmlaunch.memory.layer_wise import whole_matrices

    rows = candidate_ranks(job, layouts)
    most = np.zeros(len(layouts))
    np.maximum.at(most, rows.layout_index, whole_matrices(job, rows).products)
    return np.asarray(most / pace(job, cluster).wide)


@frozen
class StepTime:
    """Columns of seconds: the forward and backward passes, the communication of data parallelism that nothing hides,
    what the device waits for hooks that gather parameters, and the optimizer."""

    passes: PassSeconds
    data_parallel: FloatColumn
    gather_hooks: FloatColumn
    optimizer: FloatColumn

    @property
    def total(self) -> FloatColumn:
        return self.passes.total + self.data_parallel + self.gather_hooks + self.optimizer

    @property
    def terms(self) -> Mapping[str, FloatColumn]:
        """`total` by what it is spent on."""
        update = {"data_parallel": self.data_parallel, "gather_hooks": self.gather_hooks, "optimizer": self.optimizer}
        return {**self.passes.terms, **update}


def evaluation_seconds(iterations: int, step_seconds: float) -> float:
    """Return the most that so many batches take without a backward pass, where a step takes `step_seconds`."""
    return iterations * FORWARD_SHARE * step_seconds


def step_time(job: Job, cluster: Cluster, layouts: LayoutColumns, microbatches: IntColumn | None = None) -> StepTime:
    """Return the seconds of one step of every layout. `microbatches` is the number per pipeline and step; None derives
    it from the workload's batch."""
    return combined(pass_seconds(job, cluster, layouts, microbatches), update_seconds(job, cluster, layouts))


def rank_alone_seconds(job: Job, cluster: Cluster, layout: Layout, pipeline_rank: int, microbatches: int) -> float:
    """Return the seconds of a step that one pipeline rank computes or launches, if it runs alone and waits for nobody:
    its layers and ends, micro-batch by micro-batch, and the optimizer."""
    columns = LayoutColumns.of([layout])
    parts, rows = pieces(job, cluster, split_of(job, columns)), all_ranks(job, columns)
    counted = zip(rows.counts, parts.layers, strict=True)
    seconds = sum(count[pipeline_rank] * _computed(layer.kinds) for count, layer in counted)
    if pipeline_rank == 0:
        seconds += _computed(parts.ends.first)
    if pipeline_rank == layout.pipeline - 1:
        seconds += _computed(parts.ends.last)
    return float(microbatches * seconds + update_seconds(job, cluster, columns).optimizer_seconds[0])


def _computed(kinds: Mapping[str, FloatColumn]) -> float:
    return sum(float(column[0]) for kind, column in kinds.items() if kind not in COMMUNICATION)


def combined(passes: PassSeconds, update: UpdateSeconds) -> StepTime:
    """Join passes and update. Transfers cost what no pass hides, and, while they are hidden, a share of the device.
    Where parameters are gathered for every micro-batch, the backward pass has to hide that and the reduction of the
    gradients. Hooks that gather them run on the host while the device still works on what was launched before."""
    m, each = passes.microbatches, update.gather_each
    times = passes.hiding_times
    gather, reduce = update.gather_seconds, update.reduce_seconds
    if np.any(update.reduce_each):
        times = np.where(update.reduce_each, 1.0, times)
        reduce = reduce + each * update.gather_again * update.later_gather_seconds
    forward = update.gather_overlapped * times * passes.hiding_forward
    backward = update.reduce_overlapped * times * passes.hiding_backward
    later = exposed(update.later_gather_seconds, forward)
    before = np.where(each, m, 1.0) * later + (exposed(gather, forward) - later)
    after = np.where(update.reduce_each, m, 1.0) * exposed(reduce, backward)
    hooks = np.zeros(np.shape(before + after))
    if np.any(update.gather_hooked):
        beyond = m * np.maximum(_gather_host_seconds(passes) - passes.host_slack, 0.0)
        hooks = np.maximum(update.gather_hooked * beyond - before - after, 0.0)
    return StepTime(passes, before + after, hooks, update.optimizer_seconds)


def _gather_host_seconds(passes: PassSeconds) -> FloatColumn:
    """Return what the host spends in the hooks of ZeRO 3 for one micro-batch: each module that has parameters fetches
    them before it runs forward and, where its layer is trained, again where it is recomputed and before it runs
    backward (deepspeed/runtime/zero/parameter_offload.py, 0.19.8)."""
    job, layouts = passes.job, passes.layouts
    kernels, adapters = job.facts.layer.kernels, job.techniques.adapters
    modules = kernels.gathered_modules * job.shape.num_layers / layouts.pipeline
    if adapters is not None:
        model = model_of(job.shape)
        beside = [len(adapted(layer.matrices, adapters)) for layer in model.kinds]
        several = sum(count * each for count, each in zip(model.counts, beside, strict=True))
        modules = modules + kernels.gathered_adapter_modules * several / layouts.pipeline
    rounds = 1.0 + _trained_share(job) * np.where(layouts.recompute == RECOMPUTE_FULL, 2.0, 1.0)
    return np.asarray(passes.cluster.host_seconds_factor * constant("gather_host_seconds") * modules * rounds)
