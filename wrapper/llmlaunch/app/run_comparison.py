"""The predictions of one run compared with its measurements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MEASURED_KINDS = ("allocated", "reserved")  # peaks of torch's allocator, in addition to the run's own kind

Record = dict[str, Any]


def compared(
    plan: Mapping[str, Any], memory: Mapping[str, Any], pace: float | None, tokens_of_a_device: float | None
) -> list[Record]:
    """Return prediction and measurement for everything that has at least one of them. `pace` is the measured seconds
    per step, and `tokens_of_a_device` the tokens of one device per step."""
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
