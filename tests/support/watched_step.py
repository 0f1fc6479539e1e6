"""A step whose watchdog is under test: the run directory, the loop that the watchdog lives in, and a step that notes
what it is asked."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.node.event_loop import EventLoop
from llmlaunch.node.line_writer import DiskThread
from llmlaunch.node.watchdog import AttemptWatchdog
from llmlaunch.rundir.step_lines import Step, StepNews
from support.node_rig import ATTEMPT, PATIENCE_SECONDS

PROGRESS = {
    "promised": True,
    "steps": 40,
    "tokens_per_step": 4096,
    "floor_seconds": 600.0,
    "first_step_seconds": 600.0,
    "saving_seconds": 600.0,
}


class RecordingStep:
    """A step that does nothing but note what it is asked."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.is_stopping = False

    def stop(self) -> None:
        self.asked.append("stop")

    def save(self) -> None:
        self.asked.append("save")

    def ask_for_stacks(self) -> None:
        self.asked.append("stacks")

    def end(self, term_seconds: float) -> None:
        self.asked.append(("end", term_seconds))


class Watched:
    """A run directory, the loop, and the watchdog of a step."""

    def __init__(self, folder: Path, loop: EventLoop) -> None:
        self.use(folder)
        self.loop, self.step, self.disk = loop, RecordingStep(), DiskThread()
        self.disk.start()
        self.watchdog: Any = None

    def use(self, folder: Path) -> None:
        """Have the run in this folder."""
        self.run, self.attempt = folder, folder / "attempts" / ATTEMPT
        self.attempt.mkdir(parents=True, exist_ok=True)

    def write(self, name: str, value: object) -> None:
        path = self.run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value))

    def watch(self, run: dict[str, Any] | None = None, **progress: object) -> None:
        described = {"nodes": 1, "devices_per_node": 1, "progress": {**PROGRESS, **progress}, **(run or {})}
        self.write("run.json", described)
        self.watchdog = AttemptWatchdog(self.run, ATTEMPT, ".", self.step, self.loop, self.disk, look_seconds=0.05)

    def hear(self, *steps: tuple[int, float], slow: bool = False) -> None:
        """The trainers report steps, each with its loss."""
        self.watchdog.hear(StepNews([Step(step, 40, loss) for step, loss in steps], slow))

    def until(self, holds: Callable[[], object], what: str) -> None:
        """Let the loop go on until that `holds`."""
        give_up_at = time.monotonic() + PATIENCE_SECONDS
        self.loop.every(0.02, lambda: None)
        self.loop.run(lambda: bool(holds()) or time.monotonic() > give_up_at, keeps_timers=True)
        assert holds(), what

    def look(self, seconds: float = 0.4) -> None:
        """Let it look a few times."""
        until = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= until, "time")

    def progress(self) -> dict[str, Any]:
        path = self.attempt / "progress.json"
        return dict(json.loads(path.read_text(), parse_constant=pytest.fail)) if path.exists() else {}

    def close(self) -> dict[str, Any]:
        """The step has ended; return the last of the progress."""
        self.watchdog.close()
        assert self.disk.finish(PATIENCE_SECONDS)
        return self.progress()
