"""Predicted against measured: one score for every record, on the machine it ran on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from llmlaunch.calibration.cases import NO_SIZES, Case
from llmlaunch.calibration.evidence import FUJII_SHARE, JobClass
from llmlaunch.calibration.margins import margin_by_evidence
from llmlaunch.calibration.pool import case_or_reason
from llmlaunch.calibration.records import CPU, Record, machine_of
from llmlaunch.cluster.cards import accelerator_of_card
from llmlaunch.cluster.load import accelerator_table
from llmlaunch.cluster.profile import Cluster
from llmlaunch.errors import NothingSafe
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.estimator import Estimate, RankEstimate, estimate
from llmlaunch.memory.host import HostNode
from llmlaunch.progress import counting
from llmlaunch.timing.step import step_time
from llmlaunch.verdicts import SAFE, TIGHT, UNSAFE

OUTCOMES = ("oom", "fits", "host_oom")
HOST = ("host", "host_oom")  # of a node, not of a device
PRICED = ("allocated", "reserved", "device", "resident", "host")
USABLE_SHARE = 0.985  # of a card's nominal GiB torch reports 98.45 to 99.5 % (cluster/accelerators.json)
NOMINAL_EXCEEDS = 0.03  # what torch reports, by no more than this share, if a record's card is the known one
# What was measured, when, and where: no prediction depends on it; nor on what a GPU held before, as it does on a CPU.
ANSWERS = (
    *("id", "peak_bytes", "repeats", "observed", "line", "numbers", "predicted_bytes", "peak_source", "step_seconds"),
    *("tokens_per_second_per_gpu", "tflops_per_gpu", "run_id", "attempt", "run_state", "started_at", "global_rank"),
    *("node", "gpu_uuid"),
)
DEVICES_PER_NODE = 8  # of a machine without a profile
JSON_NAMES = (
    *("supported", "reason", "assumed", "predicted_bytes", "limit_bytes", "verdict"),
    *("predicted_step_seconds", "predicted_tokens_per_second_per_gpu"),
)


@dataclass(frozen=True)
class ScoredRecord:
    """A record and its score. `reason` is why it is not supported, or the law of memory that its estimate breaks, which
    is a bug of llmlaunch. `rank` is the pipeline rank compared and `worst` the one with the most device bytes; all
    three, `case` included, are None if the record is not supported."""

    record: Record
    supported: bool
    reason: str | None
    assumed: Mapping[str, Any] = field(default_factory=dict)
    predicted_bytes: int | None = None
    limit_bytes: int | None = None
    verdict: str | None = None
    predicted_step_seconds: float | None = None
    predicted_tokens_per_second_per_gpu: float | None = None
    case: Case | None = None
    rank: RankEstimate | None = None
    worst: RankEstimate | None = None

    @property
    def job(self) -> JobClass | None:
        """The class of measured runs that the record is compared with; None if it is not supported."""
        return None if self.case is None else self.case.job_class

    @property
    def measured_bytes(self) -> int | None:
        measured: int | None = self.record["peak_bytes"]
        return measured

    def as_json(self) -> dict[str, Any]:
        """Return the shape of a record in `accuracy --json`."""
        named = {name: self.record[name] for name in ("id", "family", "peak_kind")}
        return {**named, "measured_bytes": self.measured_bytes, **{name: getattr(self, name) for name in JSON_NAMES}}


def score_all(records: Iterable[Record], clusters: Mapping[str, Cluster]) -> list[ScoredRecord]:
    """Score every record, in order. Ranks and repeats of one run are records that differ in what was measured alone, so
    they are priced once. `clusters` are the machines of known accelerators (`cluster.cards.machines`)."""
    by_question: dict[str, ScoredRecord] = {}
    scores = []
    for record in counting("records", list(records)):
        aside = ANSWERS if record["gpu"] == CPU else (*ANSWERS, "baseline_bytes")
        question = json.dumps({key: record[key] for key in record if key not in aside})
        if question not in by_question:
            by_question[question] = score(record, case_or_reason(record, clusters), clusters)
        scores.append(replace(by_question[question], record=record))
    return scores


def score(record: Record, case: Case | str, clusters: Mapping[str, Cluster]) -> ScoredRecord:
    """Price one record, whose `case` is a reason where it cannot be priced."""
    if record["peak_kind"] not in (*PRICED, *OUTCOMES):
        known = ", ".join((*PRICED, *OUTCOMES))
        return ScoredRecord(record, False, f"peak_kind {record['peak_kind']!r} is not predicted; known are {known}")
    if isinstance(case, str):
        return ScoredRecord(record, supported=False, reason=case)
    try:
        node = _node(record, case, clusters)
        priced = estimate(case.job, case.layout, case.num_microbatches, node=node)
        seconds = _step_seconds(case)
        limit, most = _limits(record, case.job_class)
    except (ArithmeticError, AttributeError, IndexError, MemoryError, TypeError, ValueError):
        return ScoredRecord(record, supported=False, reason=NO_SIZES)
    rank = _compared_rank(record, priced)
    predicted, worst = _bytes_of_kind(rank, record["peak_kind"]), priced.worst.device_bytes
    if record["peak_kind"] in HOST:
        predicted = worst = priced.host_bytes_per_node or 0
        limit = most = _share(_host_capacity(record, clusters))
    tokens = case.job.workload.tokens_per_step
    return ScoredRecord(
        record,
        supported=True,
        reason=priced.fault,
        assumed=dict(case.assumed),
        predicted_bytes=predicted,
        limit_bytes=limit,
        verdict=_verdict(priced, worst, limit, most),
        predicted_step_seconds=seconds,
        predicted_tokens_per_second_per_gpu=tokens / seconds / case.layout.world_size if seconds else None,
        case=case,
        rank=rank,
        worst=priced.worst,
    )


def _limits(record: Record, job: JobClass) -> tuple[int | None, int | None]:
    """Return up to how many bytes a prediction is safe, by the default margin without the record's own family, and up
    to how many it is tight."""
    card = card_memory_bytes(record)
    if card is None or record["gpu"] == CPU:
        return _share(card), _share(card)
    margin = margin_by_evidence(job, card, without_source=record["family"])
    return (_share(card), card) if margin is None else (margin.limit_bytes, margin.fits_bytes)


def _share(capacity: int | None) -> int | None:
    return int(FUJII_SHARE * capacity) if capacity else None


def _verdict(priced: Estimate, worst_bytes: int, limit: int | None, most: int | None) -> str | None:
    """Return the verdict of the margin on the predicted size, None without a limit. A record whose flags are not known
    is judged like the others, by what completes it, and counted apart (`accuracy.summary.judged`)."""
    if limit is None or most is None:
        return None
    if priced.fault is not None or worst_bytes > max(limit, most):
        return UNSAFE
    return SAFE if worst_bytes <= limit else TIGHT


def card_memory_bytes(record: Record) -> int | None:
    """Return what torch would report as the card's memory; records have the nominal figure."""
    nominal = record.get("gpu_memory_bytes")
    name = accelerator_of_card(record["gpu"], nominal)
    known: int | None = None if name is None else accelerator_table()[name]["memory_bytes"]
    if known is None or (nominal and not 0 <= 1.0 - known / nominal <= NOMINAL_EXCEEDS):
        return int(USABLE_SHARE * nominal) if nominal else None
    return known


def refuse_broken(scores: Sequence[ScoredRecord]) -> None:
    """Refuse scores of which one breaks a law of memory, because its estimate tells nothing of any record.

    Raises:
        NothingSafe: there is one; which record, and which law.
    """
    for scored in scores:
        if scored.supported and scored.reason is not None:
            raise NothingSafe(
                f"the estimate of record {scored.record['id']} cannot be right: {scored.reason}. This is a bug of "
                "llmlaunch, not yours: please report it with the record"
            )


def _node(record: Record, case: Case, clusters: Mapping[str, Cluster]) -> HostNode | None:
    """Return what runs on one node of a record of host memory, and None for other kinds."""
    if record["peak_kind"] not in HOST:
        return None
    cluster = machine_of(record, clusters)
    devices = record.get("devices_per_node") or (cluster.devices_per_node if cluster else DEVICES_PER_NODE)
    return HostNode(processes=min(int(devices), case.layout.world_size), resident=record["gpu"] == CPU)


def _host_capacity(record: Record, clusters: Mapping[str, Cluster]) -> int | None:
    cluster = machine_of(record, clusters)
    return record.get("host_memory_bytes") or (cluster.host_memory_bytes if cluster else None)


def _compared_rank(record: Record, priced: Estimate) -> RankEstimate:
    """Return the record's own pipeline rank; the worst of its kind of peak if it names none, and for outcomes."""
    kind, rank = record["peak_kind"], record.get("pipeline_rank")
    if kind in OUTCOMES or rank is None or not 0 <= rank < len(priced.ranks):
        return max(priced.ranks, key=lambda r: _bytes_of_kind(r, kind))
    return priced.ranks[int(rank)]


def _bytes_of_kind(rank: RankEstimate, kind: str) -> int:
    return {"allocated": rank.allocated_bytes, "reserved": rank.reserved_bytes}.get(kind, rank.device_bytes)


def _step_seconds(case: Case) -> float | None:
    if case.cluster is None or not case.batch_known:
        return None
    columns = LayoutColumns.of([case.layout])
    job, microbatches = case.timed_job or case.job, np.array([case.num_microbatches])
    return float(step_time(job, case.cluster, columns, microbatches).total[0])
