"""The layouts of a recipe that were rehearsed before, each judged by what that showed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from llmlaunch.calibration.lessons import Rehearsal
from llmlaunch.errors import UserError
from llmlaunch.layout import LAYOUT_FIELDS, RECOMPUTE_NAMES, Layout
from llmlaunch.memory.estimator import NOT_MODELLED, estimate
from llmlaunch.planner.host import node_of
from llmlaunch.planner.plan import Candidate, JobLength, Plan
from llmlaunch.planner.setting import Setting
from llmlaunch.recipe.types import Recipe
from llmlaunch.rehearsal.earlier_words import sentence_of, told_of
from llmlaunch.rehearsal.evidence import MALFORMED, dated_ranks
from llmlaunch.rehearsal.records import PACKAGES
from llmlaunch.rehearsal.shape import shape_of
from llmlaunch.rehearsal.unseen import unseen_by_a_trace
from llmlaunch.rehearsal.verdict import judged
from llmlaunch.techniques import Techniques

__all__ = ["rehearsals_of"]

Record = Mapping[str, Any]


def rehearsals_of(records: Iterable[Record], setting: Setting) -> tuple[Rehearsal, ...]:
    """Of every layout of the setting's recipe that was rehearsed, as it was then, what that says of it now. Layouts of
    other machines, models and workloads are none of it."""
    by_shape: dict[str, list[Record]] = {}
    for record in records:
        said = record.get("rehearsal")
        if isinstance(said, Mapping):
            by_shape.setdefault(str(said.get("shape")), []).append(record)
    found = []
    for shape, group in by_shape.items():
        with suppress(UserError, *MALFORMED):  # what the backend refuses today is planned by nobody
            found.append(_rehearsal(shape, group, setting))
    return tuple(one for one in found if one is not None)


def _rehearsal(shape: str, records: Sequence[Record], setting: Setting) -> Rehearsal | None:
    """None where the shape is of another recipe."""
    newest = records[-1]
    recipe, said = setting.recipe, newest["rehearsal"]
    layout = _layout(said["layout"])
    nodes, rest = divmod(layout.world_size, recipe.cluster.devices_per_node)
    if rest or not _may_be_of(newest, recipe):
        return None
    training = replace(recipe.training, gradient_dtype=said["gradient_dtype"])
    planned = replace(recipe, nodes=nodes, techniques=Techniques.from_json(said["techniques"]), training=training)
    own = setting.of(planned)
    plan = _plan_of_one(own, layout)
    if shape_of(planned, plan, setting.backend.render(planned, layout))["shape"] != shape:
        return None
    found = dated_ranks(records, shape, planned, plan)
    if not found:
        return None
    judgement = judged(plan, [rank for rank, _ in found], recipe.memory, unseen_by_a_trace(own.job, layout))
    sentence = sentence_of(found, judgement, PACKAGES[recipe.backend.name])
    return Rehearsal(
        workload=recipe.workload,
        layout=layout,
        techniques=planned.techniques,
        gradient_dtype=training.gradient_dtype,
        safe=judgement.safe,
        device_bytes=judgement.worst.device_bytes,
        limit_bytes=plan.limit.limit_bytes,
        sentence=sentence,
        told=told_of(found, judgement, sentence),
    )


def _may_be_of(record: Record, recipe: Recipe) -> bool:
    """A cheap first look: rendering each layout that anybody rehearsed would take longer than planning."""
    model, shape = record["model"], recipe.model
    return (
        record["gpu"] == recipe.cluster.accelerator.name
        and record["sequence_length"] == recipe.workload.sequence_length
        and (model["num_layers"], model["hidden_size"]) == (shape.num_layers, shape.hidden_size)
    )


def _layout(said: Mapping[str, Any]) -> Layout:
    """As `Layout.as_json` wrote it."""
    numbers = {name: int(said[name]) for name in LAYOUT_FIELDS if name != "recompute"}
    recompute, layers = RECOMPUTE_NAMES.index(said["recompute"]), tuple(map(int, said["layers_by_stage"]))
    return Layout(**numbers, recompute=recompute, layers_by_stage=layers)


def _plan_of_one(setting: Setting, layout: Layout) -> Plan:
    """The plan of a layout that nobody searched for: its memory and the limit, and no time."""
    recipe = setting.recipe
    detail = estimate(setting.job, layout, node=node_of(recipe))
    worst = detail.worst
    chosen = Candidate(
        layout,
        worst.device_bytes,
        worst.pipeline_rank,
        step_seconds=0.0,
        tokens_per_second_per_gpu=0.0,
        techniques=recipe.techniques,
        gradient_dtype=recipe.training.gradient_dtype,
    )
    plan = Plan(
        recipe=recipe.name,
        verdict="unsafe",
        chosen=chosen,
        estimate=detail,
        limit=setting.limit,
        host_limit=setting.host_limit,
        step_terms={},
        mfu=None,
        length=JobLength(0, 0, 0.0, 0.0),
        searched=0,
        refused={},
        refusal_sentences={},
        alternatives=(),
        not_modelled=NOT_MODELLED,
        assumptions=(),
        correction=setting.lessons.correction,
    )
    return replace(plan, verdict="safe") if plan.safe_by_estimate else plan
