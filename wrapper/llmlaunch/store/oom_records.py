"""Ranks and nodes that ran out of memory, as measurement records. Pure: no database, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmlaunch.peaks.stages import pipeline_rank_of
from llmlaunch.peaks.values import time_or_none
from llmlaunch.store.run_records import predicted_bytes_of

__all__ = ["oom_records"]

Record = Mapping[str, Any]


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
            made += [_of_rank(run, run_id, attempt, ranks, cause, one, measured, state) for one in _each(cause)]
        elif cause.get("kind") == "host_oom":
            made.append(_of_node(run, run_id, attempt, cause, state))
    return made


def _each(cause: Record) -> list[Record]:
    listed = cause.get("ranks")
    each = [one for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []
    return each or [cause]


def _of_rank(
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
        **_common(run_id, attempt, cause, one, state),
    )
    if record.get("gpu") is None:
        record["gpu"] = known.get("gpu")
    return record


def _of_node(run: Record, run_id: str, attempt: str, cause: Record, state: str) -> dict[str, Any]:
    record = _template(run)
    record.update(
        id=f"{run_id}/{attempt}/{cause.get('node')}/host_oom",
        peak_kind="host_oom",
        pipeline_rank=None,
        rank_scope="unknown",
        started_at=None,
        global_rank=cause.get("rank"),
        **_common(run_id, attempt, cause, cause, state),
    )
    return record


def _template(run: Record) -> dict[str, Any]:
    template = run.get("measurement")
    return dict(template) if isinstance(template, Mapping) else {}


def _common(run_id: str, attempt: str, cause: Record, one: Record, state: str) -> dict[str, Any]:
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
