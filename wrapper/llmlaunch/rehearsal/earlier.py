"""The layouts of a recipe that were rehearsed before, each judged by what that showed. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from llmlaunch.calibration.lessons import Rehearsal
from llmlaunch.calibration.ratios import same_minor
from llmlaunch.errors import UserError
from llmlaunch.frameworks.framework import framework_of
from llmlaunch.layout import Layout
from llmlaunch.memory.estimator import NOT_MODELLED, RankEstimate, estimate
from llmlaunch.planner.plan import Candidate, JobLength, Plan
from llmlaunch.planner.setting import Setting, node_of
from llmlaunch.recipe.types import Recipe
from llmlaunch.rehearsal.ranks import ON_GPU, RehearsedRank, headline
from llmlaunch.rehearsal.records import each_as_run, left_out_of, place_of, rank_of, shape_of
from llmlaunch.rehearsal.verdict import Judgement, judge_plan, unseen_by_a_trace
from llmlaunch.techniques import Techniques
from llmlaunch.units import GIB
from llmlaunch.verdicts import TIGHT, UNSAFE

Record = Mapping[str, Any]


def rehearsals_of(records: Iterable[Record], setting: Setting) -> tuple[Rehearsal, ...]:
    """Return the rehearsals of the setting's own layouts, each judged by today's estimate and limit. Those of
    other machines, models and workloads are left out."""
    by_shape: dict[str, list[Record]] = {}
    for record in each_as_run(records):
        section = record.get("rehearsal")
        if isinstance(section, Mapping):
            by_shape.setdefault(str(section.get("shape")), []).append(record)
    rehearsals = []
    for shape, group in by_shape.items():
        with suppress(UserError, *MALFORMED):  # what the backend refuses today is planned by nobody
            rehearsals.append(_rehearsal(shape, group, setting))
    return tuple(rehearsal for rehearsal in rehearsals if rehearsal is not None)


def _rehearsal(shape: str, records: Sequence[Record], setting: Setting) -> Rehearsal | None:
    """None where the shape is of another recipe."""
    newest = records[-1]
    recipe, section = setting.recipe, newest["rehearsal"]
    layout = Layout.from_json(section["layout"])
    nodes, rest = divmod(layout.world_size, recipe.cluster.devices_per_node)
    if rest or not _may_be_of(newest, recipe):
        return None
    training = replace(recipe.training, gradient_dtype=section["gradient_dtype"])
    planned = replace(recipe, nodes=nodes, techniques=Techniques.from_json(section["techniques"]), training=training)
    own = setting.with_recipe(planned)
    plan = plan_of_one(own, layout)
    if shape_of(planned, plan)["shape"] != shape:
        return None
    ranks = dated_ranks(records, shape, planned, plan)
    if not ranks:
        return None
    judgement = judge_plan(plan, [rank for rank, _ in ranks], recipe.memory, unseen_by_a_trace(own.job, layout))
    sentence = sentence_of(ranks, judgement, recipe.backend.traits.package)
    return Rehearsal(
        workload=recipe.workload,
        layout=layout,
        techniques=planned.techniques,
        gradient_dtype=training.gradient_dtype,
        safe=judgement.safe,
        tight=judgement.verdict == TIGHT,
        device_bytes=judgement.worst.device_bytes,
        limit_bytes=plan.limit.limit_bytes,
        short_bytes=judgement.worst.short_bytes,
        ran_out=judgement.worst.ran_out,
        sentence=sentence,
        details=summary_json(ranks, judgement, sentence),
    )


def _may_be_of(record: Record, recipe: Recipe) -> bool:
    """A cheap first look: rendering each layout that anybody rehearsed would take longer than planning."""
    model, shape = record["recipe"]["model"], recipe.model
    return (
        record["gpu"] == recipe.cluster.accelerator.name
        and record["sequence_length"] == recipe.workload.sequence_length
        and (model["num_layers"], model["hidden_size"]) == (shape.num_layers, shape.hidden_size)
    )


def plan_of_one(setting: Setting, layout: Layout) -> Plan:
    """The plan of a layout that nobody searched for: its memory and the limit, and no time."""
    recipe = setting.recipe
    detail = estimate(setting.job, layout, peak_kind=recipe.cluster.accelerator.peak_kind, node=node_of(recipe))
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
        verdict=UNSAFE,
        chosen=chosen,
        estimate=detail,
        limit=setting.limit,
        host_limit=setting.host_limit,
        step_terms={},
        mfu=None,
        length=JobLength(0, 0.0, 0.0, 0),
        searched=0,
        refused={},
        refusal_sentences={},
        alternatives=(),
        not_modelled=NOT_MODELLED,
        assumptions=(),
        correction=setting.lessons.correction,
    )
    return replace(plan, verdict=plan.verdict_by_estimate)


NOBODYS = RankEstimate(0, {}, 0, 0, 0)
# the store takes over any JSON object: one that only looks like a rehearsal says nothing
MALFORMED = (AttributeError, IndexError, KeyError, TypeError, ValueError)


def rehearsed_ranks(records: Iterable[Record], shape: str, recipe: Recipe, plan: Plan) -> tuple[RehearsedRank, ...]:
    """Return the best rehearsal of each pipeline rank of the plan, by rank: on a GPU before a trace, with
    fewer techniques left out, the newer before the older. `shape` is the plan's, `records` any measurement records.

    A framework's version is the plan's where major and minor agree, as among measured runs.
    """
    return tuple(rank for rank, _ in dated_ranks(records, shape, recipe, plan))


def dated_ranks(
    records: Iterable[Record], shape: str, recipe: Recipe, plan: Plan
) -> tuple[tuple[RehearsedRank, float], ...]:
    """The same, each with the unix seconds of when it ran."""
    ranks, groups = plan.estimate.ranks, _best(records, shape, recipe)
    return tuple(
        (rank_of(groups[number], ranks[number]), float(groups[number][-1].get("started_at") or 0.0))
        for number in sorted(groups)
        if 0 <= number < len(ranks)
    )


def _best(records: Iterable[Record], shape: str, recipe: Recipe) -> dict[int, list[Record]]:
    by_place: dict[str, list[Record]] = {}
    for record in each_as_run(records):
        section = record.get("rehearsal")
        if isinstance(section, Mapping) and section.get("shape") == shape and same_version(record, recipe):
            with suppress(*MALFORMED):
                rank_of([record], NOBODYS)
                left_out = [omission.technique for omission in left_out_of(section)]
                place = place_of(shape, section["on"], section["versions"], record["pipeline_rank"], left_out)
                by_place.setdefault(place, []).append(record)

    def worth(group: Sequence[Record]) -> tuple[bool, int, float]:
        section = group[-1]["rehearsal"]
        return section["on"] == ON_GPU, -len(left_out_of(section)), float(group[-1].get("started_at") or 0.0)

    return {int(group[-1]["pipeline_rank"]): group for group in sorted(by_place.values(), key=worth)}


def same_version(record: Record, recipe: Recipe) -> bool:
    """Whether a record is of the version that the job runs: that of the recipe, else the one it is rendered for."""
    version = recipe.backend.runs_version or framework_of(recipe).default_version()
    return same_minor(record.get("backend_version"), version)


Found = Sequence[tuple[RehearsedRank, float]]  # with unix seconds


def sentence_of(ranks: Found, judgement: Judgement, package: str) -> str:
    """When, where, which ranks, how far off the estimate, and what follows."""
    newest = max(at for _, at in ranks)
    day = time.strftime("%Y-%m-%d %H:%M", time.localtime(newest))
    places = " and ".join(dict.fromkeys("on a GPU" if rank.on == ON_GPU else "as a trace" for rank, _ in ranks))
    versions = ", ".join(dict.fromkeys(rank.versions[package] for rank, _ in ranks if package in rank.versions))
    numbers = [str(rank.pipeline_rank) for rank, _ in ranks]
    which = f"pipeline rank{'' if len(numbers) == 1 else 's'} {', '.join(numbers)}"
    verdict = f"{judgement.verdict} by it: {'; '.join(judgement.sentences)}"
    framework = f" of {package} {versions}" if versions else ""
    return f"rehearsed {day} {places}{framework}, {which}{_difference(ranks)}; {verdict}"


def _difference(ranks: Found) -> str:
    """The largest between what was predicted and what was seen."""
    peaks = [(rank, headline(rank)) for rank, _ in ranks]
    compared_ranks = [
        (rank, peak, peak.difference) for rank, peak in peaks if peak.difference is not None and not rank.ran_out
    ]
    if not compared_ranks:
        return ""
    rank, peak, share = max(compared_ranks, key=lambda entry: abs(entry[2]))
    sizes = f"{(peak.rehearsed_bytes or 0) / GIB:.2f} GiB {peak.kind}, {peak.predicted_bytes / GIB:.2f} predicted"
    return f", at most {share:+.1%} from the estimate (rank {rank.pipeline_rank}: {sizes})"


def summary_json(ranks: Found, judgement: Judgement, sentence: str) -> dict[str, Any]:
    """`memory.rehearsed` of a plan's JSON."""
    worst = judgement.worst
    return {
        "verdict": judgement.verdict,
        "sentence": sentence,
        "worst_pipeline_rank": worst.pipeline_rank,
        "device_bytes": worst.device_bytes,
        "limit_bytes": worst.limit_bytes,
        "ranks": [
            {
                "pipeline_rank": rank.pipeline_rank,
                "stands_for": list(rank.stands_for),
                "on": rank.on,
                "at": at,
                "versions": dict(rank.versions),
                "peak_kind": headline(rank).kind,
                "predicted_bytes": headline(rank).predicted_bytes,
                "rehearsed_bytes": headline(rank).rehearsed_bytes,
                "ran_out": rank.ran_out,
                "left_out": [omission.as_json() for omission in rank.omissions],
            }
            for rank, at in ranks
        ],
    }
