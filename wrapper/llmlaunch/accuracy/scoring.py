"""Predicted against measured: one score for every record, on the machine it ran on.

What differs from a shipped profile or from the record's own fields stands here as data with its source.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from llmlaunch.calibration.cases import NO_SIZES, Case, case_or_reason
from llmlaunch.calibration.completion import brings_recipes, in_performance_summary
from llmlaunch.calibration.evidence import JobClass, evidence_margin
from llmlaunch.calibration.margins import FUJII_SHARE
from llmlaunch.calibration.records import CPU, Record, machine_of
from llmlaunch.calibration.trainers import TRAINERS, Trainer
from llmlaunch.cluster.cards import accelerator_of_card, capability_of_card
from llmlaunch.cluster.load import accelerator_table
from llmlaunch.cluster.profile import Cluster, Link
from llmlaunch.errors import NothingSafe
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.estimator import Estimate, RankEstimate, estimate
from llmlaunch.memory.host import HostNode
from llmlaunch.memory.job import NO_CORRECTION, Correction, Job
from llmlaunch.progress import counting
from llmlaunch.techniques.switches import TensorOverlap
from llmlaunch.techniques.technique import key_of
from llmlaunch.timing.step import step_time
from llmlaunch.verdicts import SAFE, TIGHT, UNSAFE

__all__ = [
    "OUTCOMES",
    "ScoredRecord",
    "card_memory_bytes",
    "refuse_broken",
    "score",
    "score_all",
    "timed_job",
]

OUTCOMES = ("oom", "fits", "host_oom")
HOST = ("host", "host_oom")  # of a node, not of a device
PRICED = ("allocated", "reserved", "device", "resident", "host")
USABLE_SHARE = 0.985  # of a card's nominal GiB torch reports 98.45 to 99.5 % (cluster/accelerators.json)
NOMINAL_EXCEEDS = 0.03  # what torch reports, by no more than this share, if a record's card is the known one
NARROW = ("fp8", "mxfp8", "nvfp4")
# What was measured, when, and where: no prediction depends on it; nor on what a GPU held before, as it does on a CPU.
ANSWERS = (
    *("id", "peak_bytes", "repeats", "observed", "line", "numbers", "predicted_bytes", "peak_source", "step_seconds"),
    *("tokens_per_second_per_gpu", "tflops_per_gpu", "run_id", "attempt", "run_state", "started_at", "global_rank"),
    *("node", "gpu_uuid"),
)
DEVICES_PER_NODE = 8  # of a machine without a profile
# Bytes a second that each device has of its node's adapters, by family. Said of ABCI's A nodes: four HDR adapters of
# 200 Gb/s for eight A100s. Not confirmed by a page of the site or a measurement; the profile's figure is for one each.
FABRICS = {"fujii-grid-A100-40GB": 12.5e9}
# Trainers whose loader makes an s x s attention mask for every sample, by version: this fork's launch scripts say
# --reset-attention-mask and do not turn the mask off (megatron/core/datasets/gpt_dataset.py).
MASKS = ("okoge-kaz/Megatron-LM fork, Oct 2024",)
# Megatron-Bridge's performance recipes overlap tensor parallelism wherever it is used, but not with this format
# (src/megatron/bridge/perf_recipes/llama/*/llama3*.py, 2026-08); NVIDIA's tables do not say so.
NOT_OVERLAPPED = "nvfp4"
JSON_NAMES = (
    *("supported", "reason", "assumed", "predicted_bytes", "limit_bytes", "verdict"),
    *("predicted_step_seconds", "predicted_tokens_per_second_per_gpu"),
)


@dataclass(frozen=True)
class ScoredRecord:
    """A record and its score. `reason` is why it is not supported, or the law of memory that its estimate breaks, which
    is a bug of llmlaunch. `rank` is the pipeline rank compared and `worst` the one with the most device bytes; both,
    `case` and `job` are None if the record is not supported."""

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
    job: JobClass | None = None
    rank: RankEstimate | None = None
    worst: RankEstimate | None = None

    @property
    def measured_bytes(self) -> int | None:
        measured: int | None = self.record["peak_bytes"]
        return measured

    def as_json(self) -> dict[str, Any]:
        """Return the shape of a record in `accuracy --json`."""
        named = {name: self.record[name] for name in ("id", "family", "peak_kind")}
        return {**named, "measured_bytes": self.measured_bytes, **{name: getattr(self, name) for name in JSON_NAMES}}


def score_all(
    records: Iterable[Record], clusters: Mapping[str, Cluster], correction_of: Callable[[Record], Correction]
) -> list[ScoredRecord]:
    """Score every record, in order. Ranks and repeats of one run are records that differ in what was measured alone, so
    they are priced once."""
    by_question: dict[str, ScoredRecord] = {}
    scores = []
    for record in counting("records", list(records)):
        correction = correction_of(record)
        aside = ANSWERS if record["gpu"] == CPU else (*ANSWERS, "baseline_bytes")
        question = json.dumps([{key: record[key] for key in record if key not in aside}, repr(correction)])
        if question not in by_question:
            by_question[question] = score(record, clusters, correction)
        scores.append(replace(by_question[question], record=record))
    return scores


def score(
    record: Record,
    clusters: Mapping[str, Cluster],
    correction: Correction = NO_CORRECTION,
    trainers: Mapping[str, Trainer] = TRAINERS,
) -> ScoredRecord:
    """Price one record of one of the `trainers`. `clusters` are the machines of known accelerators
    (`cluster.cards.machines`), whose speeds give step times; `correction` is in every number of bytes."""
    if record["peak_kind"] not in (*PRICED, *OUTCOMES):
        known = ", ".join((*PRICED, *OUTCOMES))
        return ScoredRecord(record, False, f"peak_kind {record['peak_kind']!r} is not predicted; known are {known}")
    case = case_or_reason(record, trainers)
    if isinstance(case, str):
        return ScoredRecord(record, supported=False, reason=case)
    try:
        job = _job_class(record, trainers[record["backend"]])
        node = _node(record, case, clusters)
        priced = estimate(replace(case.job, correction=correction), case.layout, case.num_microbatches, node=node)
        seconds = _step_seconds(record, case, clusters)
        limit, most = _limits(record, job)
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
        job=job,
        rank=rank,
        worst=priced.worst,
    )


def _limits(record: Record, job: JobClass) -> tuple[int | None, int | None]:
    """Return up to how many bytes a prediction is safe, by the default margin without the record's own family, and up
    to how many it is tight."""
    card = card_memory_bytes(record)
    if card is None or record["gpu"] == CPU:
        return _share(card), _share(card)
    margin = evidence_margin(job, card, without_source=record["family"])
    return (_share(card), card) if margin is None else (margin.limit_bytes, margin.memory_bytes)


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


def _job_class(record: Record, trainer: Trainer) -> JobClass:
    """Return the class of jobs that a record of a trainer belongs to."""
    precision = record["precision"]
    narrow = precision.get("fp8_recipe") is not None or str(precision.get("compute")).startswith(NARROW)
    capability = capability_of_card(record["gpu"])
    return JobClass(
        backend=trainer.table,
        mixture=bool(record["model"].get("moe")),
        narrow=narrow,
        capability=None if capability is None else str(capability),
        whole_segments=_switched_off(record),
    )


def _switched_off(record: Record) -> bool:
    """Whether segments do not expand where its trainer's runs have them expand: Megatron-Bridge's benchmarks, and every
    job that llmlaunch renders."""
    expand = record["implementation"].get("expandable_segments")
    if brings_recipes(record):
        return expand is False or (expand is None and not in_performance_summary(record))
    return expand is False and record.get("run_id") is not None


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


def _step_seconds(record: Record, case: Case, clusters: Mapping[str, Cluster]) -> float | None:
    machine = timed_job(record, case, clusters)
    if machine is None or not case.batch_known:
        return None
    job, cluster = machine
    columns = LayoutColumns.of([case.layout])
    return float(step_time(job, cluster, columns, np.array([case.num_microbatches])).total[0])


def timed_job(record: Record, case: Case, clusters: Mapping[str, Cluster]) -> tuple[Job, Cluster] | None:
    """Return the job and the cluster whose step is timed, or None if the record's card is not known."""
    cluster = machine_of(record, clusters)
    if cluster is None:
        return None
    fabric = FABRICS.get(record["family"])
    if fabric is not None:
        cluster = replace(cluster, fabric_link=Link(fabric, cluster.fabric_link.latency_seconds))
    facts = case.job.facts
    if record.get("backend_version") in MASKS:
        facts = replace(facts, host=replace(facts.host, loader_mask=True))
    overlap_unknown = record["implementation"].get(key_of(TensorOverlap)) is None
    if brings_recipes(record) and overlap_unknown and case.layout.tensor > 1:
        overlapped = (record["precision"] or {}).get("fp8_recipe") != NOT_OVERLAPPED
        facts = replace(facts, exchange=replace(facts.exchange, user_buffers=int(overlapped)))
    return replace(case.job, facts=facts), cluster
