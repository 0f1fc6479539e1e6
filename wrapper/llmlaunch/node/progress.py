"""The progress of the steps: read from the logs of an attempt's nodes as they are written, and when the next step is
overdue."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from ..rundir.step_lines import StepNews

if TYPE_CHECKING:
    from ..rundir.attempt_files import Hang, NotFinite, Progress
    from ..rundir.run_file import ProgressRules
    from ..rundir.step_lines import Step


REMEMBERED = 50  # steps, and gaps between looks that brought some
FEW_GAPS = 3  # before so many, a script that promised nothing is not judged: its lines may be of something else
PATIENCE = 10.0  # gaps, and saves, a longer one of which is called a hang
SLOWEST = 2.0  # times the longest gap that turned out to be none: evaluations are often not announced
SAVING_SECONDS = 1800.0


class TimeLimit(NamedTuple):
    what: str  # that is waited for: "first step", "a step", "saving"
    seconds: float


class StepTracker:
    """Times are seconds of one clock that only grows. `progress` is the object of that name in run.json."""

    def __init__(self, progress: ProgressRules, now: float) -> None:
        self._floor = progress.get("floor_seconds")
        self._first = progress.get("first_step_seconds")
        self._saving = progress.get("saving_seconds") or SAVING_SECONDS
        self._promised = progress.get("promised", False)
        self._tokens_per_step = progress.get("tokens_per_step")
        self._every = (progress.get("save_every"), progress.get("evaluate_every"))
        self._last: Step | None = None
        self._steps = progress.get("steps")
        self._loss: float | None = None
        self._not_finite: NotFinite | None = None  # that the loss is NaN or infinite, and since when
        self._tokens_per_second: float | None = None
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)
        self._gaps: deque[float] = deque(maxlen=REMEMBERED)
        self._longest_gap = self._longest_save = 0.0
        self._slow = False
        self._last_sign = now
        self._last_step_at = now
        self.any_step = False  # at least one step was read
        self.first_step: int | None = None  # the number of the first step that was read

    def update(self, news: StepNews, now: float) -> bool:
        """Take in what one look at the logs brought. Returns whether a new step was in it."""
        before = None if self._last is None else self._last.step
        fresh = [step for step in news.steps if self._is_new_step(step)]
        if fresh:
            self._advance(before, fresh, now)
        if news.slow:
            self._slow, self._last_sign = True, now
        return bool(fresh)

    def _is_new_step(self, step: Step) -> bool:
        """Take in the line's numbers. Returns whether its step is another than the last one's."""
        if self.first_step is None:
            self.first_step = step.step
        new = self._last is None or step.step is None or step.step != self._last.step
        if step.step is not None or self._last is None:
            self._last = step
        self._steps = step.steps or self._steps
        self._update_loss(step)
        self._tokens_per_second = step.tokens_per_second or self._tokens_per_second
        return new

    def _update_loss(self, step: Step) -> None:
        """A line without a loss leaves what was said before it."""
        if step.loss is None:
            return
        if math.isfinite(step.loss):
            self._loss, self._not_finite = step.loss, None
            return
        since = step.step if self._not_finite is None else self._not_finite["since_step"]
        self._loss, self._not_finite = None, {"loss": str(step.loss), "since_step": since}

    def _advance(self, before: int | None, fresh: list[Step], now: float) -> None:
        gap = now - self._last_step_at
        reported = [step.seconds for step in fresh if step.seconds]
        if reported:
            self._seconds.extend(reported)
        elif self.any_step and self._last is not None and self._last.step is not None and before is not None:
            self._seconds.append(gap / max(1, self._last.step - before))
        if self.any_step and self._slow:
            self._longest_save = max(self._longest_save, gap)
        elif self.any_step:
            self._gaps.append(gap)
            self._longest_gap = max(self._longest_gap, gap)
        self.any_step, self._slow = True, self._slow_next([before, *(step.step for step in fresh)])
        self._last_step_at = self._last_sign = now

    def _slow_next(self, numbers: list[int | None]) -> bool:
        """Whether a save or an evaluation that nothing announces lies between the last of the step `numbers` and the
        one whose line comes next, by the recipe's intervals and the way from the last but one."""
        steps = [step for step in numbers if step is not None]
        if not steps:
            return False
        stride = max(1, steps[-1] - steps[-2]) if len(steps) > 1 else 1
        intervals = [interval for interval in self._every if interval]
        return any(-(-steps[-1] // interval) * interval < steps[-1] + stride for interval in intervals)

    def limit(self, saving: bool = False) -> TimeLimit | None:
        """Return how long the next sign of progress may take, or None for no limit. With `saving` the trainers were
        asked to save."""
        if self._floor is None or (not self._promised and len(self._gaps) < FEW_GAPS):
            return None
        if self._gaps:
            ordinary = max(PATIENCE * median(self._gaps), SLOWEST * self._longest_gap, self._floor)
        else:
            ordinary = max(self._first or 0.0, self._floor)
        if saving or self._slow or self._is_done():
            return TimeLimit("saving", max(ordinary, PATIENCE * self._longest_save, self._saving))
        return TimeLimit("a step" if self.any_step else "first step", ordinary)

    def overdue(self, now: float, saving: bool = False) -> Hang | None:
        """Return the "hung" of progress.json where the next sign is overdue, else None."""
        limit, since = self.limit(saving), now - self._last_sign
        if limit is None or since <= limit.seconds:
            return None
        return {"since_seconds": round(since, 1), "allowed_seconds": round(limit.seconds, 1), "what": limit.what}

    def _is_done(self) -> bool:
        step = None if self._last is None else self._last.step
        return step is not None and isinstance(self._steps, int) and step >= self._steps

    def record(self) -> Progress:
        """Return what progress.json says of the steps; null = not known."""
        seconds = median(self._seconds) if self._seconds else None
        tokens_per_second = self._tokens_per_second
        if tokens_per_second is None and seconds and isinstance(self._tokens_per_step, int):
            tokens_per_second = self._tokens_per_step / seconds
        return {
            "step": None if self._last is None else self._last.step,
            "steps": self._steps,
            "loss": self._loss,
            "not_finite": self._not_finite,
            "tokens_per_second": None if tokens_per_second is None else round(tokens_per_second, 1),
            "step_seconds": None if seconds is None else round(seconds, 4),
        }
