"""Views of `status --watch`: a whole terminal, given back as it was; without one a line for each change, or JSON."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from llmlaunch.launchers.run_status import RunStatus
from llmlaunch.report.text import one_line
from llmlaunch.watch.frames import ASCII, BLOCKS, Line, frame
from llmlaunch.watch.loop import View
from llmlaunch.watch.model import WatchedRun, step_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text


_ALL_ROWS = 10_000
"""What is left on the terminal at the end may scroll."""


def can_draw() -> bool:
    """Whether stdout is a terminal that can be drawn on."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


class TerminalView(View):
    """Draws on the terminal's other screen, as an editor does; what was there comes back, and the last frame is left
    below it. Ctrl-Z gives the terminal back, too."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console: Console = Console(highlight=False)
        self._live: Live = Live(console=self._console, screen=True, auto_refresh=False)
        self._glyphs = BLOCKS if "utf" in (sys.stdout.encoding or "").lower() else ASCII
        self._drawn: Callable[[int], list[Line]] | None = None
        self._size: tuple[int, ...] | None = None

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """While it is drawn. Whatever ends it, SIGTERM and errors included, the terminal is whole afterwards."""
        try:
            with _given_back(self._live), self._live:
                yield
        finally:
            if self._drawn is not None:
                for line in self._drawn(_ALL_ROWS):
                    self._console.print(_text(line), soft_wrap=True)

    def show(self, looks: object, runs: Sequence[WatchedRun], now: float, trouble: str) -> None:
        self._drawn = functools.partial(self._lines, runs, now, trouble)
        self._draw()

    def idle(self) -> None:
        if self._size != tuple(self._console.size):
            self._draw()

    def _draw(self) -> None:
        from rich.console import Group

        if self._drawn is not None:
            self._size = tuple(self._console.size)
            self._live.update(Group(*map(_text, self._drawn(self._console.height))), refresh=True)

    def _lines(self, runs: Sequence[WatchedRun], now: float, trouble: str, rows: int) -> list[Line]:
        foot: list[Line] = [((one_line(trouble), "yellow"),)] if trouble else []
        return [*frame(runs, self._console.width, rows - len(foot), now, self._glyphs), *foot]


def _text(line: Line) -> Text:
    from rich.text import Text

    parts = [one_line(part) if isinstance(part, str) else (one_line(part[0]), part[1]) for part in line]
    return Text.assemble(*parts, no_wrap=True, overflow="crop")


@contextlib.contextmanager
def _given_back(live: Live) -> Iterator[None]:
    """SIGTSTP and SIGTERM within leave no drawn screen behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, at: FrameType | None) -> None:
        live.stop()
        os.kill(os.getpid(), signal.SIGSTOP)  # comes back here with SIGCONT
        live.start()

    def end(number: int, at: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, what) for number, what in ((signal.SIGTSTP, stop), (signal.SIGTERM, end))}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
