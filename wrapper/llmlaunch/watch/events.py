"""One run as it goes on: its latest step, its memory, and what happens to it, from the files it writes."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from llmlaunch.launchers.base import Submission
from llmlaunch.launchers.logs import JOB, JobLogs, LogLine
from llmlaunch.launchers.run_files import attempt_names
from llmlaunch.launchers.steps import RunFacts, run_facts
from llmlaunch.report.run_text import attempt_began, attempt_ended, attempt_told, hung_words, step_line
from llmlaunch.report.text import one_line
from llmlaunch.rundir.attempt import Attempt
from llmlaunch.rundir.memory_files import MemoryWatch
from llmlaunch.rundir.step_lines import Step
from llmlaunch.units import duration

__all__ = ["News", "RunWatch"]

_MEMORY_SECONDS = 5.0
_STEPS_REMEMBERED = 20
_LONGEST_EVENT = 160
_PATIENCE_SECONDS = 5.0
_LONG_SECONDS, _LONG_STEPS = 60.0, 3.0


@dataclass(frozen=True)
class News:
    """One line for a person; `passing` where the next one replaces it: a step, or a word on the way to the first."""

    text: str
    passing: bool = False
    is_step: bool = False


@dataclass
class RunWatch:
    """Look again and again with `news`. Nothing is raised for a file that is missing or torn."""

    submission: Submission
    tail: int | None = None
    """Of logs that are there already, so many last lines are looked at; None: all."""
    step: Step | None = None
    line: str = ""
    """The latest step in words."""
    _logs: JobLogs = field(init=False)
    _planned: RunFacts = field(init=False)
    _facts: dict[str, RunFacts] = field(default_factory=dict)
    _seen_at: dict[str, float] = field(default_factory=dict)
    _said: set[tuple[str, str]] = field(default_factory=set)
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS_REMEMBERED))
    _attempt: str = ""
    _loss_since: int | None = None
    """The step at which the loss became NaN or infinite; None while it is a number."""
    _memory: tuple[float, int | None] = (float("-inf"), None)
    _memory_watch: MemoryWatch | None = None
    _slow: str = ""
    _step_at: float = 0.0

    def __post_init__(self) -> None:
        self._logs = JobLogs(self.submission, tail=self.tail)
        self._planned = run_facts(self.submission.run_dir, "")

    @property
    def readable(self) -> bool:
        """Whether the lines of this run's trainer are known."""
        return self._planned.readable

    @property
    def files(self) -> int:
        """How many logs are read at each look."""
        return len(self._logs.logs)

    @property
    def silence(self) -> str:
        """Words for a step that is long in coming; none while it is not."""
        waited = time.monotonic() - self._step_at
        pace = statistics.median(self._seconds) if self._seconds else 0.0
        return f" | no step for {duration(waited)}" if waited > max(_LONG_SECONDS, _LONG_STEPS * pace) else ""

    @property
    def seconds_left(self) -> float | None:
        step, pace = self.step, statistics.median(self._seconds) if self._seconds else None
        if step is None or pace is None or step.step is None or step.steps is None:
            return None
        return max(0, step.steps - step.step) * pace

    @property
    def memory_bytes(self) -> int | None:
        return self._memory[1]

    @property
    def predicted_bytes(self) -> int | None:
        return self._facts.get(self._attempt, self._planned).predicted_bytes

    def news(self) -> Iterator[News]:
        """What happened since the last look, attempt by attempt: how it began, lines of its logs, how it ended."""
        entries: dict[str, list[LogLine]] = {}
        for entry in self._logs.new_entries():
            entries.setdefault(entry.attempt, []).append(entry)
        names = attempt_names(self.submission)
        names += [name for name in entries if name not in names]
        for number, name in enumerate(names, start=1):
            if ("over", name) not in self._said:
                yield from self._beginning(number, name, name == names[-1])
            for entry in entries.get(name, ()):
                yield from self._of_line(entry)
            if ("over", name) not in self._said:
                yield from self._turns(number, Attempt(self.submission.run_dir, name), name == names[-1])

    def _beginning(self, number: int, name: str, newest: bool) -> Iterator[News]:
        if ("began", name) in self._said:
            return
        files = Attempt(self.submission.run_dir, name)
        waited = time.monotonic() - self._seen_at.setdefault(name, time.monotonic())
        if newest and not files.began and not files.status and waited < _PATIENCE_SECONDS:
            return  # the job is about to write down which layout it runs, and where
        self._said.add(("began", name))
        self._facts[name] = run_facts(self.submission.run_dir, files.layout)
        from_step, note = files.began.get("from_step"), files.began.get("note")
        yield News(attempt_began(number, name, files.nodes, files.layout, from_step, note))

    def _of_line(self, entry: LogLine) -> Iterator[News]:
        facts = self._facts.get(entry.attempt, self._planned)
        found = facts.step_of(entry.text)
        if found is not None:
            yield from self._new_step(entry.attempt, found, facts)
        elif facts.is_slow(entry.text):
            text = one_line(entry.text).strip()[:_LONGEST_EVENT]
            if text != self._slow:  # every rank may say so
                self._slow = text
                yield News(text)
        elif self.step is None and entry.node != JOB and entry.text.strip():
            yield News(self._logs.text(entry), passing=facts.promised)

    def _new_step(self, attempt: str, found: Step, facts: RunFacts) -> Iterator[News]:
        again = self.step is not None and self._attempt == attempt and found.step == self.step.step
        if again and found.step is not None:  # another rank says the same
            return
        if attempt != self._attempt:
            self._seconds.clear()
            self._loss_since = None
        if found.loss is not None:
            self._loss_since = None if math.isfinite(found.loss) else self._loss_since or found.step
        self._attempt, self.step, self._step_at = attempt, found, time.monotonic()
        if found.seconds is not None:
            self._seconds.append(found.seconds)
        self._look_at_memory()
        self.line = step_line(
            found.step,
            found.steps,
            found.loss,
            found.seconds,
            found.tokens_per_second,
            facts.devices,
            self.memory_bytes,
            facts.predicted_bytes,
            self.seconds_left,
            self._loss_since,
        )
        yield News(self.line, passing=True, is_step=True)

    def _turns(self, number: int, files: Attempt, newest: bool) -> Iterator[News]:
        """What an attempt was told, that it hangs, that it ended and what comes next; each once."""
        if files.stop_signals and not files.has_failed_node and self._first("told", files.name):
            yield News(attempt_told(number, list(files.stop_signals.values())))
        hung = files.progress.get("hung")
        if isinstance(hung, dict) and self._first("hung", files.name):
            yield News(hung_words(number, hung))
        following = files.status.get("next")
        goes_on = isinstance(following, dict) and following.get("action") not in (None, "end")
        if files.status and (goes_on or not newest) and self._first("over", files.name):
            yield News(attempt_ended(number, files.status))
        elif not newest and self._first("over", files.name):
            yield News(f"Attempt {number} left no word of its end: its node was lost, or SLURM ended it at once")

    def _first(self, what: str, name: str) -> bool:
        fresh = (what, name) not in self._said
        self._said.add((what, name))
        return fresh

    def _look_at_memory(self) -> None:
        now = time.monotonic()
        if now - self._memory[0] >= _MEMORY_SECONDS:
            if self._memory_watch is None or self._memory_watch.attempt.name != self._attempt:
                self._memory_watch = MemoryWatch(self.submission.run_dir, self._attempt)
            peaks = [rank.peak_bytes for rank in self._memory_watch.refresh()]
            self._memory = (now, max((peak for peak in peaks if peak is not None), default=None))
