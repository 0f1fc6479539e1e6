"""Watches runs until the last has ended: reads what is new now and then, and hands it to whoever draws."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from llmlaunch.launchers.base import JobState, Submission
from llmlaunch.launchers.look import Look
from llmlaunch.report.run_text import step_line
from llmlaunch.report.text import one_line
from llmlaunch.watch.model import Watched
from llmlaunch.watch.poller import Asked
from llmlaunch.watch.run_reader import RunReader

__all__ = ["JsonView", "PlainView", "View", "changes", "watch"]

_SECONDS_A_FILE = 0.01
"""Between two frames for each file there may be to read: who watches a thousand nodes must not keep a file server
busy."""
_PATIENCE_SECONDS = 60.0
_NAP_SECONDS = 0.25


class View(Protocol):
    def show(self, looks: Sequence[Look], runs: Sequence[Watched], now: float, trouble: str) -> None:
        """Draw, or say what changed. `trouble`: the scheduler does not answer."""
        ...

    def idle(self) -> None:
        """Called a few times a second: a terminal may have another size now."""
        ...


def watch(
    asked: Asked,
    view: View,
    interval_seconds: float,
    note: Callable[[Iterable[tuple[Submission, JobState]]], None],
) -> list[Look]:
    """Look every `interval_seconds` until every run has ended, or nobody has known the others for a minute; Ctrl-C
    ends the looking alone. `note` is told of each end. Returns the last looks."""
    readers = [RunReader(look.submission) for look in asked.looks]
    known_at = time.monotonic()
    noted: set[int] = set()
    turns: list[tuple[str, bool]] | None = None
    try:
        while True:
            looks = asked.looks
            runs = [reader.read(look) for reader, look in zip(readers, looks, strict=True)]
            view.show(looks, runs, time.time(), asked.trouble)
            fresh = [n for n, look in enumerate(looks) if look.state.ended and n not in noted]
            if fresh:
                noted.update(fresh)
                note((looks[n].submission, looks[n].state) for n in fresh)
            going = [look for look in looks if not look.state.ended]
            if any(look.state.phase != "unknown" for look in going):
                known_at = time.monotonic()
            if not going or time.monotonic() - known_at > _PATIENCE_SECONDS:
                break
            before, turns = turns, [reader.turn for reader in readers]
            asked.ask(at_once=before is not None and turns != before)
            _rest(max(interval_seconds, _SECONDS_A_FILE * sum(reader.files for reader in readers)), asked, view)
    except KeyboardInterrupt:
        pass
    return asked.looks


def _rest(seconds: float, asked: Asked, view: View) -> None:
    """So long, or until a run has ended."""
    ended = sum(look.state.ended for look in asked.looks)
    until = time.monotonic() + seconds
    while time.monotonic() < until and sum(look.state.ended for look in asked.looks) == ended:
        time.sleep(min(_NAP_SECONDS, seconds))
        view.idle()


class PlainView:
    """A line for each change."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._before: dict[int, Watched] = {}
        self._trouble = ""

    def show(self, looks: Sequence[Look], runs: Sequence[Watched], now: float, trouble: str) -> None:
        for n, run in enumerate(runs):
            for line in changes(self._before.get(n), run):
                self._write(line)
            self._before[n] = run
        if trouble != self._trouble and trouble:
            self._write(trouble)
        self._trouble = trouble

    def idle(self) -> None:
        pass


class JsonView:
    """All runs as one JSON object a line, whenever anything in it but the time changed."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._before: list[dict[str, Any]] | None = None

    def show(self, looks: Sequence[Look], runs: Sequence[Watched], now: float, trouble: str) -> None:
        made = [_as_json(look, run) for look, run in zip(looks, runs, strict=True)]
        if made != self._before:
            self._write(json.dumps({"at": now, "runs": made}))
        self._before = made

    def idle(self) -> None:
        pass


def _as_json(look: Look, run: Watched) -> dict[str, Any]:
    """What `status --json` says, the newest step in `progress`, and `memory`."""
    progress: Mapping[str, Any] = look.as_json()["progress"] or {}
    newest = {
        "step": run.step,
        "steps": run.steps,
        "loss": _finite(run.loss),
        "tokens_per_second": run.tokens_per_second,
        "step_seconds": run.step_seconds,
        "at": run.step_at,
    }
    known = run.step is not None or run.loss is not None or bool(progress)
    return {
        **look.as_json(),
        "progress": {**progress, **newest} if known else None,
        "peak_kind": run.peak_kind,
        "memory": [gauge.as_json() for gauge in run.gauges],
        "remarks": list(run.remarks),
    }


def _finite(value: float | None) -> float | None:
    """JSON has no word for what is none."""
    return value if value is not None and math.isfinite(value) else None


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
