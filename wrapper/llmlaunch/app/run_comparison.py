"""Predictions beside measurements: of one run, and of all runs of the store."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from llmlaunch.app.messages import Notify
from llmlaunch.errors import UserError

MOST_STORED = 1000  # other runs, the newest
MEASURED_KINDS = ("allocated", "reserved")  # of torch's allocator, beside the run's own kind

Record = dict[str, Any]


def compared(
    plan: Mapping[str, Any], memory: Mapping[str, Any], pace: float | None, tokens_of_a_device: float | None
) -> list[Record]:
    """Return prediction beside measurement of all that has one of them. `pace` is the measured seconds of a step,
    `tokens_of_a_device` its tokens of a step."""
    kind = plan["peak_kind"] or "device"
    worst = max((stage["peak_bytes"] for stage in memory["stages"]), default=None)
    predicted = max((size for size in plan["predicted_bytes"] if size is not None), default=None)
    rows = [_row(f"{kind} memory", "bytes", predicted, worst)]
    for name in MEASURED_KINDS:
        if memory["kinds"].get(name) is not None:
            rows.append(_row(f"{name} memory", "bytes", plan["predicted_by_kind"][name], memory["kinds"][name]))
    if memory["kinds"].get("host") is not None:
        rows.append(_row("host memory of a node", "bytes", plan["host_bytes_per_node"], memory["kinds"]["host"]))
    rows.append(_row("step time", "seconds", plan["step_seconds"], pace))
    rate = tokens_of_a_device / pace if tokens_of_a_device and pace else None
    rows.append(_row("throughput of a device", "tokens/s", plan["tokens_per_second_per_device"], rate))
    return [row for row in rows if row["predicted"] is not None or row["measured"] is not None]


def _row(name: str, unit: str, predicted: float | None, measured: float | None) -> Record:
    error = predicted / measured - 1.0 if predicted and measured else None
    return {"name": name, "unit": unit, "predicted": predicted, "measured": measured, "error": error}


def stored_peaks(run_id: str | None, notify: Notify, missing: list[str]) -> Record:
    """Return predicted and measured peaks of the store's runs, this one marked; a sentence to `missing` where there
    are none."""
    from llmlaunch.store.location import existing_store, short_wait_seconds

    nothing: Record = {"runs": 0, "mean_absolute_error": None, "points": []}
    location = existing_store()
    if location is None:
        missing.append("There is no store yet, so there are no other runs to compare with.")
        return nothing
    from llmlaunch.store.collect import open_collected
    from llmlaunch.store.runs import list_runs

    try:
        with open_collected(notify, short_wait_seconds(location)) as store:
            listed = list_runs(store)
    except UserError as failure:
        missing.append(f"The store cannot be read, so there are no other runs to compare with: {failure}")
        return nothing
    both = [run for run in listed if run.predicted_bytes and run.measured_bytes][:MOST_STORED]
    if not both:
        missing.append("No run of the store has both a predicted and a measured peak yet.")
        return nothing
    errors = [abs((run.predicted_bytes or 0) / (run.measured_bytes or 1) - 1.0) for run in both]
    points = [
        {
            "run_id": run.run_id,
            "recipe": run.recipe,
            "peak_kind": run.peak_kind,
            "predicted_bytes": run.predicted_bytes,
            "measured_bytes": run.measured_bytes,
            "this": run.run_id == run_id,
        }
        for run in both
    ]
    return {"runs": len(both), "mean_absolute_error": statistics.fmean(errors), "points": points}
