"""The last steps an attempt logged, read from the logs of those nodes alone that log steps."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from llmlaunch.launchers.base import Submission
from llmlaunch.launchers.logs import JobLogs
from llmlaunch.launchers.steps import RunFacts
from llmlaunch.rundir.step_lines import Step

__all__ = ["RecentSteps"]

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
