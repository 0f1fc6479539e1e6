"""Parameters, gradients and optimizer states of a device, and the temporaries around them. Gradients and the buckets
they are reduced in are followed from one micro-batch's backward to the end of the last."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmlaunch.columns import FloatColumn
from llmlaunch.facts import ByStage, GradientLife
from llmlaunch.frozen import frozen
from llmlaunch.layers.model import model_of
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.effects import Effect, effects_of, optimizer_on_device, shards_on_device, trains_all
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.weights import (
    RankParameters,
    added_parameters,
    head_matrix,
    largest_parameter,
    layer_parameters,
    linear_weights,
    rank_parameters,
    trained_parameters,
)

if TYPE_CHECKING:
    from llmlaunch.memory.layer_wise import WholeMatrices


@frozen
class States:
    """Bytes on one device. The first four live all the time, `gathered` through forward and backward; `forward` and
    `backward` are gradients and buckets while those run, `unreduced` while a block makes its own, `final` at the end of
    the last backward, `step` only while the optimizer runs."""

    parameters: FloatColumn
    gradients: FloatColumn
    optimizer: FloatColumn
    weight_copies: FloatColumn
    gathered: FloatColumn
    forward: FloatColumn
    backward: FloatColumn
    final: FloatColumn
    buckets: FloatColumn  # those that are there in the optimizer step too
    unreduced: FloatColumn
    step: FloatColumn
    placed: FloatColumn  # most that is there before the first step: the model, on its way to where it is trained
    norm: FloatColumn  # the largest parameter's gradient in the type its norm is taken in, just before the step
    flat: FloatColumn  # room the single tensors of reduction, norm and step take


def shard_groups(job: Job, rows: RankColumns) -> tuple[FloatColumn, FloatColumn]:
    """Return how many devices share (dense, expert) state: data (x context), and what expert parallelism leaves of
    it."""
    lay = rows.layouts
    instances = job.facts.states.optimizer_instances
    dense = lay.data * (lay.context if job.facts.states.shard_over_context else 1) / instances
    expert = lay.tensor * lay.context * lay.data / (lay.expert_tensor * lay.expert) / instances
    return np.maximum(dense, 1.0), np.maximum(expert, 1.0)


def sharded_parameters(job: Job, rows: RankColumns, dense: FloatColumn, expert: FloatColumn) -> FloatColumn:
    """Return what a rank holds of so many (dense, expert) parameters where they are sharded."""
    dense_group, expert_group = shard_groups(job, rows)
    return dense / dense_group + expert / expert_group


def states(job: Job, rows: RankColumns) -> States:
    """Return the states of every row. ZeRO 1 (and Megatron's distributed optimizer) shards optimizer states, 2
    gradients too, 3 parameters too (Rajbhandari et al. 2020, section 5). Frozen parameters have neither gradient nor
    states."""
    counts = rank_parameters(job, rows)
    trained = trained_parameters(job, rows, counts)
    dense_group, expert_group = shard_groups(job, rows)
    whole = trained.dense + trained.expert
    sharded = trained.dense / dense_group + trained.expert / expert_group
    facts, stage = job.facts, rows.layouts.zero_stage

    def state_bytes(bytes_per_parameter: float, from_stage: int) -> FloatColumn:
        return bytes_per_parameter * np.where(stage >= from_stage, sharded, whole)

    over_step = gradients(job, rows, whole, sharded, dense_group)
    touched, largest = by_stage(facts.step.touched_gradient_bytes, rows), _largest_trained(job, rows)
    norm = by_stage(facts.step.gradient_norm_bytes, rows) * np.minimum(sharded, largest_parameter(job, rows))
    norm = norm + touched * np.maximum(sharded, largest)
    step = by_stage(facts.step.step_bytes, rows) * whole
    step = step + touched * np.maximum(largest - sharded, 0.0)
    step = step + by_stage(facts.step.step_bytes_sharded, rows) * _stepped_at_once(job, rows, sharded, dense_group)
    matrices = _whole_matrices(job, rows) if _matrices_whole(job) else None
    padding: FloatColumn | float = 0.0
    if matrices is not None:  # no other step of Megatron's has temporaries
        step = facts.step.matrix_step_bytes * matrices.largest
        padding = matrices.dense_padding + matrices.expert_padding
    largest_step = np.minimum(sharded, largest_parameter(job, rows))
    for effect in effects_of(job, Effect.optimizer_step):
        step = effect(job, step, largest_step)
    return States(
        parameters=_resting(job, rows, counts, dense_group, expert_group)
        + _gathered(job, rows, counts, dense_group, expert_group)
        + _second_shards(job, rows, counts)
        + facts.states.parameter_bytes * padding,
        gradients=over_step.lasting + facts.states.gradient_bytes * padding,
        optimizer=optimizer_on_device(job)
        * (
            _optimizer(job, rows, state_bytes(facts.states.optimizer_bytes, 1), whole)
            + _kept_by_context(job, rows, counts)
            - _saved_by_matrices(job, rows, trained, dense_group, expert_group)
        ),
        weight_copies=_weight_copies(job, rows, dense_group, expert_group),
        gathered=gathered_parameters(job, rows, dense_group, expert_group),
        forward=over_step.forward,
        backward=over_step.backward,
        final=over_step.final,
        buckets=over_step.step,
        unreduced=unreduced_gradients(job, rows, dense_group, expert_group),
        step=step,
        placed=_placed(job, rows, counts, trained, over_step.lasting, sharded),
        norm=norm,
        # the norm's copy is gone before the step flattens gradients, which then takes its place
        flat=np.maximum(np.maximum(step, norm), np.where(dense_group > 1, facts.step.flat_bucket_bytes, 0.0)),
    )


def _stepped_at_once(job: Job, rows: RankColumns, sharded: FloatColumn, group: FloatColumn) -> FloatColumn:
    """Return the parameters of a rank's shard whose step has temporaries at the same time. ZeRO 3 steps one sub-group
    after the other; a sub-group ends with the parameter that makes it `sub_group_elements` long or longer
    (deepspeed/runtime/zero/stage3.py `_create_fp16_sub_groups` and `step`, 0.19.8; counted)."""
    if job.facts.zero.sub_group_elements is None:
        return sharded
    longest = job.facts.zero.sub_group_elements + largest_parameter(job, rows) / group
    return np.where(rows.layouts.zero_stage >= 3, np.minimum(sharded, longest), sharded)


def _placed(
    job: Job,
    rows: RankColumns,
    counts: RankParameters,
    trained: RankParameters,
    lasting: FloatColumn,
    sharded: FloatColumn,
) -> FloatColumn:
    """Return the most that is there before the first step. ZeRO 3 may be given a whole model. Megatron's distributed
    optimizer makes its buffers of parameters and gradients beside the parameters that then move there, chunk by chunk,
    the experts' last (megatron/core/distributed/param_and_grad_buffer.py `_ParamAndGradBuffer.__init__`, core 0.19;
    traced)."""
    facts, stage, chunks = job.facts, rows.layouts.zero_stage, rows.layouts.virtual_pipeline
    whole = facts.states.parameter_bytes * (counts.dense + counts.expert)
    if facts.states.placed_whole:
        return np.where(stage >= 3, whole, 0.0)
    if not facts.states.moved_to_buffers:
        return np.zeros_like(whole)
    experts = facts.states.parameter_bytes * trained.expert
    before = facts.states.parameter_bytes * trained.dense - facts.states.gradient_bytes * trained.expert
    parameters = trained.dense + trained.expert + sharded
    beside = sum(effect(job, parameters) for effect in effects_of(job, Effect.before_the_first_step))
    return np.where(stage >= 1, whole + lasting + np.maximum(np.maximum(experts, before) / chunks, beside), 0.0)


def _optimizer(job: Job, rows: RankColumns, sharded: FloatColumn, whole: FloatColumn) -> FloatColumn:
    unsharded = job.facts.states.optimizer_bytes_unsharded
    return sharded if unsharded is None else np.where(rows.layouts.zero_stage == 0, unsharded * whole, sharded)


def _resting(
    job: Job, rows: RankColumns, counts: RankParameters, dense_group: FloatColumn, expert_group: FloatColumn
) -> FloatColumn:
    """Return the compute copy between its uses: all parameters, trained or not, and adapters beside them."""
    dense, expert = added_parameters(job, rows)
    dense, expert = counts.dense + dense, counts.expert + expert
    quantized = job.facts.layer.quantized
    if quantized is not None and quantized.replaces_parameters:  # those rest as `_weight_copies`
        weights, experts = _narrow_weights(job, rows)
        dense, expert = dense - weights, expert - experts
    sharded = dense / dense_group + expert / expert_group
    here = float(shards_on_device(job))
    resting = job.facts.states.parameter_bytes * np.where(_in_shards(job, rows), here * sharded, dense + expert)
    for effect in effects_of(job, Effect.spared_at_rest):
        resting = resting - effect(job, rows)
    return resting


def _second_shards(job: Job, rows: RankColumns, counts: RankParameters) -> FloatColumn:
    """Return the second shards of all parameters that ZeRO++ has: each is made as the parameter is released for the
    first time in a step, and kept to its end (deepspeed/runtime/zero/partition_parameters.py `_partition_param_sec`,
    0.19.8). Beside parameters on the host they are there too, but count as if they were on the device."""
    ranks = job.facts.zero.secondary_ranks
    if ranks <= 1:
        return np.zeros(len(rows))
    dense, expert = added_parameters(job, rows)
    parameters = counts.dense + counts.expert + dense + expert
    lay = rows.layouts
    shards = np.minimum(float(ranks), lay.tensor * lay.pipeline * lay.context * lay.data)
    return np.where(rows.layouts.zero_stage >= 3, job.facts.states.parameter_bytes * parameters / shards, 0.0)


def _in_shards(job: Job, rows: RankColumns) -> NDArray[np.bool_]:
    """Whether the compute copy of the parameters rests in shards."""
    shard_from = 3 if job.facts.states.full_sharding is None else job.facts.states.full_sharding.first_stage
    in_shards: NDArray[np.bool_] = rows.layouts.zero_stage >= shard_from
    return in_shards


def _kept_by_context(job: Job, rows: RankColumns, counts: RankParameters) -> FloatColumn:
    """Return what states sharded over data parallelism alone hold beyond those sharded over context ranks too."""
    lay, more = rows.layouts, job.facts.states.optimizer_bytes_over_data
    if not more or not job.facts.states.shard_over_context:
        return np.zeros(len(rows))
    once, all_ranks = lay.data.astype(np.float64), (lay.data * lay.context).astype(np.float64)
    return np.where(lay.zero_stage >= 1, more * counts.dense * (1.0 / once - 1.0 / all_ranks), 0.0)


def _matrices_whole(job: Job) -> bool:
    """Whether matrices lie whole in the shards of the optimizer: nobody freezes a part of the model beside them."""
    return job.facts.states.matrices_whole and trains_all(job)


def _whole_matrices(job: Job, rows: RankColumns) -> WholeMatrices:
    from llmlaunch.memory.layer_wise import whole_matrices

    return whole_matrices(job, rows)


def _saved_by_matrices(
    job: Job, rows: RankColumns, trained: RankParameters, dense: FloatColumn, expert: FloatColumn
) -> FloatColumn:
    """Return what an optimizer with fewer states for matrices saves on the blocks' linear layers, or on their adapters,
    all of which are matrices. Where a rank has whole ones, what the fullest has decides."""
    fewer = job.facts.states.matrix_states_spared_bytes
    if not fewer:
        return np.zeros(len(rows))
    if _matrices_whole(job):
        whole, every = _whole_matrices(job, rows), job.facts.states.optimizer_bytes
        shards = np.where(rows.layouts.zero_stage >= 1, whole.dense / dense + whole.expert / expert, whole.updated)
        return every * shards - (every - fewer) * whole.updated
    weights, experts = _narrow_weights(job, rows)
    for effect in effects_of(job, Effect.trained_matrices):
        weights, experts = effect(job, rows, (trained.dense, trained.expert), (weights, experts))
    sharded = rows.layouts.zero_stage >= 1
    matrices: FloatColumn = weights / np.where(sharded, dense, 1.0) + experts / np.where(sharded, expert, 1.0)
    return fewer * matrices


def _weight_copies(job: Job, rows: RankColumns, dense_group: FloatColumn, expert_group: FloatColumn) -> FloatColumn:
    """Return the narrow copies of the weights, made once a step and kept through its micro-batches: each linear layer
    caches its own, whole, even where the wider parameters it was made from rest in shards
    (transformer_engine/pytorch/module/ linear.py `_fp8_workspaces`, 2.20). Copies that replace the parameters rest in
    shards like those."""
    quantized, sharding = job.facts.layer.quantized, job.facts.states.full_sharding
    if quantized is None:
        return np.zeros(len(rows))
    weights, experts = _narrow_weights(job, rows)
    whole = quantized.weight_copy_bytes * (weights + experts)
    if sharding is None or not quantized.replaces_parameters:
        return whole
    shards = sharding.narrow_bytes * (weights / dense_group + experts / expert_group)
    return np.where(_in_shards(job, rows), shards + sharding.narrow_scale_bytes * (weights + experts), whole)


def _narrow_weights(job: Job, rows: RankColumns) -> tuple[FloatColumn, FloatColumn]:
    """Return the (dense, expert) weights of a rank's layers that a narrower number format is applied to."""
    dense, expert = linear_weights(job, rows)
    return rows.sum_of(dense), rows.sum_of(expert)


def _gathered(
    job: Job, rows: RankColumns, counts: RankParameters, dense_group: FloatColumn, expert_group: FloatColumn
) -> FloatColumn:
    """Return the parameters that ZeRO 3 has gathered, the shards beside them (counted in CPU runs, DeepSpeed 0.19.8):
    at most all, and as many again where they arrive in buffers of several. The step finds most of them released, but
    their memory belongs to the stream that gathers. A group of one device has nothing to gather, but copies what rests
    on the host all the same, without such buffers (deepspeed/runtime/zero/partition_parameters.py `NoGatherHandle` and
    `NoGatherCoalescedHandle`, 0.19.8); experts may rest in shards where nothing else does, for tensor-parallel ranks
    that hold the same ones share them, too. Without `memory_efficient_linear` autograd saves a view of each gathered
    weight, which outlives the parameter's release (torch.nn.functional.linear, 2.13; counted in
    tests/frameworks/test_family_bytes.py)."""
    facts = job.facts
    if facts.states.full_sharding is not None:
        return np.zeros(len(rows))
    on_host = not shards_on_device(job)
    dense = counts.dense - sum(effect(job, rows) for effect in effects_of(job, Effect.unread_parameters))

    def arriving(dense: FloatColumn, expert: FloatColumn, copied: bool) -> FloatColumn:
        return dense * ((dense_group > 1) | copied) + expert * ((expert_group > 1) | copied)

    whole = arriving(dense, counts.expert, on_host)
    if facts.zero.gathering is None:
        most = np.minimum(whole, counts.largest_layer)
    else:
        from llmlaunch.memory.gathering import gathered_elements

        more, more_expert = added_parameters(job, rows)
        every = dense + more, counts.expert + more_expert
        buffers = 0.0 if facts.zero.gathering.sequential else arriving(*every, False)
        most = np.minimum(arriving(*every, on_host) + buffers, gathered_elements(job, rows))
    if facts.zero.gathered_weights_kept:
        held = np.maximum(whole, most)
        for effect in effects_of(job, Effect.frees_gathered):
            held = np.where(effect(job, rows), most, held)
        most = held
    return np.where(rows.layouts.zero_stage >= 3, facts.states.parameter_bytes * most, 0.0)


ROUNDING_BYTES = 8.0


def least_state_bytes(job: Job, layouts: LayoutColumns) -> FloatColumn:
    """Return a lower bound of the fullest rank's device bytes for every way of assigning layers to stages: the mean
    over all ranks of parameters, gradients and optimizer states, which grow with the layers alone and are all alive
    when the optimizer runs. Only `state_fields` are read. With ZeRO 3, where parameters are gathered, the bound is
    0."""
    rows = _whole_model(job, layouts)
    # buffers of whole matrices are padded stage by stage: what they hold at least grows with the layers
    of_states = replace(job.facts.states, matrices_whole=False)
    state = states(replace(job, facts=replace(job.facts, states=of_states)), rows)
    state_bytes = state.parameters + state.weight_copies + state.gradients + state.optimizer
    mean = np.bincount(rows.layout_index, weights=state_bytes, minlength=len(layouts)) / layouts.pipeline
    factor = job.correction.torch_factor
    torch = np.maximum(mean * factor - ROUNDING_BYTES * max(factor, 1.0), 0.0)
    outside = max(job.facts.allocator.context_bytes + job.correction.outside_bytes, 0.0)
    return np.where(layouts.zero_stage < 3, torch + outside, 0.0)


def _whole_model(job: Job, layouts: LayoutColumns) -> RankColumns:
    """Return the first rank of each layout with all layers, and the last one, where it is another, with none: what
    grows with the layers adds up to that of all ranks."""
    model = model_of(job.shape)
    several = np.flatnonzero(layouts.pipeline > 1)
    index = np.concatenate([np.arange(len(layouts)), several])
    rank = np.concatenate([np.zeros(len(layouts), dtype=np.int64), layouts.pipeline[several] - 1])
    microbatches = np.maximum(layouts.num_microbatches(job.workload.global_batch_size), 1)
    holds = (np.arange(len(index)) < len(layouts)).astype(np.float64)
    counts = tuple(count * holds for count in model.counts)
    return RankColumns(layouts.take(index), index, rank, microbatches[index], counts, model.single_groups)


ALWAYS = GradientLife()


@frozen
class Gradients:
    """Bytes on one device: `lasting` from start to end, the others beside it, each at its moment: while the last
    micro-batch runs forward, while it begins backward, at the end of its backward, and in the optimizer step."""

    lasting: FloatColumn
    forward: FloatColumn
    backward: FloatColumn
    final: FloatColumn
    step: FloatColumn


def by_stage(table: ByStage, rows: RankColumns) -> FloatColumn:
    return np.asarray(table, dtype=np.float64)[rows.layouts.zero_stage]


def gradients(job: Job, rows: RankColumns, whole: FloatColumn, sharded: FloatColumn, group: FloatColumn) -> Gradients:
    """`whole` and `sharded` are parameters of the rank and their share of `group` devices. Without a `gradient_life`,
    what `gradient_bytes` says is there from start to end, and buckets as long as the activations are. With one, the
    buckets are ZeRO's: a single device makes and fills them too (counted on one rank, DeepSpeed 0.19.8)."""
    facts, stage = job.facts, rows.layouts.zero_stage
    life = facts.zero.gradient_life or ALWAYS
    several = rows.microbatches > 1

    def bytes_of(table: ByStage, table_sharded: ByStage) -> FloatColumn:
        return by_stage(table, rows) * whole + by_stage(table_sharded, rows) * sharded

    alive = by_stage(facts.foreign.backward_gradient_bytes, rows) * whole
    accumulated = np.where(several, bytes_of(life.accumulated, life.accumulated_sharded), 0.0)
    # whole gradients of all that touches the rank's share: of the embedding table, where that is larger
    # (deepspeed/runtime/zero/stage_1_and_2.py `copy_grads_in_partition`, 0.19.8; traced)
    touched = np.maximum(sharded, _largest_trained(job, rows))
    earlier = np.where(several, by_stage(life.earlier_sharded, rows) * touched, 0.0)
    accumulated = np.maximum(accumulated, earlier)
    final = bytes_of(life.final, life.final_sharded)
    flat = by_stage(life.flattened, rows) * np.minimum(final, facts.step.flat_bucket_bytes)
    buckets = np.where(group > 1, facts.zero.bucket_bytes, 0.0)
    before = last_bucket = buckets
    if facts.zero.gradient_life is not None:
        before, buckets = _zero_buckets(job, rows)
        # the last is no larger than a bucket where all gradients are there: the first layer's norms
        last_bucket = np.minimum(buckets, np.where(stage >= 3, buckets, facts.zero.bucket_bytes))
    transfer = by_stage(facts.zero.host_transfer_bytes, rows) * _largest_trained(job, rows)
    return Gradients(
        lasting=facts.states.gradient_bytes * np.where(stage >= 2, sharded, whole)
        + bytes_of(life.lasting, life.lasting_sharded),
        forward=alive + accumulated + before + transfer,
        backward=alive + accumulated + buckets + transfer,
        final=alive + final + earlier + last_bucket + flat + transfer,
        step=np.where(stage >= 3, facts.zero.lasting_bucket_bytes * facts.zero.bucket_kept, 0.0) + transfer,
    )


def _zero_buckets(job: Job, rows: RankColumns) -> tuple[FloatColumn, FloatColumn]:
    """Return ZeRO's buckets while the last micro-batch runs forward, and while it runs backward.

    1 and 2 make them for every backward pass, one of them a flat copy of what is reduced: of the bucket, or of a
    parameter larger than that (deepspeed/runtime/zero/stage_1_and_2.py `setup_buckets`, `allreduce_bucket`, 0.19.8). 1
    keeps those of the first micro-batch to the last one's end (`_release_ipg_buffers`), unless it accumulates in fp32
    (BF16_Optimizer). 3 has one for good, and a flat copy of it (stage3.py `_setup_for_real_optimizer`). Traced.
    """
    zero, stage = job.facts.zero, rows.layouts.zero_stage
    lasting, width = zero.lasting_bucket_bytes, job.facts.states.parameter_bytes
    life = zero.gradient_life or ALWAYS
    from_first = (stage == 1) & (rows.microbatches > 1) & (by_stage(life.lasting, rows) == 0.0)
    before = np.where(stage >= 3, lasting * zero.bucket_kept, np.where(from_first, zero.bucket_bytes - lasting, 0.0))
    largest = _largest_trained(job, rows) if lasting else np.zeros(len(rows))
    copied = zero.bucket_bytes + np.maximum(width * largest - lasting, 0.0)
    copied = copied + zero.widened_bucket_bytes * np.maximum(largest, lasting / width)
    return before, np.where(stage >= 3, 2.0 * lasting, np.where(stage >= 1, copied, 0.0))


def _largest_trained(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the elements of the largest parameter that has a gradient, 0 where that is one of small adapters."""
    return largest_parameter(job, rows) if trains_all(job) else np.zeros(len(rows))


def gathered_parameters(
    job: Job, rows: RankColumns, dense_group: FloatColumn, expert_group: FloatColumn
) -> FloatColumn:
    """Return the bytes of whole parameters alive beside the shards while a step runs forward and backward.

    A root group (embedding, final norm, head) is not released after the forward pass: torch.distributed.fsdp,
    `_fully_shard/_fsdp_state.py` (root) and `_runtime_utils.py` `_post_forward_reshard`, 2.13; Megatron-FSDP releases
    unit modules alone (megatron_fsdp.py `_post_forward`, core 0.19).
    """
    sharding = job.facts.states.full_sharding
    if sharding is None:
        return np.zeros(len(rows))
    blocks, block = _sharded_blocks(job, rows, dense_group, expert_group)
    ahead = np.ceil(sharding.gathered_elements / np.maximum(block, 1.0)) * block
    some = np.minimum(blocks, np.maximum(sharding.gathered_blocks * block, block + ahead))
    whole = (rows.layouts.zero_stage < 3) | (sharding.keeps_stage & (rows.layouts.pipeline > 1))
    counts, layers = rank_parameters(job, rows), layer_parameters(job, rows)
    root = counts.dense + counts.expert - rows.sum_of(layers[0]) - rows.sum_of(layers[1])
    root_bytes = np.where(dense_group > 1, sharding.root_bytes * root, 0.0)
    alive = sharding.gathered_bytes * np.where(whole, blocks, some) + root_bytes
    return np.where(rows.layouts.zero_stage >= sharding.first_stage, alive, 0.0)


def unreduced_gradients(
    job: Job, rows: RankColumns, dense_group: FloatColumn, expert_group: FloatColumn
) -> FloatColumn:
    """Return the bytes of whole gradients alive while a block runs backward: its own, those of blocks before it on
    their way through the reduction, and the head's, which is reduced with the root group at the end. Where a pipeline
    rank reduces once a step, its blocks accumulate whole gradients in the data type they are reduced in
    (`_fsdp_param.py` `to_accumulated_grad_if_needed`, torch 2.13)."""
    sharding = job.facts.states.full_sharding
    if sharding is None:
        return np.zeros(len(rows))
    blocks, block = _sharded_blocks(job, rows, dense_group, expert_group)
    waiting = np.minimum(blocks, np.maximum(sharding.reduced_blocks * block, sharding.reduced_elements))
    accumulated = sharding.keeps_stage & (rows.layouts.pipeline > 1) & (rows.microbatches > 1)
    reduced = sharding.reduced_bytes * np.where(accumulated, blocks, waiting)
    head = np.where(dense_group > 1, head_matrix(job, rows), 0.0)
    return np.where(rows.layouts.zero_stage >= 2, sharding.gradient_bytes * (block + head) + reduced, 0.0)


def _sharded_blocks(
    job: Job, rows: RankColumns, dense_group: FloatColumn, expert_group: FloatColumn
) -> tuple[FloatColumn, FloatColumn]:
    """Return the parameters of all layers of a row's rank and of the largest, on one device, that rest in shards: those
    whose group has more than one rank, which may be the experts' alone or all but theirs."""
    dense, expert = layer_parameters(job, rows)
    sharded = [(dense_group > 1) * one + (expert_group > 1) * other for one, other in zip(dense, expert, strict=True)]
    return rows.sum_of(sharded), rows.most_of(sharded)
