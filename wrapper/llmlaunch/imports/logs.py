"""Logs of trainings that people already have: what kind of file it is, by its content alone, and what it says.

Files may be huge, cut or hostile: they are read line by line, and of a line no more than a few KiB are looked at.
"""

from __future__ import annotations

import csv
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from llmlaunch.command_lines.training_log import LogCollector, LoggedPeak, TrainingLog, plain_line
from llmlaunch.documents.yaml_strict import parse_document, read_text
from llmlaunch.errors import UserError
from llmlaunch.frameworks.deepspeed.training_log import (
    DeepSpeedLines,
    TransformersLines,
    read_results,
    read_trainer_state,
)
from llmlaunch.frameworks.megatron.training_log import ARGUMENTS_BEGIN, MegatronLines, five_digits
from llmlaunch.rundir.files import MOST_APPENDED_BYTES, bounded_lines, parse_json
from llmlaunch.rundir.foreign_values import number_in
from llmlaunch.rundir.regular_files import open_regular, read_bytes
from llmlaunch.rundir.values import number

HEAD_BYTES = 64 * 2**10
WANDB_CONFIG = "config.yaml"  # W&B writes it into the folder of its summary
LINES_BEFORE, MESSAGE_LINES = 12, 5  # of a message about memory, as causes/log_scan.py reads them
MOST_OPEN_MESSAGES = 64  # of ranks that die at once
_BOM = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"
RECOGNISED = (
    "the output of Megatron-LM, of DeepSpeed or of Transformers' Trainer, trainer_state.json, train_results.json, "
    "W&B's history, system metrics or summary (JSON, JSON Lines or CSV), and measurement records (docs/store.md)"
)


def is_record_file(path: Path) -> bool:
    """Return whether a file holds measurement records: its first line is a JSON object with `id`. What cannot be read
    counts as one, because their reader says why."""
    try:
        line = _head(path).strip().partition(b"\n")[0].strip()
    except OSError:
        return True
    if not line.startswith(b"{"):
        return not line
    document = _json_object(line)
    return b'"id"' in line if document is None else "id" in document


def read_logs(path: Path) -> list[TrainingLog]:
    """Return the runs in a file. Raises UserError for a file that cannot be read, or that is none of RECOGNISED."""
    try:
        head = _head(path)
        line, _, rest = head.lstrip().partition(b"\n")
        first = _json_object(line)
        with open_regular(path, follow=True) as file:
            if first is not None and is_history(first) and rest.strip():
                collector = LogCollector()
                read_history(enumerate(bounded_lines(file), 1), collector)
                collectors = [collector]
            elif head.lstrip().startswith(b"{") and (document := _whole(path)) is not None:
                collectors = [_read_document(document, head)]
            elif is_chart(columns := _cells(line)):
                lines = ((number, raw.decode("utf-8", "replace")) for number, raw in enumerate(bounded_lines(file), 1))
                next(lines, None)
                collectors = list(read_chart(lines, columns).values())
            else:
                collectors = _read_text(file)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; check the path and its rights") from None
    logs = [collector.log() for collector in collectors]
    if not any(log.printed_by or log.deaths for log in logs):
        compressed = "it is compressed, unpack it first; " if head.startswith(_GZIP) else ""
        raise UserError(f"{path}: holds no log that llmlaunch knows; {compressed}it reads {RECOGNISED}")
    return [_with_wandb_config(path, log) for log in logs if log.printed_by or log.deaths]


def _head(path: Path) -> bytes:
    with open_regular(path, follow=True) as file:
        return (file.read(HEAD_BYTES) or b"").removeprefix(_BOM)


def _json_object(line: bytes) -> dict[str, Any] | None:
    try:
        document = parse_json(line)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def _whole(path: Path) -> dict[str, Any] | None:
    try:
        return _json_object(read_bytes(path, follow=True).removeprefix(_BOM))
    except OSError:
        return None


def _cells(line: bytes) -> list[str]:
    return cells_of(line.decode("utf-8", "replace")) or []


def _read_document(document: Mapping[str, Any], head: bytes) -> LogCollector:
    collector = LogCollector()
    collector.hash_line(head)
    if not read_trainer_state(document, 1, collector):
        if is_summary(document):
            read_summary(document, collector)
        else:
            read_results(document, 1, collector)
    return collector


Readers = Sequence[MegatronLines | DeepSpeedLines | TransformersLines]


def _read_text(file: BinaryIO) -> list[LogCollector]:
    """Read the lines of trainers. Each time that Megatron-LM prints its arguments a run begins: a job that was started
    again may go on in the same file."""
    collectors = [LogCollector()]
    megatron, readers = _new_readers()
    before: deque[bytes] = deque(maxlen=LINES_BEFORE)
    messages: list[tuple[int, list[str], list[str]]] = []  # about memory: line, lines before it, its own
    number = 0
    for number, raw in enumerate(_bounded(file, collectors), 1):
        if ARGUMENTS_BEGIN in raw:
            _end_messages(messages, collectors[-1], all_of_them=True)
            if collectors[-1].values:
                collectors.append(LogCollector(number))
                megatron, readers = _new_readers()
            megatron.begin_arguments()
        collector = collectors[-1]
        collector.hash_line(raw)
        wanted = [reader for reader in readers if reader.wants_all or any(mark in raw for mark in reader.marks)]
        is_message = b"ut of memory" in raw or b"OutOfMemoryError" in raw
        if wanted or is_message or messages:
            line = plain_line(raw)
            for reader in wanted:
                reader.read(line, number, collector)
            for _, _, lines in messages:
                lines.append(line)
            if is_message and len(messages) < MOST_OPEN_MESSAGES:
                messages.append((number, [plain_line(other) for other in before], [line]))
            _end_messages(messages, collector)
        before.append(raw[:HEAD_BYTES])
    _end_messages(messages, collectors[-1], all_of_them=True)
    for reader in readers:
        if isinstance(reader, TransformersLines):
            reader.end(number + 1, collectors[-1])
    return collectors


def _new_readers() -> tuple[MegatronLines, Readers]:
    megatron = MegatronLines()
    return megatron, (megatron, DeepSpeedLines(), TransformersLines())


def _bounded(file: BinaryIO, collectors: Sequence[LogCollector]) -> Iterator[bytes]:
    read = 0
    for raw in bounded_lines(file):
        read += len(raw)
        if read > MOST_APPENDED_BYTES:
            collectors[-1].notes.append(f"only the first {MOST_APPENDED_BYTES >> 30} GiB of the log were read")
            return
        yield raw


def _end_messages(
    messages: list[tuple[int, list[str], list[str]]], collector: LogCollector, all_of_them: bool = False
) -> None:
    ended = [message for message in messages if all_of_them or len(message[2]) >= MESSAGE_LINES]
    for message in ended:
        number, before, lines = message
        collector.add_death(before, lines, number)
        messages.remove(message)


def _with_wandb_config(path: Path, log: TrainingLog) -> TrainingLog:
    """Add the arguments that W&B's config.yaml beside a run's file holds."""
    config = path.with_name(WANDB_CONFIG)
    if WANDB not in log.printed_by or not config.is_file():
        return log
    try:
        return replace(log, values=megatron_arguments(read_text(config), str(config)))
    except UserError as error:
        return replace(log, notes=(*log.notes, f"{WANDB_CONFIG} beside it is left out: {error}"))


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
