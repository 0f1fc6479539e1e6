"""What the log of somebody's training says of memory and time, whichever trainer printed it; and the collector that
readers of the various formats put it into."""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from llmlaunch.causes.log_scan import scan
from llmlaunch.rundir.foreign_values import MOST_WHOLE

MOST_TIMES = 1_000_000  # of steps; later ones are left out of the median
MOST_DEATHS = 4096
MOST_MESSAGES = 4096  # about memory; later ones are not read
STEPS_AFTER_DEATH = 2  # one may still be printed by a rank that has not noticed
LONGEST_LINE = 16_384  # characters

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07\x1b]{0,2048}\x07")


def plain_line(raw: bytes) -> str:
    """Return a line as text without its end and without colours; of a progress bar its last state."""
    last = raw.rstrip(b"\r\n").rpartition(b"\r")[2]
    text = last[:LONGEST_LINE].decode("utf-8", "replace")
    return _ANSI.sub("", text) if "\x1b" in text else text


@dataclass(frozen=True)
class LoggedPeak:
    """One peak that a log names. `kind` is allocated, reserved or device. Where the log has only a share of the card,
    `peak_bytes` is None and `share` is set. `rank` is global, None where the log does not say whose peak it is;
    `steps` is how many steps had been trained when it was printed."""

    kind: str
    peak_bytes: int | None
    line: int
    source: str
    rank: int | None = None
    statistic: str | None = None
    rounding_bytes: int | None = None
    steps: int | None = None
    share: float | None = None
    note: str | None = None

    @property
    def size(self) -> float:
        return float(self.peak_bytes or 0) if self.share is None else self.share


@dataclass(frozen=True)
class LoggedDeath:
    """A rank that ran out of device memory: the allocator's message and its numbers in bytes."""

    line: int
    text: str
    numbers: Mapping[str, int | float]
    rank: int | None = None


@dataclass(frozen=True)
class JobFacts:
    """What a log says of its job, in the words of a recipe, so that a recipe given beside it can be held against it.
    None where it does not say. `data` is data parallelism, with context parallelism where the trainer counts both."""

    world_size: int | None = None
    data: int | None = None
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    zero_stage: int | None = None


@dataclass(frozen=True)
class UnreadableValues:
    """Values of a log that were skipped because they cannot be read: how many, and the line and name of the first."""

    count: int
    line: int
    name: str

    def __str__(self) -> str:
        if self.count == 1:
            return f"1 value cannot be read and was skipped: {self.name}, line {self.line}"
        return f"{self.count:,} values cannot be read and were skipped, the first in line {self.line}: {self.name}"


@dataclass(frozen=True)
class TrainingLog:
    """One run, as far as its log tells of it.

    `printed_by` are the trainers and trackers whose lines it has, as their makers call them; none where only torch's
    allocator speaks. `identity` is a digest of the log up to the first number read of it: a log that grew, or was
    moved, keeps it. `values` are Megatron's arguments by their names in its parser. `step_note` says what
    `step_seconds` is: the median after warm-up where single steps are timed, else a mean. `first_line` is where the run
    begins in its file.
    """

    printed_by: frozenset[str]
    identity: str
    first_line: int
    peaks: tuple[LoggedPeak, ...]
    deaths: tuple[LoggedDeath, ...]
    steps_run: int | None = None
    step_seconds: float | None = None
    step_note: str | None = None
    step_line: int | None = None
    tflops_per_gpu: float | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    facts: JobFacts = JobFacts()
    notes: tuple[str, ...] = ()
    unreadable: UnreadableValues | None = None

    @property
    def says_nothing(self) -> bool:
        return not self.peaks and not self.deaths and self.step_seconds is None


class LogCollector:
    """Gathers what readers find in one run's lines, in bounded memory."""

    def __init__(self, first_line: int = 1) -> None:
        self.printed_by: set[str] = set()
        self.first_line = first_line
        self.values: dict[str, Any] = {}
        self.facts: dict[str, int] = {}
        self.notes: list[str] = []
        self.unreadable: UnreadableValues | None = None
        self.steps_run: int | None = None
        self.mean_step: tuple[float, int, str] | None = None  # seconds, line, what it is a mean of
        self._peaks: dict[tuple[str, int | None, bool], LoggedPeak] = {}
        self._deaths: dict[int | None, LoggedDeath] = {}
        self._messages = 0
        self._times: list[float] = []
        self._tflops: list[float] = []
        self._time_line: int | None = None
        self._step_lines: deque[int] = deque(maxlen=STEPS_AFTER_DEATH)
        self._head = hashlib.sha256()
        self._head_is_open = True

    def hash_line(self, raw: bytes) -> None:
        """Count a line into the identity, until the first number was read."""
        if self._head_is_open:
            self._head.update(raw)

    def add_peak(self, peak: LoggedPeak) -> None:
        """Keep the highest peak of its kind and rank, with the number of steps that the last report had seen.

        A peak that 64 bits do not hold, and a share above the card, are unreadable.
        """
        if (peak.peak_bytes or 0) > MOST_WHOLE or (peak.share or 0.0) > 1.0:
            self.skip_value(peak.source, peak.line)
            return
        self._head_is_open = False
        key = (peak.kind, peak.rank, peak.share is None)
        earlier = self._peaks.get(key)
        if earlier is None or peak.size >= earlier.size:
            self._peaks[key] = peak
        elif peak.steps is not None:
            self._peaks[key] = replace(earlier, steps=peak.steps)
        if peak.steps is not None:
            self.add_steps(peak.steps)

    def skip_value(self, name: str, line: int) -> None:
        """Count a value that cannot be read; `name` is what the log calls it."""
        first = self.unreadable or UnreadableValues(0, line, name)
        self.unreadable = replace(first, count=first.count + 1)

    def add_steps(self, steps: int) -> None:
        self._head_is_open = False
        if steps > MOST_WHOLE:
            return
        self.steps_run = max(steps, self.steps_run or 0)

    def add_step(self, seconds: float | None, line: int, step: int | None = None) -> None:
        """Count one report of a step; `seconds` is None where it does not time it."""
        if step is not None:
            self.add_steps(step)
        self._head_is_open = False
        self._step_lines.append(line)
        if seconds is not None and 0 < seconds < 1e7 and len(self._times) < MOST_TIMES:
            self._times.append(seconds)
            self._time_line = line

    def add_tflops(self, tflops: float) -> None:
        if 0 < tflops < 1e5 and len(self._tflops) < MOST_TIMES:
            self._tflops.append(tflops)

    def add_death(self, before: list[str], message: list[str], line: int) -> None:
        """Read a message about memory: `message` begins with its line, `before` are the lines before it."""
        self._messages += 1
        if self._messages > MOST_MESSAGES:
            return
        hits = [hit for hit in scan("\n".join([*before, *message])) if hit.place == len(before)]
        if not hits or hits[0].kind != "oom" or len(self._deaths) >= MOST_DEATHS:
            return
        self._head_is_open = False
        hit = hits[0]
        if "asked_bytes" not in hit.numbers and "Tried to allocate" in hit.line:
            self.skip_value("Tried to allocate", line)
        known = self._deaths.get(hit.rank)
        if known is None or self._survived(known) or len(hit.numbers) > len(known.numbers):
            self._deaths[hit.rank] = LoggedDeath(line, hit.line, dict(hit.numbers), hit.rank)

    def _survived(self, death: LoggedDeath) -> bool:
        """Whether training went on after a message: an attempt at a larger batch may have failed."""
        return len(self._step_lines) == STEPS_AFTER_DEATH and self._step_lines[0] > death.line

    def log(self) -> TrainingLog:
        """Return what was gathered."""
        seconds, line, note = None, self._time_line, None
        if self._times:
            steady = _after_warm_up(self._times)
            seconds, note = median(steady), f"median of {len(steady)} reports after warm-up"
        elif self.mean_step is not None:
            seconds, line, note = self.mean_step
        return TrainingLog(
            printed_by=frozenset(self.printed_by),
            identity=self._head.hexdigest()[:16],
            first_line=self.first_line,
            peaks=tuple(_in_bytes_if_possible(self._peaks.values())),
            deaths=_of_known_ranks([death for death in self._deaths.values() if not self._survived(death)]),
            steps_run=self.steps_run,
            step_seconds=seconds,
            step_note=note,
            step_line=line,
            tflops_per_gpu=median(_after_warm_up(self._tflops)) if self._tflops else None,
            values=self.values,
            facts=JobFacts(**self.facts),
            notes=tuple(dict.fromkeys([*self.notes, *([str(self.unreadable)] if self.unreadable else [])])),
            unreadable=self.unreadable,
        )


def _after_warm_up(numbers: list[float]) -> list[float]:
    """Return the reports without the first tenth, and without the first one where there are others: it contains what
    the program does on first use."""
    return numbers[max(len(numbers) // 10, 1) :] or numbers


def _in_bytes_if_possible(peaks: Iterable[LoggedPeak]) -> list[LoggedPeak]:
    """Leave out shares of the card of which there are bytes."""
    listed = list(peaks)
    in_bytes = {(peak.kind, peak.rank) for peak in listed if peak.share is None}
    return [peak for peak in listed if peak.share is None or (peak.kind, peak.rank) not in in_bytes]


def _of_known_ranks(deaths: Sequence[LoggedDeath]) -> tuple[LoggedDeath, ...]:
    """Return the deaths in the log's order. A message without a rank repeats one with a rank where there are any."""
    ranked = [death for death in deaths if death.rank is not None]
    return tuple(sorted(ranked or deaths, key=lambda death: death.line))
