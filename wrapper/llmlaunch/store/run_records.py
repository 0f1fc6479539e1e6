"""One attempt of a run as measurement records, and in a sentence why it has none. Pure: no database, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmlaunch.calibration.records import Record
from llmlaunch.rundir.run_file import RunFile, pipeline_rank_of
from llmlaunch.rundir.summary import AttemptSummary, NodeSummary, RankSummary
from llmlaunch.rundir.values import byte_count, time_or_none

# kind of peak -> the counter of torch's caching allocator, and its name in a rank's summary
ALLOCATOR = {
    "allocated": ("allocated_bytes.all.peak", "allocated_peak_bytes"),
    "reserved": ("reserved_bytes.all.peak", "reserved_peak_bytes"),
}
ELSEWHERE = ("rank", "node", "pipeline_rank", "started_at", "peak_bytes", "peak_source", "at_least")  # at the top


@dataclass(frozen=True)
class AttemptRecords:
    """The measurement records of one attempt; `why_none` is a sentence if no rank has one of the run's own kind."""

    records: tuple[dict[str, Any], ...]
    why_none: str | None


def records_of(run: RunFile, run_id: str, summary: AttemptSummary, state: str) -> AttemptRecords:
    """Return one record for each global rank whose peak of the run's own kind is known, two for each pipeline rank of
    what torch's allocator held, and one for each node of its main memory.

    `run` is the run.json of the layout the attempt ran, `state` what became of it: the peak of a failed run is what it
    reached, not what it needs.
    """
    common = _common(run, run_id, summary.attempt, state)
    if summary.step_seconds is not None:
        common["step_seconds"] = summary.step_seconds
    if run.get("calibration_id") is not None:
        common["calibration_id"] = run["calibration_id"]
    ranks = [_rank_record(run, common, summary, rank) for rank in summary.ranks if rank.peak_bytes is not None]
    stages = _stage_records(run, common, summary)
    hosts = [_host_record(run, common, node) for node in summary.nodes if node.host_peak_bytes is not None]
    return AttemptRecords((*ranks, *stages, *hosts), None if ranks else _why_none(run, summary))


def _common(run: RunFile, run_id: str, attempt: str, state: str) -> dict[str, Any]:
    """Return what all records of an attempt have: the template of run.json, and which run it was."""
    template = run.get("measurement")
    record: dict[str, Any] = dict(template) if isinstance(template, Mapping) else {}
    return record | {"schema": 1, "run_id": run_id, "attempt": attempt, "run_state": state}


def _identity(common: Record, name: str, kind: str, pipeline_rank: int | None = None) -> dict[str, Any]:
    return {
        "id": f"{common['run_id']}/{common['attempt']}/{name}/{kind}",
        "peak_kind": kind,
        "pipeline_rank": pipeline_rank,
        "rank_scope": "stage" if pipeline_rank is not None else "unknown",
    }


def _rank_record(run: RunFile, common: Record, summary: AttemptSummary, rank: RankSummary) -> dict[str, Any]:
    return {
        **_of_one_rank(common, rank, str(run.get("peak_kind")), f"rank{rank.rank}"),
        "peak_bytes": rank.peak_bytes,
        "baseline_bytes": common.get("baseline_bytes") if rank.baseline_bytes is None else rank.baseline_bytes,
        "peak_source": rank.peak_source,
        **_lower_bound("peak_bytes" in (rank.at_least or ())),
        "predicted_bytes": _at_stage(run.get("predicted_bytes"), rank.pipeline_rank),
        "observed": _observed(summary, rank),
    }


def _of_one_rank(common: Record, rank: RankSummary, kind: str, name: str) -> dict[str, Any]:
    record = {
        **common,
        **_identity(common, name, kind, rank.pipeline_rank),
        "started_at": rank.started_at,
        "node": rank.node,
        "global_rank": rank.rank,
        "gpu_uuid": rank.gpu_uuid,
    }
    if record.get("gpu") is None:
        record["gpu"] = rank.gpu_name
    return record


def _lower_bound(lost: bool) -> dict[str, Any]:
    """Return the mark of a peak that may have been higher, because whoever saw it was `lost` before the end."""
    return {"peak_at_least": True} if lost else {}


def _observed(summary: AttemptSummary, rank: RankSummary) -> dict[str, Any]:
    """Return everything else that is known of the rank, each number with its source; what is not known is left out."""
    of_rank = {name: value for name, value in vars(rank).items() if value is not None and name not in ELSEWHERE}
    of_run = {name: getattr(summary, name) for name in ("steps_run", "step_seconds", "tokens_per_second")}
    return {**of_rank, **{name: value for name, value in of_run.items() if value is not None}}


def _stage_records(run: RunFile, common: Record, summary: AttemptSummary) -> list[dict[str, Any]]:
    """Return for each pipeline rank what torch's allocator held at most, by either of its counters."""
    by_stage: dict[int, list[RankSummary]] = {}
    for rank in summary.ranks:
        if rank.pipeline_rank is not None:
            by_stage.setdefault(rank.pipeline_rank, []).append(rank)
    pairs = [(stage, kind) for stage in sorted(by_stage) for kind in ALLOCATOR]
    records = [_stage_record(run, common, summary, kind, by_stage[stage]) for stage, kind in pairs]
    return [record for record in records if record is not None]


def _stage_record(
    run: RunFile, common: Record, summary: AttemptSummary, kind: str, ranks: Iterable[RankSummary]
) -> dict[str, Any] | None:
    """Return the worst global rank's record, None if the peak of no rank is known."""
    statistic, name = ALLOCATOR[kind]
    peaks = [(getattr(rank, name), rank) for rank in ranks if getattr(rank, name) is not None]
    if not peaks:
        return None
    sizes = [peak for peak, _ in peaks]
    most, worst = max(peaks, key=lambda peak: (peak[0], -peak[1].rank))
    return {
        **_of_one_rank(common, worst, kind, f"stage{worst.pipeline_rank}"),
        "peak_bytes": most,
        "allocator_statistic": statistic,
        "repeats": {
            "count": len(sizes),
            "min_bytes": min(sizes),
            "max_bytes": max(sizes),
            "what": "ranks of one stage",
        },
        "peak_source": worst.sources.get(name),
        **_lower_bound(name in (worst.at_least or ())),
        "predicted_bytes": _at_stage(_predicted_of_kind(run, kind), worst.pipeline_rank),
        "observed": _observed(summary, worst),
    }


def _host_record(run: RunFile, common: Record, node: NodeSummary) -> dict[str, Any]:
    record = {
        **common,
        **_identity(common, node.node, "host"),
        "peak_bytes": node.host_peak_bytes,
        "node": node.node,
        "peak_source": node.host_peak_source,
        **_lower_bound(not node.ended),
        "predicted_bytes": byte_count(_predicted_of_kind(run, "host")),
    }
    if node.host_total_bytes is not None:
        record["host_memory_bytes"] = node.host_total_bytes
    if isinstance(run.get("devices_per_node"), int):
        record["devices_per_node"] = run["devices_per_node"]
    return record


def _predicted_of_kind(run: RunFile, kind: str) -> Any:
    """Return what run.json predicts of another kind than its own. Older run directories do not have it."""
    predictions = run.get("predicted_by_kind")
    return predictions.get(kind) if isinstance(predictions, Mapping) else None


def _at_stage(predicted: Any, pipeline_rank: int | None) -> int | None:
    if pipeline_rank is None or not isinstance(predicted, list) or pipeline_rank >= len(predicted):
        return None
    return byte_count(predicted[pipeline_rank])


def _why_none(run: RunFile, summary: AttemptSummary) -> str:
    attempt, nodes = summary.attempt, summary.nodes
    if not summary.ranks and not nodes:
        return f"attempt {attempt} started no trainer and no monitor"
    if run.get("peak_kind") == "resident":
        return f"no rank of attempt {attempt} left its resident peak"
    if not nodes:
        return f"the monitors of attempt {attempt} wrote nothing"
    remarks = [f"{node.node}: {remark}" for node in nodes for remark in node.remarks]
    if remarks:
        return "; ".join(remarks[:3])
    if not any(node.gpus for node in nodes):
        return f"the monitors of attempt {attempt} saw no GPU"
    if not summary.ranks:
        return f"no rank of attempt {attempt} left a record, so no GPU can be given to one"
    return f"the driver named none of the processes of attempt {attempt}, and the job did not have whole nodes"


def oom_records(
    run: RunFile,
    run_id: str,
    attempt: str,
    ranks: Sequence[Record],
    causes: Sequence[Record],
    measured: Sequence[Record],
    state: str,
) -> list[dict[str, Any]]:
    """Return one record of kind `oom` for each rank whose GPU was full, and one of kind `host_oom` for each node whose
    main memory was. Neither has bytes, because neither tells what was needed.

    `run` is the run.json of the layout the attempt ran, `ranks` its rank records, `causes` those of its nodes,
    `measured` the attempt's records of peaks, which know the GPU of each rank. The message is kept in `line` and
    `numbers`.
    """
    common = _common(run, run_id, attempt, state)
    records = []
    for cause in causes:
        if cause.get("kind") == "oom":
            records += [_oom_record(run, common, ranks, cause, death, measured) for death in _deaths(cause)]
        elif cause.get("kind") == "host_oom":
            identity = _identity(common, str(cause.get("node")), "host_oom")
            of_node = {"started_at": None, "global_rank": cause.get("rank")}
            records.append({**common, **identity, **of_node, **_message(cause, cause)})
    return records


def _deaths(cause: Record) -> list[Record]:
    listed = cause.get("ranks")
    ranks = [rank for rank in listed if isinstance(rank, Mapping)] if isinstance(listed, list) else []
    return ranks or [cause]


def _oom_record(
    run: RunFile, common: Record, ranks: Sequence[Record], cause: Record, death: Record, measured: Sequence[Record]
) -> dict[str, Any]:
    rank = death.get("rank") if type(death.get("rank")) is int else None
    stage = None if rank is None else pipeline_rank_of(run, rank)
    peak: Record = next((r for r in measured if r.get("global_rank") == rank), {}) if rank is not None else {}
    rank_record: Record = next((r for r in ranks if r.get("rank") == rank), {})
    record = {
        **common,
        **_identity(common, f"rank{rank}" if rank is not None else str(cause.get("node")), "oom", stage),
        "started_at": time_or_none(rank_record.get("started_at")),
        "global_rank": rank,
        "gpu_uuid": peak.get("gpu_uuid"),
        "baseline_bytes": peak.get("baseline_bytes"),
        "predicted_bytes": _at_stage(run.get("predicted_bytes"), stage),
        **_message(cause, death),
    }
    if record.get("gpu") is None:
        record["gpu"] = peak.get("gpu")
    return record


def _message(cause: Record, death: Record) -> dict[str, Any]:
    numbers = death.get("numbers")
    return {
        "peak_bytes": None,
        "node": cause.get("node"),
        "peak_source": "message",
        "line": str(death.get("line") or ""),
        "numbers": dict(numbers) if isinstance(numbers, Mapping) else {},
    }
