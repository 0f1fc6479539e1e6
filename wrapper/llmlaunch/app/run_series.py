"""What a run's files say over time: loss and seconds by step, memory by moment. Of files of any size, in few points."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmlaunch.rundir import file_names
from llmlaunch.rundir.attempt import Attempt
from llmlaunch.rundir.files import bounded_lines, parse_json
from llmlaunch.rundir.peak_account import idle_bytes
from llmlaunch.rundir.reached_steps import nodes_with_logs
from llmlaunch.rundir.regular_files import open_regular
from llmlaunch.rundir.step_lines import Step
from llmlaunch.rundir.values import byte_count, objects_in, time_or_none
from llmlaunch.watch.run_reader import run_facts

Point = tuple[float, float, float, float]  # place, median, least, most

MOST_POINTS = 400  # of one curve: a screen shows no more
LOGS_TRIED = 8  # of an attempt, in the search for the one whose node logs steps
LOOK_BYTES = 4 * 2**20  # of a log, in that search
LOG_BYTES = 2**29  # of the one that is read; a step's line has some 400
PEAKS_BYTES = 8 * 2**20  # of a monitor's file that is read whole; of a longer one SAMPLES lines
SAMPLES = 400


@dataclass
class StepTrace:
    """The steps of one attempt: (step, value) in the order of the log. `not_finite` are steps whose loss was none."""

    losses: list[tuple[int, float]] = field(default_factory=list)
    seconds: list[tuple[int, float]] = field(default_factory=list)
    not_finite: list[int] = field(default_factory=list)
    steps: int = 0


@dataclass(frozen=True)
class MemoryTrace:
    """The memory of one rank: (unix seconds, bytes held, the most so far)."""

    rank: int
    pipeline_rank: int | None
    node: str
    samples: Sequence[tuple[float, int, int]]


def thinned(values: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[Point]:
    """Return at most `most` points: of neighbours the median with the least and the most, so that no spike is lost."""
    size = max(1, math.ceil(len(values) / most))
    points: list[Point] = []
    for start in range(0, len(values), size):
        group = values[start : start + size]
        ordered = [value for _, value in group]
        points.append((group[len(group) // 2][0], statistics.median(ordered), min(ordered), max(ordered)))
    return points


def step_trace(attempt: Attempt) -> StepTrace:
    """Return the steps that an attempt logged; empty where no log of it reports any."""
    facts = run_facts(attempt.run_directory, attempt.layout)

    def step_of(line: bytes) -> Step | None:
        return facts.step_of(line.decode("utf-8", "replace"))

    trace = StepTrace()
    path = _log_with_steps(attempt, step_of)
    before: int | None = None
    for step in () if path is None else _steps_in(path, step_of, LOG_BYTES):
        if step.step is None or step.step == before:  # another rank may log the same step
            continue
        before = step.step
        trace.steps += 1
        if step.loss is not None and math.isfinite(step.loss):
            trace.losses.append((step.step, step.loss))
        elif step.loss is not None:
            trace.not_finite.append(step.step)
        if step.seconds is not None and step.seconds > 0:
            trace.seconds.append((step.step, step.seconds))
    return trace


def _log_with_steps(attempt: Attempt, step_of: Callable[[bytes], Step | None]) -> Path | None:
    """Megatron-LM's last rank reports steps, DeepSpeed's first: the last node's log, the first's, then others'."""
    nodes = attempt.nodes or nodes_with_logs(attempt)
    likely = list(dict.fromkeys([*nodes[-1:], *nodes[:LOGS_TRIED]]))[:LOGS_TRIED]
    for node in likely:
        path = file_names.node_log(attempt.run_directory, attempt.name, node)
        if next(_steps_in(path, step_of, LOOK_BYTES), None) is not None:
            return path
    return None


def _steps_in(path: Path, step_of: Callable[[bytes], Step | None], most_bytes: int) -> Iterator[Step]:
    try:
        with open_regular(path) as file:
            read = 0
            for line in bounded_lines(file):
                read += len(line)
                if read > most_bytes:
                    return
                step = step_of(line)
                if step is not None:
                    yield step
    except OSError:
        return


def memory_trace(
    run_directory: Path, rank: int, pipeline_rank: int | None, node: str, uuid: str | None, attempts: Iterable[str]
) -> MemoryTrace:
    """Return what the monitor of `node` saw of one rank in these attempts: of its GPU `uuid`, above what that held
    before, or, without one, of its process's resident memory."""
    names, samples = set(attempts), []
    for line in _monitor_lines(run_directory / file_names.PEAKS / f"{node}.jsonl"):
        moment = time_or_none(line.get("time"))
        if line.get("attempt") not in names or moment is None:
            continue
        sample = _resident(line, rank) if uuid is None else _on_device(line, uuid)
        if sample is not None:
            samples.append((moment, *sample))
    return MemoryTrace(rank, pipeline_rank, node, sorted(samples))


def _on_device(line: Mapping[str, Any], uuid: str) -> tuple[int, int] | None:
    for gpu in objects_in(line.get("gpus")):
        if gpu.get("uuid") == uuid:
            used, peak = byte_count(gpu.get("used_bytes")), byte_count(gpu.get("device_peak_bytes"))
            before = idle_bytes(byte_count(gpu.get("baseline_bytes")), byte_count(gpu.get("reserved_bytes")))
            if used is not None:
                return max(used - before, 0), max((peak or used) - before, used - before, 0)
    return None


def _resident(line: Mapping[str, Any], rank: int) -> tuple[int, int] | None:
    for process in objects_in(line.get("processes")):
        if process.get("rank") == rank:
            now, peak = byte_count(process.get("resident_bytes")), byte_count(process.get("resident_peak_bytes"))
            if now is not None:
                return now, max(peak or now, now)
    return None


def _monitor_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= PEAKS_BYTES:
                raws = bounded_lines(file)
            else:
                raws = _samples(file, size)
            for raw in raws:
                try:
                    line = parse_json(raw)
                except ValueError:
                    continue
                if isinstance(line, dict):
                    yield line
    except OSError:
        return


def _samples(file: Any, size: int) -> Iterator[bytes]:
    for number in range(SAMPLES):
        file.seek(size * number // SAMPLES)
        file.readline(2**20)
        yield file.readline(2**20)
