"""What rehearsed ranks do to the verdict of a plan, and to the margin of this very shape.

A trace replaces the estimate of what torch's allocator hands out, which it counts exactly. The allocator's cache is the
larger of its replay and the estimate, because no GPU has validated the replay; context, NCCL and what no trace sees
stay the estimate's. The limit stays as well: what the 80 % rule covers beyond the estimate, no trace measures.

A GPU measures the whole process but NCCL. There the rule, which covers errors of an estimate, gives way to what remains
unknown of this shape, never below the recipe's fixed floor: NCCL's own memory, which may be 30 % above its estimate
(688 MB were seen of a communicator estimated at 537; memory/constants.json), and what runs of the same job differ by,
5 % of what was measured (the repeats behind memory/constants.json). A rank that ran without a technique of the plan is
given what the estimate says that takes, which may be as far off as NCCL's. Where the estimate has no price for it, the
rule stays, and no plan is more than tight. A recipe that says another limit than the rule's,
or asks for a risk, keeps it. Ranks that were not rehearsed, and for which none stands in, keep estimate and limit.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from llmlaunch.calibration.lessons import Rehearsal
from llmlaunch.calibration.margins import Margin
from llmlaunch.calibration.ratios import same_minor
from llmlaunch.errors import UserError
from llmlaunch.frameworks.framework import framework_of
from llmlaunch.layout import Layout
from llmlaunch.memory.constants import constant
from llmlaunch.memory.estimator import NOT_MODELLED, RankEstimate, estimate
from llmlaunch.memory.job import NO_CORRECTION, Correction, Job
from llmlaunch.memory.peak import OUTSIDE_TORCH
from llmlaunch.planner.fallbacks import find_fallbacks
from llmlaunch.planner.headroom import search_with_headroom
from llmlaunch.planner.plan import Candidate, JobLength, Plan
from llmlaunch.planner.planning import plan_of
from llmlaunch.planner.setting import Setting, node_of
from llmlaunch.recipe.types import MemoryPolicy, Recipe
from llmlaunch.rehearsal.ranks import CACHE, ON_GPU, ON_TRACE, RehearsedRank, headline
from llmlaunch.rehearsal.records import each_as_run, left_out_of, place_of, rank_of, shape_of
from llmlaunch.techniques import Techniques
from llmlaunch.units import GIB
from llmlaunch.verdicts import SAFE, TIGHT, UNSAFE, worst_verdict

COMMUNICATORS = "communicators"
COMMUNICATORS_MAY_EXCEED = 0.30
RUNS_DIFFER = 0.05

Unseen = Sequence[Mapping[str, int]]


@dataclass(frozen=True)
class RankJudgement:
    """One pipeline rank of the plan. `parts` sum to `device_bytes`: "allocated", "allocator_cache", what a trace cannot
    see by what it is for, "context", "communicators"; on a GPU "process" and "communicators"; and each technique that
    the rank ran without, at what the estimate says it takes. `rehearsed` is the rank that was run for it, None where
    the estimate stands."""

    pipeline_rank: int
    predicted: RankEstimate
    rehearsed: RehearsedRank | None
    parts: Mapping[str, int]
    limit: Margin

    @property
    def limit_bytes(self) -> int:
        return self.limit.limit_bytes

    @property
    def device_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def ran_out(self) -> bool:
        return self.rehearsed is not None and self.rehearsed.ran_out

    @property
    def short_bytes(self) -> int:
        """By how much the estimate is too low: of a rank that ran out of memory, which needs more than the card has, at
        least."""
        needs = max(self.device_bytes, self.limit.memory_bytes) if self.ran_out else self.device_bytes
        return max(needs - self.predicted.device_bytes, 0)

    @property
    def verdict(self) -> str:
        return UNSAFE if self.ran_out else self.limit.verdict_of(self.device_bytes)


@dataclass(frozen=True)
class Judgement:
    """The plan's ranks in order, and `sentences` for a person: why the verdict is what it is, and what is not in it."""

    verdict: str
    ranks: tuple[RankJudgement, ...]
    sentences: tuple[str, ...]

    @property
    def safe(self) -> bool:
        return self.verdict == SAFE

    @property
    def worst(self) -> RankJudgement:
        """The rank nearest to its limit, or farthest beyond it; one that ran out of memory before all others."""
        return max(self.ranks, key=lambda rank: (rank.ran_out, rank.device_bytes - rank.limit_bytes))


def judge_plan(plan: Plan, rehearsed: Sequence[RehearsedRank], policy: MemoryPolicy, unseen: Unseen) -> Judgement:
    """`rehearsed` on one place or on both; a GPU's word goes before a trace's. `unseen` is of every pipeline rank what
    a trace cannot see (`unseen.unseen_by_a_trace`)."""
    best: dict[int, RehearsedRank] = {}
    for result in sorted(rehearsed, key=lambda result: result.on != ON_TRACE):  # traces first: what comes later wins
        best |= dict.fromkeys((*result.stands_for, result.pipeline_rank), result)
    ranks = tuple(
        _judged_rank(plan, policy, rank, best.get(rank.pipeline_rank), unseen[rank.pipeline_rank])
        for rank in plan.estimate.ranks
    )
    unpriced = any(rank.rehearsed is not None and rank.rehearsed.unpriced for rank in ranks)
    verdicts = (*(rank.verdict for rank in ranks), TIGHT if unpriced else SAFE)
    worst = worst_verdict(verdicts)
    broken = plan.host_bytes_beyond or plan.estimate.fault is not None
    judgement = Judgement(UNSAFE if broken else worst, ranks, ())
    return Judgement(judgement.verdict, ranks, tuple(_sentences(plan, judgement)))


def _judged_rank(
    plan: Plan,
    policy: MemoryPolicy,
    predicted: RankEstimate,
    rehearsed: RehearsedRank | None,
    unseen: Mapping[str, int],
) -> RankJudgement:
    outside = {name: predicted.terms[name] for name in OUTSIDE_TORCH if name in predicted.terms}
    cache = predicted.terms.get(CACHE, 0)
    limit, allocated = plan.limit, predicted.allocated_bytes
    priced = {} if rehearsed is None else rehearsed.priced
    if rehearsed is not None and rehearsed.process_bytes is not None:
        parts = {"process": rehearsed.process_bytes, **priced, COMMUNICATORS: outside[COMMUNICATORS]}
        if not rehearsed.ran_out and not rehearsed.unpriced:
            limit = _measured_limit(plan, policy, parts, sum(priced.values()))
        return RankJudgement(predicted.pipeline_rank, predicted, rehearsed, parts, limit)
    if rehearsed is not None and rehearsed.allocated_bytes is not None:
        allocated = rehearsed.allocated_bytes
        replayed = 0 if rehearsed.reserved_bytes is None else rehearsed.reserved_bytes - allocated
        cache = replayed if rehearsed.on != ON_TRACE and rehearsed.reserved_bytes is not None else max(cache, replayed)
        outside = {**(unseen if rehearsed.on == ON_TRACE else {}), **outside}
    parts = {"allocated": allocated, **priced, CACHE: cache, **outside}
    return RankJudgement(predicted.pipeline_rank, predicted, rehearsed, parts, limit)


def _measured_limit(plan: Plan, policy: MemoryPolicy, parts: Mapping[str, int], priced_bytes: int) -> Margin:
    """Return the limit of a rank that a GPU measured: device memory less the floor and what remains unknown, and never
    less than the rule allows."""
    limit = plan.limit
    if policy.limit is not None or policy.risk is not None:
        return limit
    estimated = parts[COMMUNICATORS] + priced_bytes
    unknown = round(COMMUNICATORS_MAY_EXCEED * estimated + RUNS_DIFFER * parts["process"])
    measured = limit.memory_bytes - policy.floor_bytes - unknown
    if measured <= limit.limit_bytes:
        return limit
    reason = (
        f"{policy.floor_bytes / GIB:.1f} GiB stay free, and {unknown / GIB:.1f} GiB for what one GPU alone does not "
        f"show: NCCL {'and what was left out ' if priced_bytes else ''}beyond the estimate, and what runs of one job "
        "differ by"
    )
    return replace(limit, limit_bytes=measured, reason=reason)


def _sentences(plan: Plan, judgement: Judgement) -> list[str]:
    worst = judgement.worst
    where = f"pipeline rank {worst.pipeline_rank}"
    over = worst.device_bytes - worst.limit_bytes
    lines = []
    if worst.ran_out:
        lines.append(f"{where} ran out of memory")
    elif over > 0:
        but = ", but fits the card" if judgement.verdict == TIGHT else ""
        lines.append(f"{where} needs {over / GIB:.2f} GiB more than the limit{but}")
    else:
        lines.append(f"{where} is the nearest to its limit, with {-over / GIB:.2f} GiB to spare")
    if worst.rehearsed is not None:
        lines += _omission_sentences(worst.rehearsed)
    unpriced = dict.fromkeys(name for rank in judgement.ranks if rank.rehearsed for name in rank.rehearsed.unpriced)
    lines += [f"{name} was left out, and the estimate has no price for it" for name in unpriced]
    if plan.estimate.fault is not None:
        lines.append(f"the estimate cannot be right, which is a bug of llmlaunch: {plan.estimate.fault}")
    if plan.host_bytes_beyond:
        lines.append(f"a node needs {plan.host_bytes_beyond / GIB:.1f} GiB more host memory than it may use")
    if judgement.verdict != plan.verdict_by_estimate:
        lines.append(f"the estimate alone said {plan.verdict_by_estimate}")
    return lines


def _omission_sentences(rehearsed: RehearsedRank) -> list[str]:
    """Return what the peak is made of where not all of the planned job ran. Of a trace the exchange's buffers are among
    the estimate's own in any case, and nothing is added for them."""
    return [
        f"it was {'traced' if rehearsed.on == ON_TRACE else 'run'} without {name}, for which the estimate adds "
        f"{count / GIB:.2f} GiB"
        for name, count in rehearsed.priced.items()
        if count
    ]


WORKSPACE, ROUTING, RESIDUAL_OF_RUNS = "workspace of kernel libraries", "uneven routing", "measured residual"


def unseen_by_a_trace(job: Job, layout: Layout) -> tuple[Mapping[str, int], ...]:
    """Bytes by what they are for, of every pipeline rank in order.

    A trace sees no workspace inside a kernel library (cuBLAS and the like) and routes tokens evenly between experts. It
    says nothing of what measured runs allocate beyond every formula either; where they allocate less, nothing is taken
    off.
    """
    plain = replace(job, correction=NO_CORRECTION)
    seen = max(job.facts.allocator.workspace_bytes - constant("workspace_bytes"), 0.0)
    facts = replace(job.facts, allocator=replace(job.facts.allocator, workspace_bytes=seen))
    bare = replace(plain, facts=facts)
    even = replace(bare, facts=replace(facts, mixture=replace(facts.mixture, expert_imbalance=1.0)))
    steps = [estimate(variant, layout).ranks for variant in (even, bare, plain, job)]
    unseen = []
    for ranks in zip(*steps, strict=True):
        sizes = [rank.allocated_bytes for rank in ranks]
        more = dict(zip((ROUTING, WORKSPACE, RESIDUAL_OF_RUNS), (b - a for a, b in pairwise(sizes)), strict=True))
        unseen.append({name: more[name] for name in (WORKSPACE, ROUTING, RESIDUAL_OF_RUNS) if more[name] > 0})
    return tuple(unseen)


@dataclass(frozen=True)
class NextLayout:
    """`why` says how it was priced."""

    plan: Plan
    why: str

    def as_json(self) -> dict[str, Any]:
        return {**self.plan.chosen.as_json(), "why": self.why}


def next_layout(setting: Setting, plan: Plan, judgement: Judgement) -> NextLayout | None:
    """Return the layout to take instead of a refuted one, with the recipe's pins kept.

    Where a rank ran out of memory, nobody knows by how much it was short: the first layout with a step more head-room.
    Else the fastest that is safe with torch's memory priced as much higher as the worst rank was rehearsed. None where
    the plan is safe, or tight as it was planned, or there is no such layout.
    """
    if judgement.safe or judgement.verdict == TIGHT == plan.verdict:
        return None
    if judgement.worst.ran_out:
        after = find_fallbacks(setting, plan, 1).layouts
        why = "with a step more head-room than the one that ran out"
        return NextLayout(after[0].plan, why) if after and after[0].change is None else None
    share = _beyond(judgement.worst)
    if share <= 0:
        return None
    priced = _corrected(setting, share)
    searched = search_with_headroom(priced)
    if not np.any(searched.safe):
        return None
    return NextLayout(plan_of(priced, searched, 0), f"with torch's memory priced {share:.1%} higher, as rehearsed")


def _beyond(rank: RankJudgement) -> float:
    """How much more torch's allocator held than predicted, as a share of it."""
    predicted = rank.predicted
    outside = predicted.device_bytes - predicted.reserved_bytes
    return (rank.device_bytes - outside) / predicted.reserved_bytes - 1.0


def _corrected(setting: Setting, share: float) -> Setting:
    """On top of what measured runs add to every prediction."""
    before = setting.lessons.correction
    factor = before.torch_factor * (1.0 + share)
    correction: Correction = replace(before, torch_share=factor - 1.0)
    return replace(setting, lessons=replace(setting.lessons, correction=correction)).with_recipe(setting.recipe)


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
