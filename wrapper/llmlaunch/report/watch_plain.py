"""What changed in watched runs, a plain line each: for a pipe, a file, a terminal that cannot draw. Pure."""

from __future__ import annotations

from llmlaunch.report.run_words import step_line
from llmlaunch.report.text import one_line
from llmlaunch.report.watched import Watched

__all__ = ["changes"]

_NOTABLE_SHARE = 0.01


def changes(before: Watched | None, run: Watched) -> list[str]:
    """The lines that say how `run` differs from `before`; None: nothing was said of it yet."""
    name = f"{one_line(run.name)} [{run.job}]"
    lines = []
    if before is None or (before.phase, before.because) != (run.phase, run.because):
        lines.append(f"{name} {run.phase}" + (f": {one_line(run.because)}" if run.because else ""))
    if (run.step is not None or run.fullest is not None) and (before is None or _moved(before, run)):
        fullest = run.fullest
        words = step_line(
            run.step,
            run.steps,
            run.loss,
            run.step_seconds,
            run.tokens_per_second,
            run.devices,
            fullest.peak_bytes if fullest else None,
            fullest.predicted_bytes if fullest else None,
            run.seconds_left,
            run.loss_since,
        )
        lines.append(f"{name} {words}")
    known = before.remarks if before else ()
    return [*lines, *(f"{name} {one_line(remark)}" for remark in run.remarks if remark not in known)]


def _moved(before: Watched, run: Watched) -> bool:
    return before.step != run.step or abs(_peak(run) - _peak(before)) > _NOTABLE_SHARE * _peak(before)


def _peak(run: Watched) -> int:
    fullest = run.fullest
    return (fullest.peak_bytes or 0) if fullest else 0
