"""How a run ended, for a person: how far it got, and what was predicted of it beside what was measured."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import Any

from llmlaunch.report.text import one_line, signed_percent, table
from llmlaunch.rundir.values import counted, number, whole_number
from llmlaunch.units import gib

_MOST_PEAKS = 6  # more rows would push the summary off a screen of 24 lines

Record = Mapping[str, Any]


def outcome_lines(
    plan: Record, run: Record, status: Record, records: Sequence[Record], early: Collection[str] = ()
) -> list[str]:
    """Return how far a run got, where its checkpoints lie, and its step time, rate and fullest memory as predicted and
    as measured. `plan` and `run` are plan.json and run.json of the layout it ran last, `status` is status.json, and
    `records` are its measurements; what none of them says is left out. `early` names the attempts that ended before
    their first step: what they held is no peak that was predicted."""
    newest = _newest(records)
    peaks = [record for record in newest if record.get("attempt") not in early]
    rows = [row for row in (_step_row(plan, newest), _rate_row(plan, run, newest), _memory_row(plan, peaks)) if row]
    lines = [_progress_line(run, status), _checkpoint_line(run, status)]
    return lines + (
        ["", table(["", "predicted", "measured", "error"], rows, remarks=_limits(plan, rows))] if rows else []
    )


def _progress_line(run: Record, status: Record) -> str:
    step, steps = whole_number(status.get("step")), whole_number(_mapping(run, "progress").get("steps"))
    text = "Steps: none on record" if step is None else f"Steps: {step:,}" + (f" of {steps:,}" if steps else "")
    restarts = whole_number(status.get("restarts"))
    return text + (f", {counted(restarts, 'restart')}" if restarts else "")


def _checkpoint_line(run: Record, status: Record) -> str:
    checkpoint = _mapping(run, "checkpoint")
    folder = checkpoint.get("path") or checkpoint.get("folder")
    if not checkpoint:
        return "Checkpoints: none, the recipe names no folder for them (training.checkpoint_path)"
    saved = whole_number(status.get("saved_step"))
    last = f", the last of step {saved:,}" if saved else ", none was saved yet"
    return f"Checkpoints: {one_line(str(folder))}{last}"


def _step_row(plan: Record, records: Sequence[Record]) -> list[str] | None:
    predicted = number(plan.get("step_seconds"))
    measured = _median(record.get("step_seconds") for record in _newest(records))
    return _row("seconds per step", predicted, measured, lambda value: f"{value:.3g}")


def _rate_row(plan: Record, run: Record, records: Sequence[Record]) -> list[str] | None:
    """The tokens per second of a device, at the median seconds of a step."""
    predicted = number(plan.get("tokens_per_second_per_gpu"))
    tokens = whole_number(_mapping(run, "progress").get("tokens_per_step"))
    ranks = _median(record.get("world_size") for record in _newest(records))
    seconds = _median(record.get("step_seconds") for record in _newest(records))
    measured = tokens / seconds / ranks if tokens and seconds and ranks else None
    return _row("tokens/s per device", predicted, measured, lambda value: f"{value:,.0f}")


def _memory_row(plan: Record, records: Sequence[Record]) -> list[str] | None:
    kind = str(_mapping(plan, "memory").get("peak_kind") or "device")
    peaks = [
        record for record in _newest(records) if record.get("peak_kind") == kind and number(record.get("peak_bytes"))
    ]
    if not peaks:
        return None
    fullest = max(peaks, key=lambda record: float(record["peak_bytes"]))
    predicted, measured = number(fullest.get("predicted_bytes")), number(fullest.get("peak_bytes"))
    name = f"GiB, fullest rank ({kind})" + (", at least" if fullest.get("peak_at_least") else "")
    return _row(name, predicted, measured, gib)


def _row(name: str, predicted: float | None, measured: float | None, shown: Any) -> list[str] | None:
    if measured is None:
        return None
    if not predicted:
        return [name, "-", shown(measured), "-"]
    return [name, shown(predicted), shown(measured), signed_percent(predicted / measured - 1.0)]


def _limits(plan: Record, rows: Sequence[Sequence[str]]) -> list[str]:
    """The remark beside each row: the limit beside the memory."""
    limit = number(_mapping(plan, "memory").get("limit_bytes"))
    return [f"limit {gib(limit)}" if limit and row[0].startswith("GiB") else "" for row in rows]


def peaks_text(records: Sequence[Record], peak_kind: str, early: Collection[str] = ()) -> str:
    """Return a table with a row for each measured peak, those of the plan's kind and the largest first; predictions
    are of the layout that its attempt ran. Those of the attempts `early`, which ended before their first step, have no
    prediction beside them."""
    attempts = list(dict.fromkeys(record.get("attempt") for record in records))
    peaks = [record for record in records if record.get("peak_bytes") is not None]
    peaks.sort(key=lambda record: (record.get("peak_kind") != peak_kind, -float(record["peak_bytes"])))
    rows = []
    for record in peaks[:_MOST_PEAKS]:
        measured, predicted = record["peak_bytes"], record.get("predicted_bytes")
        figures = ["-", gib(measured), "-"]
        if predicted is not None and record.get("attempt") not in early:
            figures = [gib(predicted), gib(measured), signed_percent(predicted / measured - 1)]
        owner = _owner(record) + (", at least" if record.get("peak_at_least") else "")
        if len(attempts) > 1:
            owner = f"attempt {attempts.index(record.get('attempt')) + 1}, {owner}"
        rows.append([owner, record["peak_kind"], *figures])
    more = f"\n  and {len(peaks) - _MOST_PEAKS} more" if len(peaks) > _MOST_PEAKS else ""
    head = ["", "kind", "predicted GiB", "measured GiB", "error"]
    if any(record.get("attempt") in early for record in peaks):
        more += "\nWithout a prediction: measured before the first step, so it is no peak to compare."
    return "Memory, predicted against measured\n" + table(head, rows) + more


def _owner(record: Record) -> str:
    """Return whose peak it is: a node's of main memory, else the worst rank's of a pipeline rank."""
    if record.get("global_rank") is None:
        return f"node {record.get('node')}"
    return f"rank {record.get('global_rank')} on {record.get('node')} (stage {record.get('pipeline_rank')})"


def _newest(records: Sequence[Record]) -> list[Record]:
    """The records of the attempt that began last."""
    last = max(records, key=lambda record: number(record.get("started_at")) or 0.0, default=None)
    return [record for record in records if last is not None and record.get("attempt") == last.get("attempt")]


def _median(values: Any) -> float | None:
    numbers = [known for value in values if (known := number(value)) is not None]
    return median(numbers) if numbers else None


def _mapping(record: Record, name: str) -> Record:
    value = record.get(name)
    return value if isinstance(value, Mapping) else {}
