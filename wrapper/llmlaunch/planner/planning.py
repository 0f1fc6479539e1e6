"""From a recipe to a plan: search, choose, and where nothing is safe, find the smallest change that would fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from llmlaunch.backends.base import Backend
from llmlaunch.calibration.margins import Margin
from llmlaunch.errors import NothingSafe, UserError
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.estimator import NOT_MODELLED, estimate
from llmlaunch.memory.job import Job
from llmlaunch.planner.host import host_limit, node_of
from llmlaunch.planner.host_link import host_link_said
from llmlaunch.planner.limit import memory_limit
from llmlaunch.planner.plan import Limit, Plan
from llmlaunch.planner.search import HOST_MEMORY, MEMORY, Found, search
from llmlaunch.recipe.types import Recipe
from llmlaunch.techniques import Techniques
from llmlaunch.timing.step import step_time

__all__ = ["explain_unsafe", "make_plan"]

ALTERNATIVES = 5
# Tried in this order where nothing is safe. Not powers of two alone: 126 layers want 7 or 9 pipeline stages.
MORE_NODES = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 18, 21, 24, 28, 32, 42, 48, 63, 64)
SHORTER = (2, 4, 8, 16, 32)
NO_OFFLOAD: dict[str, Any] = {
    "offload_optimizer": 0.0,
    "offload_parameters": False,
    "offload_modules": (),
    "offload_layers": 0,
    "offload_checkpoints": False,
}
GIB = 2**30


def make_plan(
    recipe: Recipe, backend: Backend, baseline_bytes: int | None = None, margin: Margin | None = None
) -> Plan:
    """The fastest safe layout, or the closest unsafe one with advice.

    `baseline_bytes` replaces what the facts hold outside torch: on a CPU, the measured resident memory of a trainer
    that has imported everything and does nothing. `margin` is what measured runs say at the recipe's risk.

    Raises:
        UserError: no layout is legal at all; the message names the rule that refuses the most.
    """
    job = _job(recipe, backend, baseline_bytes)
    limit = memory_limit(recipe.cluster.accelerator, recipe.memory, margin)
    found = search(recipe, backend, job, limit)
    if not len(found.order):
        raise UserError(_no_layout(recipe, found))
    safe = bool(np.any(found.safe))
    chosen = found.candidate(recipe, 0)
    peak_kind = "device" if recipe.cluster.accelerator.kind == "gpu" else "resident"
    detail = estimate(job, chosen.layout, peak_kind=peak_kind, node=node_of(recipe))
    host = host_limit(recipe)
    count = min(len(found.order), ALTERNATIVES + 1)
    return Plan(
        recipe=recipe.name,
        verdict="safe" if safe else "unsafe",
        chosen=chosen,
        estimate=detail,
        limit=limit,
        host_limit=host,
        step_terms=_step_terms(recipe, chosen.layout),
        searched=found.searched,
        refused=found.refused,
        refusal_sentences=_sentences(found, limit, host),
        alternatives=tuple(found.candidate(recipe, i) for i in range(1, count)),
        not_modelled=NOT_MODELLED,
        assumptions=(
            *recipe.assumptions,
            *_baseline_said(job, peak_kind, baseline_bytes),
            *host_link_said(recipe, job, chosen.layout),
        ),
        advice=None if safe else _advice(recipe, backend, baseline_bytes, margin),
    )


def _job(recipe: Recipe, backend: Backend, baseline_bytes: int | None) -> Job:
    facts = backend.facts(recipe)
    if baseline_bytes is not None:
        facts = replace(facts, context_bytes=float(baseline_bytes))
    on_cpu = recipe.cluster.accelerator.kind == "cpu"
    return Job(recipe.model, recipe.workload, facts, techniques=_at_home(recipe) if on_cpu else recipe.techniques)


def _at_home(recipe: Recipe) -> Techniques:
    """On a CPU the host is the device: what moves there stays."""
    return replace(
        recipe.techniques,
        offload_modules=(),
        offload_layers=0,
        offload_checkpoints=False,
        offload_optimizer=0.0,
        offload_parameters=False,
        swapped_share=0.0,
    )


def _baseline_said(job: Job, peak_kind: str, baseline_bytes: int | None) -> tuple[str, ...]:
    if peak_kind != "resident":
        return ()
    where = "measured on this machine" if baseline_bytes is not None else "as on another machine; submit measures it"
    return (f"an idle trainer takes {job.facts.context_bytes / GIB:.2f} GiB, {where}",)


def explain_unsafe(plan: Plan) -> NothingSafe:
    """The error for a plan that is not safe: the closest layout, what overflows it, what would fit."""
    rank = plan.estimate.worst
    if rank.device_bytes <= plan.limit.limit_bytes and plan.host_bytes_beyond:
        return _explain_host(plan)
    term, term_bytes = max(rank.terms.items(), key=lambda item: item[1])
    needs, limit = rank.device_bytes / GIB, plan.limit.limit_bytes / GIB
    return NothingSafe(
        f"{plan.recipe}: no layout is safe. Closest: {plan.layout.describe()}, pipeline rank {rank.pipeline_rank} "
        f"needs {needs:.1f} GiB of {limit:.1f} GiB ({needs - limit:.1f} GiB too much), "
        f"most of it {term} with {term_bytes / GIB:.1f} GiB. {plan.advice or ''}".rstrip()
    )


def _explain_host(plan: Plan) -> NothingSafe:
    assert plan.host_limit is not None
    term, term_bytes = max(plan.estimate.host_terms.items(), key=lambda item: item[1])
    needs, limit = (plan.estimate.host_bytes_per_node or 0) / GIB, plan.host_limit.limit_bytes / GIB
    return NothingSafe(
        f"{plan.recipe}: no layout is safe. Closest: {plan.layout.describe()}, which fits the devices but not the host "
        f"memory: a node needs {needs:.1f} GiB of {limit:.1f} GiB ({needs - limit:.1f} GiB too much; "
        f"{plan.host_limit.reason}), "
        f"most of it {term} with {term_bytes / GIB:.1f} GiB. {plan.advice or ''}".rstrip()
    )


def _step_terms(recipe: Recipe, layout: Layout) -> dict[str, float]:
    columns = LayoutColumns.of([layout])
    microbatches = columns.num_microbatches(recipe.workload.global_batch_size)
    terms = step_time(recipe.model, recipe.workload, recipe.cluster, columns, microbatches).terms
    return {name: float(column[0]) for name, column in terms.items()}


def _sentences(found: Found, limit: Limit, host: Limit) -> dict[str, str]:
    failed = (rule for rule in found.rules if rule.key in found.refused)
    said = {rule.key: f"{rule.sentence} ({rule.where})" for rule in failed}
    if MEMORY in found.refused:
        said[MEMORY] = f"the worst pipeline rank needs more than {limit.limit_bytes / GIB:.1f} GiB: {limit.reason}"
    if HOST_MEMORY in found.refused:
        said[HOST_MEMORY] = f"a node's processes need more than {host.limit_bytes / GIB:.1f} GiB: {host.reason}"
    return said


def _no_layout(recipe: Recipe, found: Found) -> str:
    if not found.searched:
        pins = ", ".join(f"{k}={v}" for k, v in recipe.pins.items()) or "none"
        return (
            f"{recipe.path}: layout: no split of {recipe.world_size} devices ({recipe.nodes} nodes x "
            f"{recipe.cluster.devices_per_node}) matches the pins ({pins}); free a pin or change nodes"
        )
    key, count = max(found.refused.items(), key=lambda item: item[1])
    rule = next(r for r in found.rules if r.key == key)
    return (
        f"{recipe.path}: layout: none of {found.searched} layouts is legal; {count} are refused because "
        f"{rule.sentence} [{key}]; change the batch, the nodes or the pins accordingly"
    )


def _advice(recipe: Recipe, backend: Backend, baseline_bytes: int | None, margin: Margin | None) -> str:
    """The first change, smallest first, whose space holds a safe layout."""
    for change, changed in _changes(recipe):
        job = _job(changed, backend, baseline_bytes)
        found = search(changed, backend, job, memory_limit(changed.cluster.accelerator, changed.memory, margin))
        if np.any(found.safe):
            return f"Smallest change that fits: {change} ({found.candidate(changed, 0).layout.describe()})."
    return (
        f"Neither freeing the pins, nor up to {MORE_NODES[-1]} times the nodes, nor a "
        f"{SHORTER[-1]} times shorter sequence would fit."
    )


def _changes(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """One changed recipe after the other: what eases the host, a freed pin, more nodes, a shorter sequence."""
    if recipe.slurm.get("mem") not in (None, False, 0, "0"):
        yield "slurm.mem: 0 (all of the node's memory)", replace(recipe, slurm={**recipe.slurm, "mem": 0})
    for name, off in NO_OFFLOAD.items():
        if getattr(recipe.techniques, name) != off:
            ways: Techniques = replace(recipe.techniques, **{name: off})
            yield f"without layout.{name}", replace(recipe, techniques=ways)
    for name in recipe.pins:
        rest = {k: v for k, v in recipe.pins.items() if k != name}
        yield f"free the pin layout.{name}", replace(recipe, pins=rest)
    if len(recipe.pins) > 1:
        yield "layout: auto", replace(recipe, pins={})
    unpinned = replace(recipe, pins={}) if recipe.pins else recipe
    for factor in MORE_NODES:
        yield f"nodes: {recipe.nodes * factor}", replace(unpinned, nodes=recipe.nodes * factor)
    for factor in SHORTER:
        length = recipe.workload.sequence_length // factor
        if length >= 1:
            training = replace(recipe.training, workload=replace(recipe.workload, sequence_length=length))
            yield f"training.sequence_length: {length}", replace(unpinned, training=training)
