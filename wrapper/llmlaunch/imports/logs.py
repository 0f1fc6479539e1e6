"""Logs of trainings that people already have: what kind of file it is, by its content alone, and what it says.

Files may be huge, cut or hostile: they are read line by line, and of a line no more than a few KiB are looked at.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from llmlaunch.command_lines.training_log import LogCollector, TrainingLog, plain_line
from llmlaunch.documents.yaml_strict import read_text
from llmlaunch.errors import UserError
from llmlaunch.frameworks.deepspeed.training_log import DeepSpeedLines
from llmlaunch.frameworks.deepspeed.transformers_log import TransformersLines, read_results, read_trainer_state
from llmlaunch.frameworks.megatron.training_log import ARGUMENTS_BEGIN, MegatronLines
from llmlaunch.imports.logs_wandb import (
    WANDB,
    cells_of,
    is_chart,
    is_history,
    is_summary,
    megatron_arguments,
    read_chart,
    read_history,
    read_summary,
)
from llmlaunch.rundir.files import MOST_APPENDED_BYTES, bounded_lines, parse_json
from llmlaunch.rundir.regular_files import open_regular, read_bytes

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
    """Hand over the messages about memory that have all their lines."""
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
