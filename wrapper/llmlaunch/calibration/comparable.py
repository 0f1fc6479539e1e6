"""Which measured runs speak for which future runs, and the margin they give.

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
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from llmlaunch.calibration.accuracy import RULE, Scored, scored
from llmlaunch.calibration.margins import DIED, Margin, no_margin, runs_needed, upper_ratio
from llmlaunch.calibration.read import problem
from llmlaunch.calibration.records import TABLES
from llmlaunch.cluster.profile import Cluster

__all__ = ["BOUNDING", "Run", "margin_for", "runs_of"]

BOUNDING = ("device", "reserved")  # kinds of peak a plan's margin may rest on, best first
FULL = 0.9  # a failed run of our own that had filled this share of its card counts as out of memory
CONFIGURATION = (
    *("backend", "gpu", "gpu_memory_bytes", "world_size", "model", "sequence_length", "micro_batch_size"),
    *("global_batch_size", "parallelism", "optimizer", "recompute", "precision", "implementation"),
)


@dataclass(frozen=True)
class Run:
    """One configuration that ran: its score (measured / predicted; `DIED` where it ran out of memory), the worst over
    its ranks and repeats, and what a planner would have seen of it."""

    id: str
    family: str
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


def margin_for(
    records: Iterable[Mapping[str, Any]],
    clusters: Mapping[str, Cluster],
    backend: str,
    accelerator: str,
    version: str | None,
    risk: float,
) -> Margin:
    """The margin of a plan for `backend` on `accelerator` at `risk`; `clusters` as `scored` takes it."""
    wanted = TABLES.get(backend, backend)
    mine = [r for r in records if TABLES.get(str(r.get("backend"))) == wanted]
    runs = runs_of(_readable(mine, clusters), clusters)
    found = [run for run in runs if run.accelerator == accelerator and _same(run.version, version)]
    pools = {kind: [run for run in found if run.kind == kind] for kind in BOUNDING}
    needed = runs_needed(risk)
    kind = next((k for k in BOUNDING if len(pools[k]) >= needed), max(BOUNDING, key=lambda k: len(pools[k])))
    pool = pools[kind]
    bound = upper_ratio([run.score for run in pool], risk)
    if bound is None:
        return no_margin(risk, len(pool), sum(run.died for run in pool))
    bound = bound if kind == "device" else max(bound, 1.0)
    said = (
        f"risk {risk:g} by {len(pool)} comparable runs on {accelerator}: a {kind} peak is at most {bound:.3f} times "
        "the prediction"
    )
    return Margin(risk, len(pool), needed, bound, said)


def runs_of(found: Iterable[Scored], clusters: Mapping[str, Cluster]) -> list[Run]:
    """Every record that can speak for others, one per configuration and kind of peak. A death speaks for `device` and
    `reserved` alike."""
    kept: dict[tuple[str, str], Run] = {}
    for one in found:
        for run in _runs(one, clusters):
            key = (run.kind, _configuration(one.record))
            if key not in kept or run.score > kept[key].score:
                kept[key] = run
    return list(kept.values())


def _readable(records: Iterable[Mapping[str, Any]], clusters: Mapping[str, Cluster]) -> Iterator[Scored]:
    """The store takes over any JSON object with an id: one that only looks like a measurement speaks for nobody."""
    for record in records:
        if problem(record) is None:
            with suppress(KeyError, TypeError, ValueError):
                yield scored(record, clusters)


def _usable(record: Mapping[str, Any]) -> bool:
    """Said of the record alone, before it is priced. The peak of a run that failed is what it reached, not what it
    needed; of one that still runs it may rise. That its GPU was full says that it needed more."""
    source = record.get("source")
    evidence = source.get("evidence") if isinstance(source, Mapping) else None
    died = _filled_its_card(record) or (record.get("peak_kind") == "oom" and _had_its_card_alone(record))
    ended = record.get("run_state") in (None, "succeeded") or died
    return ended and record.get("flags_known") is not False and evidence != "failed"


def _filled_its_card(record: Mapping[str, Any]) -> bool:
    card, peak = record.get("gpu_memory_bytes"), record.get("peak_bytes")
    return bool(record.get("run_state") == "failed" and card and peak and peak >= FULL * card)


def _had_its_card_alone(record: Mapping[str, Any]) -> bool:
    """Whether the allocator's message names neither a neighbour with a share of the card nor a limit of the program's
    own: then the plan was not what ran out."""
    numbers = record.get("numbers")
    said = numbers if isinstance(numbers, Mapping) else {}
    total, ours = said.get("total_bytes"), said.get("process_bytes")
    others = said.get("other_processes_bytes") if ours else None  # alone, it may be this process under another pid
    return said.get("allowed_bytes") is None and not (total and others and others > (1 - FULL) * total)


def _runs(one: Scored, clusters: Mapping[str, Cluster]) -> list[Run]:
    record, result = one.record, one.result
    if one.worst is None or result.peak_kind in ("fits", "host", "host_oom") or not _usable(record):
        return []
    cluster = clusters.get(record["gpu"])
    card = record.get("gpu_memory_bytes") or (cluster.accelerator.memory_bytes if cluster else None)
    if card and one.worst.device_bytes > card:
        return []
    died = result.peak_kind == "oom" or _filled_its_card(record)
    kinds = BOUNDING if died else (result.peak_kind,)
    return [
        Run(
            id=result.id,
            family=TABLES[record["backend"]],
            accelerator=cluster.accelerator.name if cluster else str(record["gpu"]),
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


def _configuration(record: Mapping[str, Any]) -> str:
    return json.dumps({key: record.get(key) for key in CONFIGURATION}, sort_keys=True)


def _job(record: Mapping[str, Any]) -> str:
    """Layouts of one job: same model, length, batch and machines."""
    keys: Sequence[str] = ("backend", "gpu", "world_size", "sequence_length", "global_batch_size")
    return json.dumps([record["model"].get("name"), *(record.get(key) for key in keys)])


def _same(one: str | None, other: str | None) -> bool:
    """Framework versions agree in major.minor, or one of them does not say."""
    first, second = _minor(one), _minor(other)
    return first is None or second is None or first == second


def _minor(version: str | None) -> tuple[int, int] | None:
    """(0, 19) of "0.19.2", "v0.19" or "core_v0.19.0"; None of a commit or of words."""
    found = re.fullmatch(r"(?:core_)?v?(\d+)\.(\d+)(?:[.+a-z\d-].*)?", version.strip()) if version else None
    return (int(found[1]), int(found[2])) if found else None
