"""One run as a person watches it, put together from its small files, its logs and its monitors' files."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmlaunch.launchers.base import Submission
from llmlaunch.launchers.logs import JobLogs
from llmlaunch.launchers.look import Look
from llmlaunch.launchers.run_files import latest_attempt, run_name
from llmlaunch.launchers.steps import RunFacts, run_facts
from llmlaunch.rundir.attempt import Attempt
from llmlaunch.rundir.memory_files import MemoryWatch
from llmlaunch.rundir.step_lines import Step
from llmlaunch.watch.gauges import Gauges, monitor_remarks, predicted_of
from llmlaunch.watch.model import Gauge, Watched

__all__ = ["RecentSteps", "RunReader"]

_MEMORY_SECONDS = 5.0
"""Between two looks at the monitors' files: they write every 10 s at most."""


@dataclass
class _Attempt:
    """What is read of one attempt."""

    name: str
    steps: RecentSteps
    gauges: Gauges
    nodes: tuple[str, ...]


@dataclass
class RunReader:
    """Look again and again with `read`. Nothing is raised for a file that is missing or torn."""

    submission: Submission
    turn: tuple[str, bool] = ("", False)
    """The newest attempt, and whether it has left a word of its end: where this changes, the launcher may know more."""
    _attempt: _Attempt | None = None
    _memory_at: float = float("-inf")
    _gauges: tuple[Gauge, ...] = ()

    @property
    def files(self) -> int:
        """How many monitors' files there are."""
        return self._attempt.gauges.memory.files if self._attempt else 0

    def read(self, look: Look) -> Watched:
        """The run as it is now; `look` is what was last said of it, and may be some seconds old."""
        name = latest_attempt(self.submission)
        progress = self._of_attempt(name) if name is not None else {}
        steps = self._attempt.steps if self._attempt else None
        last = steps.last if steps else None
        facts = steps.facts if steps else run_facts(self.submission.run_dir, "")
        if look.state.ended or time.monotonic() - self._memory_at >= _MEMORY_SECONDS:
            self._look_at_memory()
        said = look.cells()
        since = _not_finite(progress).get("since_step")
        return Watched(
            name=run_name(self.submission.run_dir),
            job=said[1],
            phase=look.state.phase,
            because=said[-1],
            ended=look.state.ended,
            step=last.step if last and last.step is not None else _whole(progress.get("step")),
            steps=(last.steps if last else None) or _whole(progress.get("steps")) or facts.steps,
            loss=last.loss if last and last.loss is not None else _loss(progress),
            loss_since=_whole(since),
            step_seconds=last.seconds if last and last.seconds else _number(progress.get("step_seconds")),
            tokens_per_second=(last.tokens_per_second if last else None) or _number(progress.get("tokens_per_second")),
            devices=facts.devices,
            step_at=_number(progress.get("at")),
            losses=tuple(step.loss for step in steps.steps if step.loss is not None) if steps else (),
            peak_kind=facts.peak_kind,
            gauges=self._gauges,
            remarks=self._remarks(look),
        )

    def _of_attempt(self, name: str) -> Mapping[str, Any]:
        """Its progress; what was read of an earlier attempt is forgotten."""
        files = Attempt(self.submission.run_dir, name)
        known = self._attempt
        if known is None or known.name != name or (files.nodes and not known.nodes):
            run_dir = self.submission.run_dir
            steps = RecentSteps(self.submission, name, run_facts(run_dir, files.layout))
            gauges = Gauges(MemoryWatch(run_dir, name), predicted_of(run_dir, files.layout))
            self._attempt = _Attempt(name, steps, gauges, tuple(files.nodes))
            self._memory_at = float("-inf")
        if self._attempt is not None:
            self._attempt.steps.look()
        self.turn = (name, bool(files.status))
        return files.progress

    def _look_at_memory(self) -> None:
        self._memory_at = time.monotonic()
        if self._attempt is not None:
            self._gauges = self._attempt.gauges.refresh()

    def _remarks(self, look: Look) -> tuple[str, ...]:
        if look.state.ended or self._attempt is None:
            return ()
        attempt = self._attempt
        resident = attempt.gauges.predicted.resident
        return tuple(monitor_remarks(attempt.gauges.nodes, attempt.nodes, resident, time.time()))


def _loss(progress: Mapping[str, Any]) -> float | None:
    """The last loss that progress.json knows, NaN and infinity among them."""
    unusual = _not_finite(progress).get("loss")
    return float(unusual) if unusual in ("nan", "inf", "-inf") else _number(progress.get("loss"))


def _not_finite(progress: Mapping[str, Any]) -> Mapping[str, Any]:
    record = progress.get("not_finite")
    return record if isinstance(record, dict) else {}


def _whole(value: object) -> int | None:
    return value if type(value) is int else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and type(value) is not bool else None


_REMEMBERED = 120
_TAIL_LINES = 400
_SECONDS_A_LOG = 0.05
"""While nobody knows which node logs steps, every log is looked at, and of many logs less often."""


@dataclass
class RecentSteps:
    """Of one attempt. `steps` are the last ones, oldest first, one entry a step."""

    submission: Submission
    attempt: str
    facts: RunFacts
    steps: deque[Step] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    _speakers: set[str] = field(default_factory=set)
    _looked_at: float = float("-inf")

    def __post_init__(self) -> None:
        self._logs = JobLogs(self.submission, attempts=frozenset({self.attempt}), later=False, tail=_TAIL_LINES)

    @property
    def last(self) -> Step | None:
        return self.steps[-1] if self.steps else None

    def look(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < len(self._logs.logs) * _SECONDS_A_LOG and not self._speakers:
            return
        self._looked_at = now
        for entry in self._logs.new_entries():
            found = self.facts.step_of(entry.text)
            if found is not None:
                self._speakers.add(entry.node)
                self._add(found)
        if self._speakers and self._logs.nodes is None:
            self._logs.nodes = frozenset(self._speakers)
            self._logs.logs = {path: log for path, log in self._logs.logs.items() if log.node in self._speakers}

    def _add(self, found: Step) -> None:
        """Another rank may say the same step; one that went back, after a rollback, is the last all the same."""
        last = self.last
        if last is not None and last.step is not None and found.step == last.step:
            return
        self.steps.append(found)
