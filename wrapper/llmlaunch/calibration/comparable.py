"""Which measured runs speak for which future runs, and how far off their predictions were.

Comparable to a job are runs of the same backend family (Megatron-LM and Megatron-Bridge are one) on the same
accelerator, of the same framework major.minor where both are known, which the estimator supports, whose flags are
known and whose evidence holds. Runs predicted above their own card are left out: no plan is ever there, and leaving
runs out by what was known before they ran keeps the rest exchangeable with those a plan chooses.

Kinds of peak are not mixed. `device` is what a card runs out of, and is preferred. Failing enough of it, `reserved`
plus the predicted bytes outside the allocator (context, communicators) is compared with the predicted device bytes;
the outside was not measured, so such a bound is never below 1. `allocated` says nothing of cache and context and never
bounds a plan; its coverage is only reported.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from llmlaunch.calibration.accuracy import RULE, Scored, scored
from llmlaunch.calibration.calibrations import Score
from llmlaunch.calibration.margins import DIED
from llmlaunch.calibration.read import problem
from llmlaunch.calibration.records import TABLES
from llmlaunch.calibration.selection import accelerator_of, card_bytes, configuration, ran_out, usable
from llmlaunch.calibration.support import BOUNDING
from llmlaunch.cluster.profile import Cluster
from llmlaunch.models.families import kind_of

__all__ = ["Run", "runs_of", "scores_of"]


@dataclass(frozen=True)
class Run:
    """One configuration that ran: its score (measured / predicted; `DIED` where it ran out of memory), the worst over
    its ranks and repeats, and what a planner would have seen of it."""

    id: str
    family: str  # of backends
    model_family: str
    accelerator: str
    version: str | None
    kind: str
    score: float
    predicted_share: float | None  # of the rule's limit, by the worst rank's device bytes
    job: str  # equal for runs a planner would have chosen between
    tokens_per_second_per_gpu: float | None  # predicted

    @property
    def died(self) -> bool:
        return self.score == DIED


def scores_of(
    records: Iterable[Mapping[str, Any]], clusters: Mapping[str, Cluster], backend: str, accelerator: str
) -> list[Score]:
    """The scores of all runs of a backend (a value of TABLES) on `accelerator`, priced here and now; `clusters` as
    `scored` takes it."""
    mine = [record for record in records if TABLES.get(str(record.get("backend"))) == backend]
    runs = (run for run in runs_of(_readable(mine, clusters), clusters) if run.accelerator == accelerator)
    return [Score(run.score, run.kind, run.model_family, run.version, run.predicted_share) for run in runs]


def runs_of(found: Iterable[Scored], clusters: Mapping[str, Cluster]) -> list[Run]:
    """Every record that can speak for others, one per configuration and kind of peak. A death speaks for `device` and
    `reserved` alike."""
    kept: dict[tuple[str, str], Run] = {}
    for one in found:
        for run in _runs(one, clusters):
            key = (run.kind, configuration(one.record))
            if key not in kept or run.score > kept[key].score:
                kept[key] = run
    return list(kept.values())


def _readable(records: Iterable[Mapping[str, Any]], clusters: Mapping[str, Cluster]) -> Iterator[Scored]:
    """The store takes over any JSON object with an id: one that only looks like a measurement speaks for nobody."""
    for record in records:
        if problem(record) is None:
            with suppress(KeyError, TypeError, ValueError):
                yield scored(record, clusters)


def _runs(one: Scored, clusters: Mapping[str, Cluster]) -> list[Run]:
    record, result = one.record, one.result
    if one.worst is None or one.case is None or result.peak_kind in ("fits", "host", "host_oom") or not usable(record):
        return []
    card = card_bytes(record, clusters)
    if card and one.worst.device_bytes > card:
        return []
    died = ran_out(record)
    kinds = BOUNDING if died else (result.peak_kind,)
    return [
        Run(
            id=result.id,
            family=TABLES[record["backend"]],
            model_family=kind_of(one.case.job.shape),
            accelerator=accelerator_of(record, clusters),
            version=record.get("backend_version"),
            kind=kind,
            score=DIED if died else _ratio(one),
            predicted_share=one.worst.device_bytes / (RULE * card) if card else None,
            job=_job(record),
            tokens_per_second_per_gpu=result.predicted_tokens_per_second_per_gpu,
        )
        for kind in kinds
    ]


def _ratio(one: Scored) -> float:
    rank, measured = one.rank, one.result.measured_bytes
    if rank is None or measured is None:
        raise ValueError(f"{one.result.id}: a run that lived has a measured and a predicted peak")
    if one.result.peak_kind == "reserved":
        return (measured + rank.device_bytes - rank.reserved_bytes) / max(rank.device_bytes, 1)
    return measured / max(one.result.predicted_bytes or 0, 1)


def _job(record: Mapping[str, Any]) -> str:
    """Layouts of one job: same model, length, batch and machines."""
    keys: Sequence[str] = ("backend", "gpu", "world_size", "sequence_length", "global_batch_size")
    return json.dumps([record["model"].get("name"), *(record.get(key) for key in keys)])
