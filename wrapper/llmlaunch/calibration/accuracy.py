"""Predicted against measured: one result for every record, and the errors of each family."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from llmlaunch.calibration.records import Case, Unsupported, case_of
from llmlaunch.cluster.profile import Cluster
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.estimate import Estimate, RankEstimate
from llmlaunch.memory.estimator import estimate
from llmlaunch.timing.step import step_time

__all__ = ["RULE", "Result", "families", "score"]

RULE = 0.80  # Fujii et al.: safe up to this share of device memory
OUTCOMES = ("oom", "fits", "host_oom")
PRICED = ("allocated", "reserved", "device")


@dataclass(frozen=True)
class Result:
    """One record scored. The field names are the JSON shape of `accuracy --json`."""

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


def score(record: Mapping[str, Any], clusters: Mapping[str, Cluster]) -> Result:
    """Price one record. `clusters` maps the record's `gpu` to the machine whose speeds give its step time."""
    known = {
        "id": record["id"],
        "family": record["family"],
        "peak_kind": record["peak_kind"],
        "measured_bytes": record["peak_bytes"],
    }
    try:
        if record["peak_kind"] not in (*PRICED, *OUTCOMES) or record["peak_kind"] == "host_oom":
            raise Unsupported(f"peak kind {record['peak_kind']!r} is not priced")
        case = case_of(record)
    except Unsupported as refusal:
        return Result(**known, supported=False, reason=str(refusal), **_unpriced())
    priced = estimate(case.job, case.layout, case.num_microbatches)
    capacity = record.get("gpu_memory_bytes")
    limit = int(RULE * capacity) if capacity else None
    seconds = _step_seconds(record, case, clusters)
    tokens = case.job.workload.tokens_per_step
    return Result(
        **known,
        supported=True,
        reason=None,
        assumed=dict(case.assumed),
        predicted_bytes=_predicted(record, priced),
        limit_bytes=limit,
        verdict=None if limit is None else ("safe" if priced.worst.device_bytes <= limit else "unsafe"),
        predicted_step_seconds=seconds,
        predicted_tokens_per_second_per_gpu=tokens / seconds / case.layout.world_size if seconds else None,
    )


def _unpriced() -> dict[str, Any]:
    empty = ("predicted_bytes", "limit_bytes", "verdict", "predicted_step_seconds")
    return {"assumed": {}, "predicted_tokens_per_second_per_gpu": None, **dict.fromkeys(empty)}


def _of_kind(rank: RankEstimate, kind: str) -> int:
    return {"allocated": rank.allocated_bytes, "reserved": rank.reserved_bytes}.get(kind, rank.device_bytes)


def _predicted(record: Mapping[str, Any], priced: Estimate) -> int:
    """Of the record's own pipeline rank; of the worst where none is named and for outcomes."""
    kind, rank = record["peak_kind"], record.get("pipeline_rank")
    if kind in OUTCOMES or rank is None or not 0 <= rank < len(priced.ranks):
        return max(_of_kind(r, kind) for r in priced.ranks)
    return _of_kind(priced.ranks[rank], kind)


def _step_seconds(record: Mapping[str, Any], case: Case, clusters: Mapping[str, Cluster]) -> float | None:
    cluster = clusters.get(record["gpu"])
    if cluster is None or not case.batch_known:
        return None
    columns = LayoutColumns.of([case.layout])
    microbatches = np.array([case.num_microbatches])
    return float(step_time(case.job.shape, case.job.workload, cluster, columns, microbatches).total[0])


def families(results: Iterable[Result]) -> dict[str, dict[str, Any]]:
    """Errors by family and kind of peak: small CI models would drown the rest in one average."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(f"{result.family}/{result.peak_kind}", []).append(result)
    return {name: _summary(group) for name, group in groups.items()}


def _summary(group: Sequence[Result]) -> dict[str, Any]:
    priced = [r for r in group if r.supported]
    reasons: dict[str, int] = {}
    for result in group:
        if result.reason:
            reasons[result.reason] = reasons.get(result.reason, 0) + 1
    summary: dict[str, Any] = {"records": len(group), "supported": len(priced), "unsupported": reasons}
    if group[0].peak_kind in OUTCOMES:
        verdicts = [r.verdict for r in priced]
        return {**summary, "called_safe": verdicts.count("safe"), "called_unsafe": verdicts.count("unsafe")}
    errors = np.array(
        [r.predicted_bytes / r.measured_bytes - 1.0 for r in priced if r.predicted_bytes and r.measured_bytes]
    )
    if not len(errors):
        return summary
    size = np.abs(errors)
    return {
        **summary,
        "mape": float(size.mean()),
        "median": float(np.median(size)),
        "bias": float(errors.mean()),
        "p95": float(np.quantile(size, 0.95)),
        "worst": float(errors[int(size.argmax())]),
    }
