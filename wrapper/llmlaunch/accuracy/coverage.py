"""How often the conformal bound covered each comparable run when it was bounded by the others alone.

Comparable to a job are runs of the same backend family (Megatron-LM and Megatron-Bridge are one) on the same
accelerator, of the same framework major.minor where both are known, which the estimator supports, whose flags are
known and whose evidence holds. Runs predicted above their own card are left out: no plan is ever there, and leaving
runs out by what was known before they ran keeps the rest exchangeable with those a plan chooses.

Kinds of peak are not mixed. `device` is what a card runs out of, and is preferred. Failing enough of it, `reserved`
plus the predicted bytes outside the allocator (context, communicators) is compared with the predicted device bytes;
the outside was not measured, so such a bound is never below 1. `allocated` tells nothing of cache and context and never
bounds a plan; its coverage is only reported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmlaunch.accuracy.scoring import ScoredRecord
from llmlaunch.calibration.evidence import FUJII_SHARE, no_bound_sentence, runs_needed
from llmlaunch.calibration.ratios import BOUNDING, DEATH, NEAR, RISKS, Score, leave_one_out_bounds, upper_ratio
from llmlaunch.calibration.records import (
    accelerator_of,
    card_bytes,
    configuration_key,
    exclusion_reason,
    ran_out,
)
from llmlaunch.cluster.profile import Cluster
from llmlaunch.models.shape import kind_of

JOB = ("backend", "gpu", "world_size", "sequence_length", "global_batch_size")


@dataclass(frozen=True)
class ComparableRun:
    """One configuration that ran, with the worst score of its ranks and repeats, and what a planner would have seen of
    it."""

    score: Score
    backend: str  # a value of frameworks.recorded.TABLES
    accelerator: str
    job: str  # equal for runs a planner would have chosen between
    tokens_per_second_per_gpu: float | None  # predicted

    @property
    def died(self) -> bool:
        return self.score.score == DEATH

    @property
    def safe(self) -> bool:
        """Whether the run is predicted to stay within the rule's limit."""
        return self.score.share is not None and self.score.share <= 1.0


def comparable_runs(scores: Iterable[ScoredRecord], clusters: Mapping[str, Cluster]) -> list[ComparableRun]:
    """Return every run that tells something of others, one per configuration and kind of peak, with the worst score of
    its records. A death counts for `device` and for `reserved`."""
    worst: dict[tuple[str, str], ComparableRun] = {}
    for scored in scores:
        for run in _runs(scored, clusters):
            key = (run.score.kind, configuration_key(scored.record))
            if key not in worst or run.score.score > worst[key].score.score:
                worst[key] = run
    return list(worst.values())


def _runs(scored: ScoredRecord, clusters: Mapping[str, Cluster]) -> list[ComparableRun]:
    record, worst, case = scored.record, scored.worst, scored.case
    of_a_node = record["peak_kind"] in ("fits", "host", "host_oom")
    if worst is None or case is None or scored.job is None or of_a_node or exclusion_reason(record) is not None:
        return []
    card = card_bytes(record, clusters)
    if card and worst.device_bytes > card:
        return []
    died = ran_out(record)
    ratio = DEATH if died else _ratio(scored)
    share = worst.device_bytes / (FUJII_SHARE * card) if card else None
    return [
        ComparableRun(
            score=Score(ratio, kind, kind_of(case.job.shape), record.get("backend_version"), share),
            backend=scored.job.backend,
            accelerator=accelerator_of(record),
            job=json.dumps([case.job.shape.name, *(record.get(key) for key in JOB)]),
            tokens_per_second_per_gpu=scored.predicted_tokens_per_second_per_gpu,
        )
        for kind in (BOUNDING if died else (record["peak_kind"],))
    ]


def _ratio(scored: ScoredRecord) -> float:
    rank, measured = scored.rank, scored.measured_bytes
    if rank is None or measured is None:
        raise ValueError(f"{scored.record['id']}: a run that lived has a measured and a predicted peak")
    if scored.record["peak_kind"] == "reserved":
        return (measured + rank.device_bytes - rank.reserved_bytes) / max(rank.device_bytes, 1)
    return measured / max(scored.predicted_bytes or 0, 1)


def coverage(runs: Iterable[ComparableRun]) -> list[dict[str, Any]]:
    """Return for every backend family, accelerator and kind of peak the bound at each of RISKS, and the share of runs
    that stayed within the bound the others gave: over all runs and apart for those a planner would choose, near the
    limit and the fastest safe layout of its job. Choosing is not random, so these may be covered less.

    A run that died counts as not covered, also if its bound was above the card.
    """
    groups: dict[tuple[str, str, str], list[ComparableRun]] = {}
    for run in runs:
        groups.setdefault((run.backend, run.accelerator, run.score.kind), []).append(run)
    return [
        {
            "backend": backend,
            "accelerator": accelerator,
            "peak_kind": kind,
            "runs": len(group),
            "died": sum(run.died for run in group),
            "risks": [_coverage_at(group, risk) for risk in RISKS],
        }
        for (backend, accelerator, kind), group in groups.items()
    ]


def _coverage_at(group: Sequence[ComparableRun], risk: float) -> dict[str, Any]:
    ratios = [run.score.score for run in group]
    bound = upper_ratio(ratios, risk)
    reason = None if bound is not None else no_bound_sentence(risk, len(group), sum(run.died for run in group))
    row: dict[str, Any] = {"risk": risk, "needed": runs_needed(risk), "upper_ratio": bound, "reason": reason}
    if len(group) - 1 < runs_needed(risk):
        return {**row, "covered": None}
    bounds = leave_one_out_bounds(ratios, risk)
    covered = {
        id(run): not run.died and (limit is None or run.score.score <= limit)
        for run, limit in zip(group, bounds, strict=True)
    }
    fastest = {id(run) for run in _fastest_safe(group)}
    subsets: dict[str, Callable[[ComparableRun], bool]] = {
        "all": lambda run: True,
        "near_limit": lambda run: run.score.share is not None and NEAR <= run.score.share <= 1.0,
        "fastest_safe": lambda run: id(run) in fastest,
    }
    return {**row, "covered": {name: _share(group, covered, belongs) for name, belongs in subsets.items()}}


def _share(
    group: Sequence[ComparableRun], covered: dict[int, bool], belongs: Callable[[ComparableRun], bool]
) -> dict[str, Any]:
    part = [covered[id(run)] for run in group if belongs(run)]
    return {"runs": len(part), "share": sum(part) / len(part) if part else None}


def _fastest_safe(group: Sequence[ComparableRun]) -> list[ComparableRun]:
    """Return for each job with more than one layout the safe one predicted to be fastest."""
    jobs: dict[str, list[ComparableRun]] = {}
    for run in group:
        if run.tokens_per_second_per_gpu is not None:
            jobs.setdefault(run.job, []).append(run)
    chosen = []
    for layouts in jobs.values():
        safe = [run for run in layouts if run.safe]
        if len(layouts) > 1 and safe:
            chosen.append(max(safe, key=lambda run: run.tokens_per_second_per_gpu or 0.0))
    return chosen
