"""One attempt of a run as measurement records, and in words why it has none. Pure: no database, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmlaunch.rundir.peak_account import pipeline_rank_of
from llmlaunch.rundir.summary import AttemptSummary, NodeSummary, RankSummary
from llmlaunch.rundir.values import byte_count, time_or_none

__all__ = ["AttemptRecords", "oom_records", "predicted_bytes_of", "records_of"]


Record = Mapping[str, Any]

# kind of peak -> the counter of torch's caching allocator, and what a rank's account calls it
ALLOCATOR = {
    "allocated": ("allocated_bytes.all.peak", "allocated_peak_bytes"),
    "reserved": ("reserved_bytes.all.peak", "reserved_peak_bytes"),
}
ELSEWHERE = ("rank", "node", "pipeline_rank", "started_at", "peak_bytes", "peak_source")  # at the top of the record


@dataclass(frozen=True)
class AttemptRecords:
    """The measurement records of one attempt; `why_none` is a sentence where no rank has one of the run's own kind."""

    records: tuple[dict[str, Any], ...]
    why_none: str | None


def records_of(run: Record, run_id: str, summary: AttemptSummary, state: str) -> AttemptRecords:
    """One record per global rank whose peak of the run's own kind is known, two per pipeline rank of what torch's
    allocator held, one per node of its main memory.

    `run` is the run.json of the layout the attempt ran, `state` what became of it: the peak of a failed run is what it
    reached, not what it needs.
    """
    common = _common(run, run_id, summary, state)
    ranks = [_of_rank(run, common, summary, one) for one in summary.ranks if one.peak_bytes is not None]
    stages = _of_stages(run, common, summary)
    hosts = [_of_node(run, common, node) for node in summary.nodes if node.host_peak_bytes is not None]
    return AttemptRecords((*ranks, *stages, *hosts), None if ranks else _why_none(run, summary))


def _common(run: Record, run_id: str, summary: AttemptSummary, state: str) -> dict[str, Any]:
    """What all records of an attempt have: the template of run.json, and which run it was."""
    template = run.get("measurement")
    record: dict[str, Any] = dict(template) if isinstance(template, Mapping) else {}
    record.update(schema=1, run_id=run_id, attempt=summary.attempt, run_state=state)
    if summary.step_seconds is not None:
        record["step_seconds"] = summary.step_seconds
    if run.get("calibration_id") is not None:
        record["calibration_id"] = run["calibration_id"]
    return record


def _of_rank(run: Record, common: Record, summary: AttemptSummary, rank: RankSummary) -> dict[str, Any]:
    kind = str(run.get("peak_kind"))
    return {
        **_of_one(common, rank, kind, f"rank{rank.rank}"),
        "peak_bytes": rank.peak_bytes,
        "baseline_bytes": rank.baseline_bytes,
        "peak_source": rank.peak_source,
        "predicted_bytes": predicted_bytes_of(run, rank.pipeline_rank),
        "observed": _observed(summary, rank),
    }


def _of_one(common: Record, rank: RankSummary, kind: str, name: str) -> dict[str, Any]:
    record = {
        **common,
        "id": f"{common['run_id']}/{common['attempt']}/{name}/{kind}",
        "peak_kind": kind,
        "pipeline_rank": rank.pipeline_rank,
        "rank_scope": "stage" if rank.pipeline_rank is not None else "unknown",
        "started_at": rank.started_at,
        "node": rank.node,
        "global_rank": rank.rank,
        "gpu_uuid": rank.gpu_uuid,
    }
    if record.get("gpu") is None:
        record["gpu"] = rank.gpu_name
    return record


def _observed(summary: AttemptSummary, rank: RankSummary) -> dict[str, Any]:
    """All that is known of the rank beside its peak, each number with its source; what nobody saw is left out."""
    seen = {name: value for name, value in vars(rank).items() if value is not None and name not in ELSEWHERE}
    run = {name: getattr(summary, name) for name in ("steps_run", "step_seconds", "tokens_per_second")}
    return {**seen, **{name: value for name, value in run.items() if value is not None}}


def _of_stages(run: Record, common: Record, summary: AttemptSummary) -> list[dict[str, Any]]:
    """Of each pipeline rank what torch's allocator held at most, by either of its counters."""
    by_stage: dict[int, list[RankSummary]] = {}
    for rank in summary.ranks:
        if rank.pipeline_rank is not None:
            by_stage.setdefault(rank.pipeline_rank, []).append(rank)
    made = [_of_stage(run, common, summary, kind, by_stage[stage]) for stage in sorted(by_stage) for kind in ALLOCATOR]
    return [record for record in made if record is not None]


def _of_stage(
    run: Record, common: Record, summary: AttemptSummary, kind: str, ranks: Iterable[RankSummary]
) -> dict[str, Any] | None:
    """The worst global rank's; None where nobody saw any."""
    statistic, name = ALLOCATOR[kind]
    peaks = [(getattr(rank, name), rank) for rank in ranks if getattr(rank, name) is not None]
    if not peaks:
        return None
    bytes_ = [peak for peak, _ in peaks]
    most, worst = max(peaks, key=lambda one: (one[0], -one[1].rank))
    return {
        **_of_one(common, worst, kind, f"stage{worst.pipeline_rank}"),
        "peak_bytes": most,
        "allocator_statistic": statistic,
        "repeats": {
            "count": len(bytes_),
            "min_bytes": min(bytes_),
            "max_bytes": max(bytes_),
            "what": "ranks of one stage",
        },
        "peak_source": worst.sources.get(name),
        "predicted_bytes": _of_stage_list(_predicted(run, kind), worst.pipeline_rank),
        "observed": _observed(summary, worst),
    }


def _of_node(run: Record, common: Record, node: NodeSummary) -> dict[str, Any]:
    record = {
        **common,
        "id": f"{common['run_id']}/{common['attempt']}/{node.node}/host",
        "peak_kind": "host",
        "peak_bytes": node.host_peak_bytes,
        "pipeline_rank": None,
        "rank_scope": "unknown",
        "node": node.node,
        "peak_source": node.host_peak_source,
        "predicted_bytes": byte_count(_predicted(run, "host")),
    }
    if node.host_total_bytes is not None:
        record["host_memory_bytes"] = node.host_total_bytes
    return record


def predicted_bytes_of(run: Record, pipeline_rank: int | None) -> int | None:
    """Of the run's own kind of peak."""
    return _of_stage_list(run.get("predicted_bytes"), pipeline_rank)


def _predicted(run: Record, kind: str) -> Any:
    """What run.json says of another kind; those rendered before it did say nothing."""
    said = run.get("predicted_by_kind")
    return said.get(kind) if isinstance(said, Mapping) else None


def _of_stage_list(predicted: Any, pipeline_rank: int | None) -> int | None:
    if pipeline_rank is None or not isinstance(predicted, list) or pipeline_rank >= len(predicted):
        return None
    return byte_count(predicted[pipeline_rank])


def _why_none(run: Record, summary: AttemptSummary) -> str:
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
    run: Record,
    run_id: str,
    attempt: str,
    ranks: Sequence[Record],
    causes: Sequence[Record],
    measured: Sequence[Record],
    state: str,
) -> list[dict[str, Any]]:
    """One record of kind `oom` for each rank whose GPU was full, and one of kind `host_oom` for each node whose main
    memory was; both without bytes, since neither says what was needed.

    `run` is the run.json of the layout the attempt ran, `causes` those of its nodes, `measured` the attempt's records
    of peaks, which know the GPU of each rank. What the message said is kept in `line` and `numbers`.
    """
    made = []
    for cause in causes:
        if cause.get("kind") == "oom":
            made += [_oom_of_rank(run, run_id, attempt, ranks, cause, one, measured, state) for one in _each(cause)]
        elif cause.get("kind") == "host_oom":
            made.append(_oom_of_node(run, run_id, attempt, cause, state))
    return made


def _each(cause: Record) -> list[Record]:
    listed = cause.get("ranks")
    each = [one for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []
    return each or [cause]


def _oom_of_rank(
    run: Record,
    run_id: str,
    attempt: str,
    ranks: Sequence[Record],
    cause: Record,
    one: Record,
    measured: Sequence[Record],
    state: str,
) -> dict[str, Any]:
    record = _template(run)
    rank = one.get("rank") if type(one.get("rank")) is int else None
    pipeline_rank = None if rank is None else pipeline_rank_of(run, rank)
    known: Record = next((peak for peak in measured if peak.get("global_rank") == rank), {}) if rank is not None else {}
    started: Record = next((own for own in ranks if own.get("rank") == rank), {})
    who = f"rank{rank}" if rank is not None else str(cause.get("node"))
    record.update(
        id=f"{run_id}/{attempt}/{who}/oom",
        peak_kind="oom",
        pipeline_rank=pipeline_rank,
        rank_scope="stage" if pipeline_rank is not None else "unknown",
        started_at=time_or_none(started.get("started_at")),
        global_rank=rank,
        gpu_uuid=known.get("gpu_uuid"),
        baseline_bytes=known.get("baseline_bytes"),
        predicted_bytes=predicted_bytes_of(run, pipeline_rank),
        **_oom_fields(run_id, attempt, cause, one, state),
    )
    if record.get("gpu") is None:
        record["gpu"] = known.get("gpu")
    return record


def _oom_of_node(run: Record, run_id: str, attempt: str, cause: Record, state: str) -> dict[str, Any]:
    record = _template(run)
    record.update(
        id=f"{run_id}/{attempt}/{cause.get('node')}/host_oom",
        peak_kind="host_oom",
        pipeline_rank=None,
        rank_scope="unknown",
        started_at=None,
        global_rank=cause.get("rank"),
        **_oom_fields(run_id, attempt, cause, cause, state),
    )
    return record


def _template(run: Record) -> dict[str, Any]:
    template = run.get("measurement")
    return dict(template) if isinstance(template, Mapping) else {}


def _oom_fields(run_id: str, attempt: str, cause: Record, one: Record, state: str) -> dict[str, Any]:
    numbers = one.get("numbers")
    return {
        "peak_bytes": None,
        "schema": 1,
        "run_id": run_id,
        "attempt": attempt,
        "run_state": state,
        "node": cause.get("node"),
        "peak_source": "message",
        "line": str(one.get("line") or ""),
        "numbers": dict(numbers) if isinstance(numbers, Mapping) else {},
    }
