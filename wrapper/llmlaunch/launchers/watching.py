"""Watches runs until the last has ended: reads what is new now and then, and hands it to whoever draws."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from llmlaunch.launchers.asked import Asked
from llmlaunch.launchers.base import JobState, Submission
from llmlaunch.launchers.look import Look
from llmlaunch.launchers.watched_run import RunReader
from llmlaunch.report.watch_plain import changes
from llmlaunch.report.watched import Watched

__all__ = ["JsonView", "PlainView", "View", "watch"]

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
