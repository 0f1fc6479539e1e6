"""Views of `status --watch` without a terminal: a line for each change, or JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmlaunch.launchers.run_status import RunStatus
from llmlaunch.report.text import one_line
from llmlaunch.watch.loop import View
from llmlaunch.watch.model import WatchedRun, step_text

_NOTABLE_SHARE = 0.01


class LineView(View):
    """Writes a line for each change."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._before: dict[int, WatchedRun] = {}
        self._trouble = ""

    def show(self, looks: Sequence[RunStatus], runs: Sequence[WatchedRun], now: float, trouble: str) -> None:
        for n, run in enumerate(runs):
            for line in changes(self._before.get(n), run):
                self._write(line)
            self._before[n] = run
        if trouble and trouble != self._trouble:
            self._write(trouble)
        self._trouble = trouble


class JsonView(View):
    """Writes all runs as one JSON object a line when anything but the time has changed."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._before: list[dict[str, Any]] | None = None

    def show(self, looks: Sequence[RunStatus], runs: Sequence[WatchedRun], now: float, trouble: str) -> None:
        records = [_as_json(look, run) for look, run in zip(looks, runs, strict=True)]
        if records != self._before:
            self._write(json.dumps({"at": now, "runs": records}))
        self._before = records


def changes(before: WatchedRun | None, run: WatchedRun) -> list[str]:
    """Return the lines that say how `run` differs from `before`; None: nothing was written of it yet."""
    lines = []
    if before is None or (before.phase, before.because) != (run.phase, run.because):
        lines.append(f"{run.title} {run.phase_text}")
    moved = (
        before is None or before.step != run.step or abs(_peak(run) - _peak(before)) > _NOTABLE_SHARE * _peak(before)
    )
    if moved and (run.step is not None or run.fullest is not None):
        lines.append(f"{run.title} {step_text(run)}")
    earlier = before.remarks if before else ()
    return [*lines, *(f"{run.title} {one_line(remark)}" for remark in run.remarks if remark not in earlier)]


def _peak(run: WatchedRun) -> int:
    fullest = run.fullest
    return (fullest.peak_bytes or 0) if fullest else 0


def _as_json(look: RunStatus, run: WatchedRun) -> dict[str, Any]:
    """Return what `status --json` prints, with the newest step in `progress`, and `memory`."""
    progress: Mapping[str, Any] = look.as_json()["progress"] or {}
    newest = {
        "step": run.step,
        "steps": run.steps,
        "loss": run.loss if run.loss is not None and math.isfinite(run.loss) else None,  # JSON has no NaN
        "tokens_per_second": run.tokens_per_second,
        "step_seconds": run.step_seconds,
        "at": run.step_at,
    }
    has_progress = run.step is not None or run.loss is not None or bool(progress)
    return {
        **look.as_json(),
        "progress": {**progress, **newest} if has_progress else None,
        "peak_kind": run.peak_kind,
        "memory": [gauge.as_json() for gauge in run.gauges],
        "remarks": list(run.remarks),
    }
