"""What DeepSpeed prints of memory and time: `see_memory_usage`, its throughput timer, its engines' progress, and its
configuration; and what Hugging Face's Trainer reports.

Its GB are 2**30 bytes (runtime/utils.py and utils/timer.py, 0.19): two decimals of what is allocated, whole ones of
what is reserved at most. All of it is of global rank 0. `see_memory_usage` resets torch's peak each time, so the
highest of its lines counts, and those printed before the first step are of another time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from llmlaunch.command_lines.training_log import LogCollector, LoggedPeak, TrainingLog
from llmlaunch.documents.literals import literal_in
from llmlaunch.frameworks.logs import DEEPSPEED_ENGINE, DEEPSPEED_PIPELINE
from llmlaunch.recipe.types import Recipe
from llmlaunch.rundir.files import parse_json
from llmlaunch.rundir.foreign_values import number_in, whole_number_in
from llmlaunch.rundir.step_lines import StepLines
from llmlaunch.rundir.values import count_above_zero, number, objects_in
from llmlaunch.units import GIB, MIB

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


DEEPSPEED = "DeepSpeed"
_SIZE = r"([\d.]+) ?GB"
_USAGE = re.compile(rf"\bMA {_SIZE}\s+Max_MA {_SIZE}\s+CA {_SIZE}\s+Max_CA {_SIZE}")
_TIMER = re.compile(r"global_step=(?P<step>\d+), RunningAvgSamplesPerSec=(?P<samples>[\d.]+)")
_TIMER_PEAK = re.compile(r"MaxMemAllocated=(?P<size>[\d.]+) ?GB")
_SETTING = re.compile(r"\bprint\]\s+(?P<name>\w+) \.* (?P<value>\d+)$")
_TIME = re.compile(r"\[(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[,.](?P<thousandths>\d{3})\]")
_TRAINED = re.compile(r"(?i)\bafter (?:forward|backward|step|optimizer)")
_SETTINGS = {
    "world_size": "data",
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "zero_optimization_stage": "zero_stage",
}
_JSON_BEGINS = re.compile(r"\bjson = (?P<text>\{.*)$")
_MOST_JSON_LINES = 4000
_USAGE_SOURCE, _TIMER_SOURCE = "DeepSpeed see_memory_usage", "DeepSpeed ThroughputTimer"


class DeepSpeedLines:
    """Reader of the lines of one run. `marks` are what each line that it wants contains."""

    marks = (b"Max_MA", b"SamplesPerSec", b"print] ", b"json = {", b"step=", b"steps: ", b"after ", b"After ")

    def __init__(self) -> None:
        self._steps = StepLines((DEEPSPEED_PIPELINE, DEEPSPEED_ENGINE))
        self._json: list[str] | None = None
        self._has_trained = False
        self._last_time: tuple[int, float] | None = None  # step and seconds

    @property
    def wants_all(self) -> bool:
        """Whether every line is wanted: the configuration is being printed."""
        return self._json is not None

    def read(self, line: str, number: int, collector: LogCollector) -> None:
        if self._json is not None:
            self._read_json(line, collector)
            return
        begins = _JSON_BEGINS.search(line)
        if begins is not None:
            collector.printed_by.add(DEEPSPEED)
            self._json = [begins["text"]]
            if line.rstrip().endswith("}"):
                self._close_json(collector)
            return
        setting = _SETTING.search(line)
        if setting is not None:
            name = _SETTINGS.get(setting["name"])
            if name is not None and len(setting["value"]) < 10:
                collector.facts.setdefault(name, int(setting["value"]))
            return
        usage = _USAGE.search(line)
        if usage is not None:
            self._read_usage(usage, number, collector)
            return
        if _TRAINED.search(line):
            self._has_trained = True
        self._read_timer(line, number, collector)
        self._read_step(line, number, collector)

    def _read_json(self, line: str, collector: LogCollector) -> None:
        assert self._json is not None
        self._json.append(line)
        if line.rstrip() == "}" or len(self._json) > _MOST_JSON_LINES:
            self._close_json(collector)

    def _close_json(self, collector: LogCollector) -> None:
        """Take what the configuration says of the job; one that other ranks' lines interrupt is left out."""
        text, self._json = "\n".join(self._json or ()), None
        try:
            config = parse_json(text.encode())
        except ValueError:
            collector.notes.append("its DeepSpeed configuration cannot be read: other lines are between its own")
            return
        for key, name in _SETTINGS.items():
            if isinstance(config, dict) and type(config.get(key)) is int:
                collector.facts[name] = config[key]
        zero = config.get("zero_optimization") if isinstance(config, dict) else None
        if isinstance(zero, dict) and type(zero.get("stage")) is int:
            collector.facts["zero_stage"] = zero["stage"]

    def _read_usage(self, match: re.Match[str], number: int, collector: LogCollector) -> None:
        collector.printed_by.add(DEEPSPEED)
        if not self._has_trained:
            return
        allocated, reserved = number_in(match[2]), number_in(match[4])
        peaks = (
            ("allocated", allocated, "allocated_bytes.all.peak", GIB // 100),
            ("reserved", reserved, "reserved_bytes.all.peak", GIB),
        )
        for kind, size, statistic, rounding in peaks:
            if size is None:
                collector.skip_value(f"the {kind} memory", number)
            elif size > 0:
                peak = LoggedPeak(kind, round(size * GIB), number, _USAGE_SOURCE, 0, statistic, rounding)
                collector.add_peak(peak)

    def _read_timer(self, line: str, number: int, collector: LogCollector) -> None:
        match = _TIMER.search(line)
        if match is None:
            return
        collector.printed_by.add(DEEPSPEED)
        step, samples = whole_number_in(match["step"]), number_in(match["samples"])
        if step is None or samples is None:
            collector.skip_value("global_step" if step is None else "RunningAvgSamplesPerSec", number)
            return
        self._has_trained = True
        collector.add_step(None, number, step)
        batch = collector.facts.get("global_batch_size")
        if batch and samples > 0:
            collector.mean_step = (batch / samples, number, "mean since the second step, by DeepSpeed's timer")
        peak = _TIMER_PEAK.search(line)
        gib = None if peak is None else number_in(peak["size"])
        if peak is not None and gib is None:
            collector.skip_value("MaxMemAllocated", number)
        if gib:
            size = round(gib * GIB)
            statistic, rounding = "allocated_bytes.all.peak", GIB // 100
            collector.add_peak(LoggedPeak("allocated", size, number, _TIMER_SOURCE, 0, statistic, rounding, step))

    def _read_step(self, line: str, number: int, collector: LogCollector) -> None:
        step = self._steps.step_of(line.encode())
        if step is None or not step.step:  # step 0 is said before training
            return
        collector.printed_by.add(DEEPSPEED)
        self._has_trained = True
        seconds = step.seconds
        if seconds is None:
            seconds = self._seconds_since_last(line, step.step)
        collector.add_step(seconds, number, step.step)

    def _seconds_since_last(self, line: str, step: int) -> float | None:
        """Return the seconds of a step by the times of two progress lines, which come every steps_per_print steps."""
        match = _TIME.search(line)
        if match is None:
            return None
        try:
            time = datetime.fromisoformat(match["time"]).timestamp() + int(match["thousandths"]) / 1000
        except (ValueError, OverflowError, OSError):
            return None
        last, self._last_time = self._last_time, (step, time)
        if last is None or step <= last[0] or time <= last[1]:
            return None
        return (time - last[1]) / (step - last[0])


def printed_by_megatron_deepspeed(log: TrainingLog) -> bool:
    """Return whether a log has Megatron's arguments and is Megatron-DeepSpeed's."""
    return bool(log.values) and (DEEPSPEED in log.printed_by or log.values.get("deepspeed") is True)


def trainer_overrides(recipe: Recipe, log: TrainingLog) -> tuple[str, ...]:
    """Return what makes the recipe one of the trainer that printed the log, where the recipe takes llmlaunch's own."""
    if recipe.backend.script is not None or not log.printed_by & {DEEPSPEED, TRANSFORMERS}:
        return ()
    kind = "hugging-face" if TRANSFORMERS in log.printed_by else "own"
    return ("backend.script=train.py", f"backend.script_kind={kind}")
