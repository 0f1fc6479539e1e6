"""What Hugging Face's Trainer reports of memory and time: in its stdout, in trainer_state.json and in *_results.json.

With `skip_memory_metrics=False` it reports differences of what torch has allocated, of global rank 0 (trainer_utils.py,
TrainerMemoryTracker, 5.23). What was allocated when training began is what there was before `__init__` and what that
added; training added `alloc`, and its peak was `peaked` above the end. The sum of the four is the allocator's peak,
because nothing is allocated between `__init__` and `train`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llmlaunch.command_lines.training_log import LogCollector, LoggedPeak
from llmlaunch.documents.literals import literal_in
from llmlaunch.rundir.foreign_values import number_in
from llmlaunch.rundir.values import count_above_zero, number, objects_in
from llmlaunch.units import MIB

TRANSFORMERS = "Transformers"
_PEAKED = "train_mem_gpu_peaked_delta"
_SUMMANDS = ("before_init_mem_gpu", "init_mem_gpu_alloc_delta", "train_mem_gpu_alloc_delta", _PEAKED)
_METRICS = re.compile(r"\{'train_runtime': [^{}]*\}")
_BLOCK = re.compile(r"\*{5} train metrics \*{5}")
_ENTRY = re.compile(r"(?:^|:)\s+(?P<name>\w+)\s+=\s+(?P<value>\S+)$")
_MOST_ENTRIES = 60
_FEWEST_STEPS_PER_SECOND = 0.05  # three decimals of less than that are off by more than 1 %
_SOURCE = "Transformers Trainer, skip_memory_metrics=False"


class TransformersLines:
    """Reader of the lines of one run. `marks` are what each line that it wants contains."""

    marks = (b"train_runtime", b"train metrics")

    def __init__(self) -> None:
        self._block: dict[str, Any] | None = None

    @property
    def wants_all(self) -> bool:
        """Whether every line is wanted: a block of metrics is being printed."""
        return self._block is not None

    def read(self, line: str, number: int, collector: LogCollector) -> None:
        if self._block is not None:
            entry = _ENTRY.search(line)
            if entry is not None and len(self._block) < _MOST_ENTRIES:
                self._block[entry["name"]] = _rounded(entry["value"])
                return
            self.end(number, collector)
        if _BLOCK.search(line):
            self._block = {}
            return
        metrics = _METRICS.search(line)
        if metrics is not None:
            read_metrics(_dictionary(metrics[0]), number, collector)

    def end(self, number: int, collector: LogCollector) -> None:
        """Take a block of metrics at its end; line `number` is the one after it."""
        metrics, self._block = self._block, None
        if metrics:
            read_metrics(metrics, number - 1, collector, rounding_bytes=len(_SUMMANDS) * MIB)


def _dictionary(text: str) -> Mapping[str, Any]:
    """Return a printed dictionary; since Transformers 5 its numbers are texts."""
    metrics = literal_in(text)
    if not isinstance(metrics, dict):
        return {}
    return {str(name): _rounded(value) if isinstance(value, str) else value for name, value in metrics.items()}


def _rounded(text: str) -> int | float | None:
    """Return a number as `log_metrics` prints it: "700MB" are at least 700 * 2**20 bytes."""
    size = re.fullmatch(r"(-?\d{1,12})MB", text)
    if size is not None:
        return int(size[1]) * MIB
    return number_in(text)


def read_results(results: Mapping[str, Any], line: int, collector: LogCollector) -> bool:
    """Read train_results.json or all_results.json, or W&B's summary of such a run; return whether it is one."""
    metrics = {name.removeprefix("train/"): value for name, value in results.items()}
    if "train_runtime" not in metrics:
        return False
    read_metrics(metrics, line, collector)
    return True


def read_trainer_state(state: Mapping[str, Any], line: int, collector: LogCollector) -> bool:
    """Read trainer_state.json; return whether it is one."""
    if not isinstance(state.get("log_history"), list) or "global_step" not in state:
        return False
    collector.printed_by.add(TRANSFORMERS)
    steps = count_above_zero(state.get("global_step"))
    if steps is not None:
        collector.add_steps(steps)
    micro_batch = count_above_zero(state.get("train_batch_size"))
    if micro_batch is not None:
        collector.facts["micro_batch_size"] = micro_batch
    last = [entry for entry in objects_in(state["log_history"]) if "train_runtime" in entry]
    if last:
        read_metrics(last[-1], line, collector)
        seconds = number(last[-1].get("train_runtime"))
        if seconds and steps:
            collector.mean_step = (seconds / steps, line, "mean of the whole training, saves and evaluations included")
    return True


def read_metrics(
    metrics: Mapping[str, Any], line: int, collector: LogCollector, rounding_bytes: int | None = None
) -> None:
    """Read the metrics that `train` returns."""
    collector.printed_by.add(TRANSFORMERS)
    rate = number(metrics.get("train_steps_per_second"))
    if rate is not None and rate >= _FEWEST_STEPS_PER_SECOND:
        collector.mean_step = (1.0 / rate, line, "mean of the whole training, saves and evaluations included")
    sizes = [metrics.get(name) for name in _SUMMANDS]
    if all(type(size) is int for size in sizes):
        peak = sum(size for size in sizes if type(size) is int)
        statistic = "allocated_bytes.all.peak"
        if peak > 0:
            collector.add_peak(LoggedPeak("allocated", peak, line, _SOURCE, 0, statistic, rounding_bytes))
    elif metrics.get(_PEAKED) is not None:
        missing = ", ".join(name for name, size in zip(_SUMMANDS, sizes, strict=True) if type(size) is not int)
        collector.notes.append(f"no peak can be told from {_PEAKED} without {missing}")
