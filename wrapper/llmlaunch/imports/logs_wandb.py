"""What W&B keeps of a run: its history and system metrics as JSON Lines or CSV, and its summary.

The keys of system metrics are `gpu.N.memoryAllocatedBytes` and, in percent of the card, `gpu.N.memoryAllocated`, after
`system.` or `system/`: NVML's answer for the whole device (xpu/src/gpu_nvidia.rs), every 15 seconds or less often, so
the highest of them is a lower bound of the device's peak. A chart that is exported from the web has columns
`RUN - KEY`, `RUN - KEY__MIN` and `RUN - KEY__MAX`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from llmlaunch.command_lines.training_log import LogCollector, LoggedPeak
from llmlaunch.documents.yaml_strict import parse_document
from llmlaunch.frameworks.deepspeed.transformers_log import read_results
from llmlaunch.frameworks.megatron.training_log import five_digits
from llmlaunch.rundir.files import parse_json
from llmlaunch.rundir.foreign_values import number_in
from llmlaunch.rundir.values import number

WANDB = "W&B"
_DEVICE = re.compile(r"(?:system[./])?gpu\.(?P<gpu>\d+)\.memoryAllocated(?P<bytes>Bytes)?(?:/l:.*)?")
_SAMPLED = "sampled, so the peak was this or more"
_NVML = "W&B system metrics, NVML"
_TORCH = "W&B history, torch.cuda.memory_stats"
# key in the history -> kind of peak, statistic, bytes in its unit
_PEAKS = {
    "mem-max-allocated-bytes": ("allocated", 1.0),
    "mem-max-reserved-bytes": ("reserved", 1.0),
    "memory/mem-max-allocated-gigabytes": ("allocated", 1e9),
    "memory/mem-max-reserved-gigabytes": ("reserved", 1e9),
}
_STEP_SECONDS = ("iteration-time",)  # Megatron-LM's, of one iteration
_STEP = "train/global_step"  # the Trainer's
_TIMES = ("_runtime", "_timestamp")
_OWN_KEYS = ("_step", *_TIMES)
_CHART_COLUMN = re.compile(r"(?:(?P<run>.+) - )?(?P<key>.+?)(?:__(?P<bound>MIN|MAX))?")
MOST_COLUMNS = 2000


def is_history(row: Mapping[str, Any]) -> bool:
    """Return whether a JSON object is a row of W&B's history or of its system metrics."""
    return any(key in row for key in _OWN_KEYS) and "log_history" not in row


def is_summary(document: Mapping[str, Any]) -> bool:
    """Return whether a JSON object is W&B's summary of a run."""
    return "_wandb" in document or is_history(document)


def is_chart(columns: Sequence[str]) -> bool:
    """Return whether these are the columns of a CSV export."""
    matches = [_CHART_COLUMN.fullmatch(column) for column in columns[:MOST_COLUMNS]]
    keys = {match["key"] for match in matches if match is not None}
    known = {*_OWN_KEYS, *_PEAKS, *_STEP_SECONDS, _STEP, "Step", "Relative Time (Process)"}
    return bool(keys & known) or any(_DEVICE.fullmatch(key) for key in keys)


class _Rows:
    """Reader of the rows of one run."""

    def __init__(self, collector: LogCollector) -> None:
        self._collector = collector
        self._last: tuple[float, float] | None = None  # step and time
        collector.printed_by.add(WANDB)

    def read(self, row: Mapping[str, Any], line: int) -> None:
        collector = self._collector
        for key, value in row.items():
            size = number(value)
            if size:
                self._read_peak(key, size, line)
        for key in _STEP_SECONDS:
            seconds = number(row.get(key))
            if seconds:
                step = number(row.get("_step"))
                collector.add_step(seconds, line, None if step is None else int(step))
        self._read_time(row, line)

    def _read_peak(self, key: str, size: float, line: int) -> None:
        device = _DEVICE.fullmatch(key)
        if device is not None:
            in_bytes = device["bytes"] is not None
            peak = LoggedPeak(
                kind="device",
                peak_bytes=int(size) if in_bytes else None,
                line=line,
                source=_NVML,
                share=None if in_bytes else size / 100.0,
                note=f"highest of all devices of the metrics; {_SAMPLED}",
            )
            self._collector.add_peak(peak)
        elif key in _PEAKS:
            kind, unit = _PEAKS[key]
            rounding = None if unit == 1.0 else five_digits(size)
            statistic = f"{kind}_bytes.all.peak"
            note = "of the rank that logs, or the highest of its pipeline"
            self._collector.add_peak(
                LoggedPeak(kind, round(size * unit), line, _TORCH, None, statistic, rounding, note=note)
            )

    def _read_time(self, row: Mapping[str, Any], line: int) -> None:
        """Time the Trainer's steps by two rows."""
        step = number(row.get(_STEP))
        time = next((number(row.get(key)) for key in _TIMES if number(row.get(key)) is not None), None)
        if step is None or time is None:
            return
        if self._last is not None and step > self._last[0] and time > self._last[1]:
            self._collector.add_step((time - self._last[1]) / (step - self._last[0]), line, int(step))
        if self._last is None or step > self._last[0]:
            self._last = (step, time)


def read_history(lines: Iterable[tuple[int, bytes]], collector: LogCollector) -> None:
    """Read JSON Lines; what is no object, such as a line cut short, is left out."""
    rows = _Rows(collector)
    for line, raw in lines:
        collector.hash_line(raw)
        try:
            row = parse_json(raw)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.read(row, line)


def read_summary(document: Mapping[str, Any], collector: LogCollector) -> None:
    """Read the last value of each metric."""
    _Rows(collector).read(document, 1)
    read_results(document, 1, collector)


def read_chart(lines: Iterator[tuple[int, str]], columns: list[str]) -> dict[str, LogCollector]:
    """Read the rows of a CSV export, by the run's name; "" where the columns name none."""
    keys = [_CHART_COLUMN.fullmatch(column) for column in columns[:MOST_COLUMNS]]
    collectors: dict[str, LogCollector] = {}
    readers: dict[str, _Rows] = {}
    for match in keys:
        run = (match["run"] or "") if match is not None else ""
        if run not in collectors:
            collectors[run] = LogCollector()
            collectors[run].hash_line(",".join(columns).encode("utf-8", "replace"))
            readers[run] = _Rows(collectors[run])
    for line, text in lines:
        by_run: dict[str, dict[str, float]] = {}
        cells = cells_of(text)
        if cells is None:
            next(iter(collectors.values())).skip_value("a row of the table", line)
        for match, cell in zip(keys, cells or [], strict=False):
            value = _cell(cell)
            if match is not None and value is not None and match["bound"] != "MIN":
                row = by_run.setdefault(match["run"] or "", {})
                row[match["key"]] = max(value, row.get(match["key"], value))
        shared = by_run.get("", {})
        for run, row in by_run.items():
            collectors[run].hash_line(text.encode("utf-8", "replace"))
            readers[run].read({**shared, **row}, line)
    named = {run: collector for run, collector in collectors.items() if run}
    return named or collectors


def cells_of(text: str) -> list[str] | None:
    """Return the cells of a line of CSV; None where it is no such line, or one cell exceeds the csv module's limit."""
    try:
        return next(csv.reader([text]), [])
    except csv.Error:
        return None


def _cell(text: str) -> float | None:
    return number(number_in(text.strip()))


def megatron_arguments(text: str, name: str) -> dict[str, Any]:
    """Return the arguments of Megatron-LM by their names in its parser, which it gives W&B as the run's configuration
    (config.yaml); empty where the configuration is another trainer's. Raises UserError for what is no mapping."""
    document = parse_document(text, name).value
    values = {
        str(key): entry["value"]
        for key, entry in document.items()
        if isinstance(entry, Mapping) and "value" in entry and not str(key).startswith("_")
    }
    return values if "tensor_model_parallel_size" in values else {}
