"""Predicted against measured: one result for every record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from llmlaunch.calibration.records import Case, Unsupported, case_of
from llmlaunch.calibration.timed import timed
from llmlaunch.cluster.profile import Cluster
from llmlaunch.errors import NothingSafe
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.correction import NO_CORRECTION, Correction
from llmlaunch.memory.estimate import Estimate, RankEstimate
from llmlaunch.memory.estimator import estimate
from llmlaunch.memory.host import Node
from llmlaunch.timing.step import step_time

__all__ = ["OUTCOMES", "PRICED", "RULE", "Result", "Scored", "refuse_broken", "score", "scored"]

RULE = 0.80  # Fujii et al.: safe up to this share of device memory
OUTCOMES = ("oom", "fits", "host_oom")
HOST = ("host", "host_oom")  # of a node, not of a device
PRICED = ("allocated", "reserved", "device", "host")
DEVICES_PER_NODE = 8  # of a machine without a profile


@dataclass(frozen=True)
class Result:
    """One record scored. The field names are the JSON shape of `accuracy --json`. `reason` is why a record is not
    supported, or the law of memory that its estimate breaks, which is a bug of llmlaunch."""

    id: str
    family: str
    peak_kind: str
    measured_bytes: int | None
    supported: bool
    reason: str | None
    assumed: Mapping[str, Any]
    predicted_bytes: int | None
    limit_bytes: int | None
    verdict: str | None
    predicted_step_seconds: float | None
    predicted_tokens_per_second_per_gpu: float | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Scored:
    """A result with what it came from. `rank` is the pipeline rank it compares and `worst` the one with the most
    device bytes; both and `case` are None where the record is not supported."""

    record: Mapping[str, Any]
    result: Result
    case: Case | None = None
    rank: RankEstimate | None = None
    worst: RankEstimate | None = None


def score(record: Mapping[str, Any], clusters: Mapping[str, Cluster]) -> Result:
    """Price one record. `clusters` maps the record's `gpu` to the machine whose speeds give its step time."""
    return scored(record, clusters).result


def scored(
    record: Mapping[str, Any], clusters: Mapping[str, Cluster], correction: Correction = NO_CORRECTION
) -> Scored:
    """The same, with the case and the estimate behind it; `correction` is in every number of bytes."""
    known = {
        "id": record["id"],
        "family": record["family"],
        "peak_kind": record["peak_kind"],
        "measured_bytes": record["peak_bytes"],
    }
    try:
        if record["peak_kind"] not in (*PRICED, *OUTCOMES):
            raise Unsupported(f"peak kind {record['peak_kind']!r} is not priced")
        case = case_of(record)
        node = _node(record, case, clusters)
    except Unsupported as refusal:
        return Scored(record, Result(**known, supported=False, reason=str(refusal), **_unpriced()))
    priced = estimate(replace(case.job, correction=correction), case.layout, case.num_microbatches, node=node)
    compared = _compared(record, priced)
    predicted, worst = _of_kind(compared, record["peak_kind"]), priced.worst.device_bytes
    capacity = record.get("gpu_memory_bytes")
    if record["peak_kind"] in HOST:
        predicted = worst = priced.host_bytes_per_node or 0
        capacity = _host_capacity(record, clusters)
    limit = int(RULE * capacity) if capacity else None
    seconds = _step_seconds(record, case, clusters)
    tokens = case.job.workload.tokens_per_step
    result = Result(
        **known,
        supported=True,
        reason=priced.fault,
        assumed=dict(case.assumed),
        predicted_bytes=predicted,
        limit_bytes=limit,
        verdict=None if limit is None else ("safe" if worst <= limit and priced.fault is None else "unsafe"),
        predicted_step_seconds=seconds,
        predicted_tokens_per_second_per_gpu=tokens / seconds / case.layout.world_size if seconds else None,
    )
    return Scored(record, result, case, compared, priced.worst)


def refuse_broken(found: Sequence[Scored]) -> None:
    """An estimate that breaks a law of memory says nothing of any record.

    Raises:
        NothingSafe: there is one; which record, and which law.
    """
    for one in found:
        if one.result.supported and one.result.reason is not None:
            raise NothingSafe(
                f"the estimate of record {one.result.id} cannot be right: {one.result.reason}. This is a bug of "
                "llmlaunch, not yours: please report it with the record"
            )


def _node(record: Mapping[str, Any], case: Case, clusters: Mapping[str, Cluster]) -> Node | None:
    """What runs on one node of a record of host memory; none for other kinds."""
    if record["peak_kind"] not in HOST:
        return None
    if record["gpu"] == "cpu":
        raise Unsupported("the host memory of a CPU-only machine is resident memory, which is not priced")
    cluster = clusters.get(record["gpu"])
    devices = record.get("devices_per_node") or (cluster.devices_per_node if cluster else DEVICES_PER_NODE)
    return Node(processes=min(int(devices), case.layout.world_size))


def _host_capacity(record: Mapping[str, Any], clusters: Mapping[str, Cluster]) -> int | None:
    cluster = clusters.get(record["gpu"])
    return record.get("host_memory_bytes") or (cluster.host_memory_bytes if cluster else None)


def _unpriced() -> dict[str, Any]:
    empty = ("predicted_bytes", "limit_bytes", "verdict", "predicted_step_seconds")
    return {"assumed": {}, "predicted_tokens_per_second_per_gpu": None, **dict.fromkeys(empty)}


def _of_kind(rank: RankEstimate, kind: str) -> int:
    return {"allocated": rank.allocated_bytes, "reserved": rank.reserved_bytes}.get(kind, rank.device_bytes)


def _compared(record: Mapping[str, Any], priced: Estimate) -> RankEstimate:
    """The record's own pipeline rank; the worst of its kind of peak where none is named, and for outcomes."""
    kind, rank = record["peak_kind"], record.get("pipeline_rank")
    if kind in OUTCOMES or rank is None or not 0 <= rank < len(priced.ranks):
        return max(priced.ranks, key=lambda r: _of_kind(r, kind))
    return priced.ranks[int(rank)]


def _step_seconds(record: Mapping[str, Any], case: Case, clusters: Mapping[str, Cluster]) -> float | None:
    found = timed(record, case, clusters)
    if found is None or not case.batch_known:
        return None
    job, cluster = found
    columns = LayoutColumns.of([case.layout])
    return float(step_time(job, cluster, columns, np.array([case.num_microbatches])).total[0])
