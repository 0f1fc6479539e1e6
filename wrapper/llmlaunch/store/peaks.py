"""`peaks/<node>.jsonl` read back: what the monitors saw, per attempt and node (docs/run-directory.md).

Monitors die, hang and run out of disk, so every line is taken for itself: a torn one is skipped, and a missing `end`
costs nothing but the last seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["GpuPeaks", "NodePeaks", "Peaks", "byte_count", "read_peaks", "time_or_none"]

_INT64 = 2**63


@dataclass
class GpuPeaks:
    """One GPU of a node over one attempt. The peaks by process are keyed by pid as text, as the file has them."""

    uuid: str
    pci: str
    index: int
    name: str | None = None
    total_bytes: int | None = None
    reserved_bytes: int | None = None
    baseline_bytes: int | None = None
    device_peak_bytes: int | None = None
    process_peak_bytes: dict[str, int] = field(default_factory=dict)
    accounting_peak_bytes: dict[str, int] = field(default_factory=dict)


@dataclass
class NodePeaks:
    """One node over one attempt. `remarks` say what the monitor could not see; `ended` is false where it was lost."""

    attempt: str
    node: str
    gpus: dict[str, GpuPeaks] = field(default_factory=dict)
    resident_peak_bytes: dict[int, int] = field(default_factory=dict)  # by global rank
    rank_pids: dict[int, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    ended: bool = False


Peaks = Mapping[tuple[str, str], NodePeaks]  # (attempt, node)


def read_peaks(paths: Iterable[Path]) -> tuple[Peaks, tuple[str, ...]]:
    """All monitors' files of a run, and a sentence for each file that cannot be read.

    Peaks are cumulative, yet the largest over all lines is kept: a monitor that was started again in mid-attempt
    counts from nothing. The baseline is the first one seen, for the same reason.
    """
    found: dict[tuple[str, str], NodePeaks] = {}
    problems = []
    for path in paths:
        try:
            for line in _lines(path):
                attempt = line.get("attempt")
                node = line.get("node", path.stem)
                if isinstance(attempt, str) and isinstance(node, str):
                    _take(found.setdefault((attempt, node), NodePeaks(attempt, node)), line)
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
    return found, tuple(problems)


def byte_count(value: object) -> int | None:
    """A whole number of bytes that a database holds, else None."""
    return value if type(value) is int and 0 <= value < _INT64 else None


def time_or_none(value: object) -> float | None:
    """Unix seconds, else None."""
    return value if isinstance(value, int | float) and 0 < value < 1e11 else None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for raw in file:
            try:
                line = json.loads(raw)
            except (ValueError, RecursionError):
                continue
            if isinstance(line, dict):
                yield line


def _take(node: NodePeaks, line: Mapping[str, Any]) -> None:
    event = line.get("event")
    for gpu in [*_objects(line.get("gpus")), *_objects([line.get("gpu")])]:  # `gpu`: the last word on a lost one
        _take_gpu(node, gpu)
    for process in _objects(line.get("processes")):
        _take_process(node, process)
    node.ended = node.ended or event == "end"
    remark = _remark(event, line)
    if remark and remark not in node.remarks:
        node.remarks.append(remark)


def _take_gpu(node: NodePeaks, seen: Mapping[str, Any]) -> None:
    uuid, index = seen.get("uuid"), seen.get("index")
    if not isinstance(uuid, str):
        return
    gpu = node.gpus.get(uuid)
    if gpu is None:
        order = index if type(index) is int else len(node.gpus)
        gpu = node.gpus[uuid] = GpuPeaks(uuid, str(seen.get("pci") or ""), order)
    gpu.name = gpu.name or (seen["name"] if isinstance(seen.get("name"), str) else None)
    gpu.total_bytes = gpu.total_bytes or byte_count(seen.get("total_bytes"))
    if gpu.reserved_bytes is None:
        gpu.reserved_bytes = byte_count(seen.get("reserved_bytes"))
    if gpu.baseline_bytes is None:
        gpu.baseline_bytes = _within(gpu, seen.get("baseline_bytes"))
    gpu.device_peak_bytes = _larger(gpu.device_peak_bytes, _within(gpu, seen.get("device_peak_bytes")))
    for name, kept in (
        ("process_peak_bytes", gpu.process_peak_bytes),
        ("accounting_peak_bytes", gpu.accounting_peak_bytes),
    ):
        by_pid = seen.get(name)
        for pid, value in by_pid.items() if isinstance(by_pid, dict) else ():
            count = _within(gpu, value)
            if count:
                kept[pid] = max(count, kept.get(pid, 0))


def _take_process(node: NodePeaks, seen: Mapping[str, Any]) -> None:
    rank, pid = seen.get("rank"), seen.get("pid")
    if type(rank) is not int:
        return
    if type(pid) is int:
        node.rank_pids[rank] = str(pid)
    peak = _larger(byte_count(seen.get("resident_peak_bytes")), byte_count(seen.get("resident_bytes")))
    if peak:
        node.resident_peak_bytes[rank] = max(peak, node.resident_peak_bytes.get(rank, 0))


def _remark(event: object, line: Mapping[str, Any]) -> str | None:
    if event == "no_nvml":
        return f"NVML did not answer ({line.get('why')})"
    if event == "gpu_skipped":
        return f"GPU {line.get('index')} could not be opened (NVML code {line.get('code')})"
    if event == "gpu_lost":
        gpu = line.get("gpu")
        return f"GPU {gpu.get('uuid') if isinstance(gpu, dict) else '?'} was lost"
    return "NVML stopped answering for a while" if event == "nvml_stalled" else None


def _within(gpu: GpuPeaks, value: object) -> int | None:
    """More than the device has is no measurement: interposers have returned 17 TiB (Project-HAMi/HAMi issue 1181)."""
    count = byte_count(value)
    return None if count is None or (gpu.total_bytes and count > gpu.total_bytes) else count


def _larger(one: int | None, other: int | None) -> int | None:
    return max((v for v in (one, other) if v is not None), default=None)


def _objects(values: object) -> Iterator[Mapping[str, Any]]:
    if isinstance(values, list):
        yield from (value for value in values if isinstance(value, dict))
