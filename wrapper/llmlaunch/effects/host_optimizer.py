"""A share of the optimizer's states held and updated on the host."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llmlaunch.cluster.profile import Cluster
from llmlaunch.columns import FloatColumn
from llmlaunch.layers.columns import Size
from llmlaunch.memory.effects import Effect, HostBytes, Pinned
from llmlaunch.memory.job import Job, RankColumns
from llmlaunch.memory.states import shard_groups, sharded_parameters
from llmlaunch.memory.weights import largest_matrices, layer_parameters, rank_parameters, tables, trained_parameters
from llmlaunch.techniques.treatments import HostOptimizer
from llmlaunch.timing.effects import TimeEffect
from llmlaunch.timing.network import host_link, host_link_bytes_per_second
from llmlaunch.timing.products import constant

FP32_BYTES = 4.0  # the pinned tensors are fp32: whole flat partitions, or a parameter's share


class HostOptimizerEffect(Effect):
    """DeepSpeed's CPU Adam, Megatron's hybrid optimizer."""

    decides_moments = (HostOptimizer,)

    def optimizer_on_device(self, job: Job) -> float:
        return 1.0 - job.techniques.offload_optimizer

    def optimizer_step(self, job: Job, step: FloatColumn, largest: FloatColumn) -> FloatColumn:
        """The temporaries of a step of which a share runs on the host, where the backend's facts do not know of it:
        parameters come back in fp32 one after the other and are narrowed on the device
        (megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py param_copy_back_gpu_hook, core 0.19)."""
        share = job.techniques.offload_optimizer if job.facts.states.optimizer_bytes else 0.0
        return (1.0 - share) * step + FP32_BYTES * largest if share else step

    def before_the_first_step(self, job: Job, parameters: FloatColumn) -> Size:
        """Where only a share of it goes to the host, clones of the rest, first of the whole parameters and then of
        their shards, lie beside the buffers before there are activations."""
        share = job.techniques.offload_optimizer
        return job.facts.states.partly_offloaded_bytes * (1.0 - share) * parameters if 0.0 < share < 1.0 else 0.0

    def states_on_host(self, job: Job, rows: RankColumns) -> Mapping[str, HostBytes]:
        """The states, and what is pinned of them."""
        return {"offloaded_optimizer": _optimizer(job, rows)}


def _optimizer(job: Job, rows: RankColumns) -> HostBytes:
    share, host = job.techniques.offload_optimizer, job.facts.host
    if not share:
        return HostBytes(np.zeros(len(rows)))
    stage = rows.layouts.zero_stage
    trained = trained_parameters(job, rows, rank_parameters(job, rows))
    sharded = sharded_parameters(job, rows, trained.dense, trained.expert)
    moved = share * np.where(stage >= 1, sharded, trained.dense + trained.expert)
    whole = np.asarray(host.optimizer_bytes, dtype=np.float64)[stage] * moved
    pinned_bytes = np.asarray(host.optimizer_pinned_bytes, dtype=np.float64)[stage]
    if host.optimizer_flat:
        pinned: tuple[Pinned, ...] = ((pinned_bytes * moved, FP32_BYTES * moved),)
    else:
        parts = _by_parameter(job, rows, moved)
        pinned = tuple((pinned_bytes * part, FP32_BYTES * piece) for part, piece in parts)
    return HostBytes(whole - pinned_bytes * moved, pinned, after_loading=True)


def _by_parameter(job: Job, rows: RankColumns, moved: FloatColumn) -> tuple[Pinned, ...]:
    """Return the `moved` parameters, each of which is a tensor of its own, as (all, those of a tensor). Those of layers
    are rounded as the largest of a layer, the others as a table, so that a rank with a table never has less than one
    without."""
    dense_group, expert_group = shard_groups(job, rows)
    first = rows.layouts.zero_stage >= 1  # each tensor is a share of a parameter
    (dense, expert), embedding = largest_matrices(job, rows), tables(job, rows)[0]
    of_layers = np.minimum(job.techniques.offload_optimizer * _of_layers(job, rows), moved)
    dense, table = (np.where(first, size / dense_group, size) for size in (dense, embedding))
    return (of_layers, np.maximum(dense, np.where(first, expert / expert_group, expert))), (moved - of_layers, table)


def _of_layers(job: Job, rows: RankColumns) -> FloatColumn:
    """Return the parameters of a rank's layers whose optimizer states it holds."""
    shared, expert = (rows.sum_of(each) for each in layer_parameters(job, rows))
    return np.where(rows.layouts.zero_stage >= 1, sharded_parameters(job, rows, shared, expert), shared + expert)


# Read and written for every parameter: fp32 master, two moments and gradient are read, the first three written.
UPDATED_BYTES = 28.0


class HostOptimizerTime(TimeEffect):
    """A share of the parameters, or all, is updated on the host, by all devices of a node at once (ZeRO-Offload, Ren et
    al. 2021, section 4)."""

    def on(self, job: Job) -> bool:
        return job.techniques.offload_optimizer > 0

    def update(self, job: Job, cluster: Cluster, parameters: FloatColumn) -> Size:
        """That of the share, whose gradients and parameters cross the link between."""
        rate = constant("host_optimizer_efficiency") * host_link(cluster).memory_bytes_per_second
        host = cluster.host_seconds_factor * UPDATED_BYTES / rate
        states = job.facts.states
        link = (states.gradient_bytes + states.parameter_bytes) / host_link_bytes_per_second(cluster)
        return np.asarray(job.techniques.offload_optimizer * (host + link) * parameters)
