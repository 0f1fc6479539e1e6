"""What a planned job sends between its nodes, and what the best order of the nodes gains on a measured network."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import numpy as np

from llmlaunch.cluster.matrix import slurm_order
from llmlaunch.cluster.profile import Cluster
from llmlaunch.facts import MemoryFacts
from llmlaunch.layers.model import model_of
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.job import Job, all_ranks
from llmlaunch.memory.weights import rank_parameters, trained_parameters
from llmlaunch.placement.search import place
from llmlaunch.placement.traffic import Sizes, Volumes, inverse, traffic
from llmlaunch.planner.setting import Setting
from llmlaunch.recipe.types import Recipe
from llmlaunch.timing.correction import corrected_cluster
from llmlaunch.timing.network import bytes_leaving_domain
from llmlaunch.timing.products import split_of
from llmlaunch.timing.step import step_time, travelling_bytes

# orders priced, not seconds: the same plan must come out on every machine. About half a second.
BUDGET_ORDERS = 30_000.0


@dataclass(frozen=True)
class ExpectedPlacement:
    """The gain of the best order of `nodes`, the first by name of the profile's matrix: which nodes SLURM will allocate
    is not known.

    `slurm_order_seconds` and `seconds` are the objective: seconds of a step between nodes, with nothing hidden, in
    SLURM's order and in the best order found; `proved` means that no order takes less. `slurm_order_step_seconds` and
    `step_seconds` are whole steps in these orders, timed as every layout is, with what computation hides.
    """

    nodes: tuple[str, ...]
    slurm_order_seconds: float
    seconds: float
    proved: bool
    slurm_order_step_seconds: float
    step_seconds: float

    @property
    def gain_seconds(self) -> float:
        """Seconds a step is shorter in the best order than in SLURM's; never negative."""
        return max(self.slurm_order_step_seconds - self.step_seconds, 0.0)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "nodes": len(self.nodes)}


def layout_sizes(layout: Layout) -> Sizes:
    return Sizes(
        tensor=layout.tensor,
        context=layout.context,
        data=layout.data,
        pipeline=layout.pipeline,
        virtual_pipeline=layout.virtual_pipeline,
        expert=layout.expert,
        expert_tensor=layout.expert_tensor,
    )


def step_volumes(recipe: Recipe, layout: Layout, facts: MemoryFacts) -> Volumes:
    """Return the bytes a device sends in one step, with nothing hidden behind compute (as Pipette counts them).

    The pipeline is traversed once for every p micro-batches (Pipette's hidden critical path). Gradients are reduced
    and parameters gathered as often, and in the formats, that the step time has them (`timing/step.py`), D - 1 of D
    shares over every link of the ring.
    """
    workload = recipe.workload
    job = Job(recipe.model, workload, facts, techniques=recipe.techniques)
    microbatches = max(layout.num_microbatches(workload.global_batch_size), 1)
    tokens = workload.sequence_length * layout.micro_batch_size / layout.context
    split = layout.tensor if layout.sequence_parallel else 1
    boundary = facts.residual_bytes * tokens * recipe.model.hidden_size / split
    dense, expert = _trained(job, layout)
    group = layout.data * layout.context
    expert_group = group * layout.tensor // (layout.expert * layout.expert_tensor)
    each = _ring_bytes_per_parameter(job, layout, microbatches)
    return Volumes(
        pipeline=boundary * -(-microbatches // layout.pipeline),
        data=tuple(each * (group - 1) / group * count for count in dense),
        expert_data=tuple(each * (expert_group - 1) / expert_group * count for count in expert),
        expert=_exchanged(job, recipe.cluster, layout, microbatches),
    )


def _exchanged(job: Job, cluster: Cluster, layout: Layout, microbatches: int) -> float:
    """Return the bytes a device sends to each rank on other nodes of its expert group: dispatch and combine, forward
    and backward, as far as they leave it."""
    devices = layout.expert * layout.expert_tensor
    away = devices - min(devices, cluster.devices_per_node)
    model = model_of(job.shape)
    if model.mixture is None or not away:
        return 0.0
    mixtures = sum(model.counts[kind] for kind in model.classes[1]) / layout.pipeline
    at = split_of(job, LayoutColumns.of([layout]))
    leaving = float(bytes_leaving_domain(job, cluster, at, model.mixture)[0])
    return 4.0 * mixtures * microbatches * leaving * layout.expert_tensor / away


def _trained(job: Job, layout: Layout) -> tuple[list[float], list[float]]:
    """Return the trained parameters on one device of each stage: (dense, expert)."""
    rows = all_ranks(job, LayoutColumns.of([layout]))
    counts = trained_parameters(job, rows, rank_parameters(job, rows))
    return [float(n) for n in counts.dense], [float(n) for n in np.broadcast_to(counts.expert, len(rows))]


def _ring_bytes_per_parameter(job: Job, layout: Layout, microbatches: int) -> float:
    gradient, parameter = travelling_bytes(job)
    if layout.zero_stage >= 3:
        return microbatches * (gradient + 2.0 * parameter)
    if layout.zero_stage >= 2:
        return microbatches * gradient + parameter
    # without sharding an all-reduce is a reduce-scatter and an all-gather of gradients
    return gradient + parameter if layout.zero_stage else 2.0 * gradient


def expected_placement(setting: Setting, layout: Layout) -> ExpectedPlacement | None:
    """Return the gain of the best order of the nodes. None without a measured matrix of at least as many nodes as the
    job takes, and where the recipe keeps SLURM's order."""
    recipe, cluster, matrix = setting.recipe, setting.recipe.cluster, setting.recipe.cluster.bandwidth
    if matrix is None or recipe.placement != "auto" or not 1 < recipe.nodes <= len(matrix.nodes):
        return None
    volumes = step_volumes(recipe, layout, setting.job.facts)
    terms = traffic(layout_sizes(layout), volumes, cluster.devices_per_node, cluster.nvlink_domain_devices)
    rows = slurm_order(matrix, recipe.nodes)
    time = setting.lessons.time
    speeds = [[matrix.bytes_per_second[i][j] / (time.fabric * time.job_factor) for j in rows] for i in rows]
    orders = count()
    best = place(terms, inverse(speeds), BUDGET_ORDERS, clock=lambda: float(next(orders)))
    columns = LayoutColumns.of([layout])
    before, after = (
        float(step_time(setting.job, corrected_cluster(cluster.between(recipe.nodes, order), time), columns).total[0])
        for order in (rows, [rows[index] for index in best.order])
    )
    names = tuple(matrix.nodes[i] for i in rows)
    return ExpectedPlacement(names, best.before_seconds, best.seconds, best.proved, before, after)
