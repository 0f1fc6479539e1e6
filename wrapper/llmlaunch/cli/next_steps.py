"""The commands that fit the state of a run: what `submit`, `status`, `resume` and the end of `--follow` say is next."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmlaunch.launchers.base import JobState
from llmlaunch.launchers.run_files import can_be_cancelled, can_be_resumed
from llmlaunch.rundir.run_file import read_run_file
from llmlaunch.rundir.values import to_type

Step = tuple[str, str]
"""A command to type, and its purpose."""


def run_path(directory: Path) -> Path:
    """Return a run directory as a person would type it: from the current folder where it lies in it. A bare name keeps
    its `./`, so that it is read as a folder."""
    try:
        relative = directory.relative_to(Path.cwd())
    except (ValueError, OSError):
        return directory
    return relative if len(relative.parts) > 1 else Path(os.path.realpath(directory))


def while_going_on(directory: Path) -> list[Step]:
    """Return what to type about a run that was just submitted, or that waits or runs. llmlaunch does not
    cancel a job that a person started by hand."""
    place = run_path(directory)
    steps = [(to_type("status", "--watch", place), "steps and memory"), (to_type("logs", "--follow", place), "")]
    return [*steps, (to_type("cancel", place), "")] if can_be_cancelled(directory) else steps


def while_it_is(directory: Path, state: JobState, cause: Mapping[str, Any]) -> list[Step]:
    """Return what to type about a run in any state."""
    if state.phase in ("pending", "running"):
        return while_going_on(directory)
    if state.phase == "refused":
        return [(to_type("resume", run_path(directory)), "submits it again")]
    if state.ended:
        return after_end(directory, state, cause)
    return [(to_type("logs", run_path(directory)), "what it has printed")]


def after_end(directory: Path, state: JobState, cause: Mapping[str, Any]) -> list[Step]:
    """Return what to type about a run that has ended: its page where it succeeded; else what it printed, and how it
    goes on, which for an observed run is up to the person's own script."""
    place = run_path(directory)
    page = (to_type("report", place), "its page: loss, memory, step times")
    if state.phase == "succeeded":
        return [page, (to_type("accuracy"), "predicted against measured, all runs")]
    steps = []
    if state.phase == "failed":
        node = cause.get("node")
        steps.append((to_type("logs", place, *(("--node", node) if node else ()), "--tail", 50), "what was printed"))
    if cause.get("sick"):
        steps.append((to_type("nodes"), "nodes that are kept away from"))
    if not can_be_resumed(directory):
        return [*steps, page]
    has_checkpoint = read_run_file(directory).get("checkpoint") is not None
    again = "go on from the last checkpoint" if has_checkpoint else "start it again"
    return [*steps, (to_type("resume", place), again), page]
