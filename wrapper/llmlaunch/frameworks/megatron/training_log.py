"""What Megatron-LM, its forks and Megatron-Bridge print of memory and time.

Megatron-LM (`report_memory`, `training_log` and `_print_args` of megatron/training, or megatron/utils.py before core
0.7) counts a MB as 2**20 bytes, and prints memory for each rank that is the first of its data parallel group, after the
first reported iterations. Megatron-Bridge (training/utils/train_utils.py, `report_memory`) counts a GB as 10**9 bytes
and keeps five digits.
"""

from __future__ import annotations

import math
import re

from llmlaunch.command_lines.training_log import LogCollector, LoggedPeak
from llmlaunch.documents.literals import UNREADABLE, literal_in
from llmlaunch.frameworks.logs import megatron_lines
from llmlaunch.rundir.foreign_values import number_in, whole_number_in
from llmlaunch.rundir.step_lines import StepLines
from llmlaunch.units import GB, MIB

MEGATRON = "Megatron-LM"
ARGUMENTS_BEGIN = b"------------------------ arguments ------------------------"
_ARGUMENTS_END = "-------------------- end of arguments"
_NAME_COLUMNS = 48  # of a name and its dots
_ARGUMENT = re.compile(r"  (?P<name>[A-Za-z_]\w*) (?P<dots>\.*) (?P<value>.*)$")
_MEMORY = re.compile(
    # bounded: a line may repeat its beginning
    r"\[Rank (?P<rank>\d+)\] (?:\(after (?P<steps>\d+) iterations\))?.{0,100}? ?memory \((?P<unit>MB|GB)\) \|"
)
_FIELD = re.compile(r"\| ?(?P<name>[^|:]+): (?P<value>[\d.]+(?:[eE][+-]?\d+)?)")
_TFLOPS = re.compile(r"throughput per GPU \(TFLOP/s/GPU\): (?P<tflops>[\d.]+) \|")
# name in a memory line -> kind of peak, the allocator's statistic, who says it
_PEAKS = {
    "max allocated": ("allocated", "allocated_bytes.all.peak", "Megatron-LM report_memory"),
    "max reserved": ("reserved", "reserved_bytes.all.peak", "Megatron-LM report_memory"),
    "total device memory used": ("device", None, "Megatron-LM report_memory, torch.cuda.device_memory_used"),
    "mem-max-allocated-gigabytes": ("allocated", "allocated_bytes.all.peak", "Megatron-Bridge report_memory"),
    "mem-max-reserved-gigabytes": ("reserved", "reserved_bytes.all.peak", "Megatron-Bridge report_memory"),
}
_AT_ONE_MOMENT = "the device's memory at the moment of the report: a lower bound of its peak"


class MegatronLines:
    """Reader of the lines of one run. `marks` are what each line that it wants contains."""

    marks = (b" iteration ", b"memory (", b"end of arguments")

    def __init__(self) -> None:
        self._in_arguments = False
        self._steps = StepLines(megatron_lines().step_patterns)

    def begin_arguments(self) -> None:
        self._in_arguments = True

    @property
    def wants_all(self) -> bool:
        """Whether every line is wanted: the arguments are being printed."""
        return self._in_arguments

    def read(self, line: str, number: int, collector: LogCollector) -> None:
        if self._in_arguments:
            if _ARGUMENTS_END in line:
                self._in_arguments = False
            else:
                _read_argument(line, number, collector)
            return
        memory = _MEMORY.search(line)
        if memory is not None:
            collector.printed_by.add(MEGATRON)
            _read_memory(memory, line, number, collector)
            return
        step = self._steps.step_of(line.encode())
        if step is not None:
            collector.printed_by.add(MEGATRON)
            collector.add_step(step.seconds, number, step.step)
            tflops = _TFLOPS.search(line)
            if tflops is not None:
                collector.add_tflops(number_in(tflops["tflops"]) or 0.0)


def _read_argument(line: str, number: int, collector: LogCollector) -> None:
    match = _ARGUMENT.search(line)
    if match is None:
        return
    name, dots = match["name"], match["dots"]
    if len(name) + len(dots) == _NAME_COLUMNS or (not dots and len(name) >= _NAME_COLUMNS):
        collector.printed_by.add(MEGATRON)
        value = literal_in(match["value"])
        if value is UNREADABLE:
            collector.skip_value(name, number)
        else:
            collector.values[name] = value


def _read_memory(match: re.Match[str], line: str, number: int, collector: LogCollector) -> None:
    rank, steps = whole_number_in(match["rank"]), whole_number_in(match["steps"])
    if rank is None or (steps is None and match["steps"] is not None):
        collector.skip_value("the rank" if rank is None else "the iterations", number)
        return
    for field in _FIELD.finditer(line, match.end() - 1):
        meaning = _PEAKS.get(field["name"].strip())
        if meaning is None:
            continue
        size = number_in(field["value"])
        if size is None:
            collector.skip_value(field["name"].strip(), number)
            continue
        if size == 0:
            continue
        kind, statistic, source = meaning
        unit = MIB if match["unit"] == "MB" else GB
        collector.add_peak(
            LoggedPeak(
                kind=kind,
                peak_bytes=round(size * unit),
                line=number,
                source=source,
                rank=rank,
                statistic=statistic,
                rounding_bytes=_rounding_bytes(field["value"], size, unit),
                steps=steps,
                note=_AT_ONE_MOMENT if kind == "device" else None,
            )
        )


def _rounding_bytes(text: str, size: float, unit: int) -> int | None:
    """Return what the last digit is worth: two decimals of a MB since core 0.16, before that all digits; five digits of
    a GB."""
    if unit == MIB:
        return math.ceil(0.01 * unit) if len(text.partition(".")[2]) == 2 else None
    return five_digits(size)


def five_digits(gigabytes: float) -> int | None:
    """Return what the last of five digits is worth in bytes: so Megatron-Bridge rounds."""
    return round(10.0 ** (math.floor(math.log10(gigabytes)) - 4) * GB) if gigabytes > 0 else None
