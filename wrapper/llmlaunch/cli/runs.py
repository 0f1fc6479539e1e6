"""`llmlaunch runs`: what became of the runs."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmlaunch.cli.printed import print_json, say
from llmlaunch.errors import UserError
from llmlaunch.launchers.base import PHASES

if TYPE_CHECKING:
    from llmlaunch.launchers.look import Look
    from llmlaunch.rundir.run import RunHistory
    from llmlaunch.store.runs import Run, RunFilter

__all__ = ["command"]

HEAD = (
    *("run", "recipe", "launcher", "job", "state", "attempts", "step", "kind"),
    *("predicted GiB", "measured GiB", "age", "directory"),
)
_UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@click.command("runs")
@click.option(
    "--state", "states", multiple=True, type=click.Choice(PHASES), metavar="S", help=f"Now {', '.join(PHASES)}."
)
@click.option("--recipe", metavar="R", help="Of the recipe of this name.")
@click.option("--since", metavar="7d|DATE", help="Submitted since: 30m, 12h, 7d, 2w ago, or a date.")
@click.option("--cluster", metavar="C", help="On the cluster SLURM calls so; local runs: on this host.")
@click.option("--launcher", type=click.Choice(["slurm", "local"]))
@click.option("--limit", type=click.IntRange(1, 10**9), metavar="N", help="The newest N.")
@click.option("--json", "as_json", is_flag=True, help="Print the runs as JSON.")
def command(
    states: tuple[str, ...],
    recipe: str | None,
    since: str | None,
    cluster: str | None,
    launcher: str | None,
    limit: int | None,
    as_json: bool,
) -> None:
    """List the runs, the newest first: state, attempts, step, and the worst rank's predicted and measured peak.

    Runs that have finished since are collected first; SLURM is asked once about all that go on.
    """
    from llmlaunch.store.location import store_exists
    from llmlaunch.store.runs import RunFilter

    which = RunFilter(states, recipe, None if since is None else _moment(since), cluster, launcher, limit)
    found = _found(which) if store_exists() else []
    if as_json:
        print_json({"runs": [_json(*one) for one in found]})
    elif found:
        _print(found)
    elif which == RunFilter():
        say("no runs yet; `llmlaunch submit RECIPE` starts one", err=True)
    else:
        say("no such runs", err=True)


_Found = tuple["Run", "Look | None", "RunHistory"]


def _found(which: RunFilter) -> list[_Found]:
    """Those of the filter's states as things are now: what goes on is chosen by what SLURM says of it."""
    from dataclasses import replace

    from llmlaunch.rundir.run import run_history
    from llmlaunch.store.collect import open_collected
    from llmlaunch.store.runs import ONGOING, list_runs

    asked = which
    if which.states:  # one that goes on may be in any state by now
        asked = replace(which, states=(*which.states, *ONGOING), limit=None)
    with open_collected(lambda line: say(line, err=True)) as store:
        runs = list_runs(store, asked)
    looks = _looks([run.directory for run in runs if run.state in ONGOING])
    chosen = [run for run in runs if not which.states or _state(run, looks.get(run.directory)) in which.states]
    return [(run, looks.get(run.directory), run_history(run.directory)) for run in chosen[: which.limit]]


def _looks(directories: Sequence[Path]) -> Mapping[Path, Look]:
    """What the launchers say of the runs in these directories; a scheduler that cannot be asked is a warning."""
    from llmlaunch.cli.submitted import note_ends
    from llmlaunch.launchers.look import look_at
    from llmlaunch.launchers.run_files import read_submission

    submissions = []
    for directory in directories:
        try:
            submission = read_submission(directory)
        except UserError as damaged:
            say(f"warning: {damaged}", err=True)
            continue
        submissions += [submission] if submission else []
    try:
        looks = look_at(submissions, lambda line: say(line, err=True)) if submissions else []
    except UserError as failure:
        say(f"warning: what goes on is shown as it was last known: {failure}", err=True)
        return {}
    note_ends((look.submission, look.state) for look in looks)
    return {look.submission.run_dir: look for look in looks}


def _state(run: Run, look: Look | None) -> str:
    """One of PHASES. A run of which no more is known than that it was submitted is `unknown`."""
    known = run.state if look is None else look.state.phase
    return known if known in PHASES else "unknown"


def _json(run: Run, look: Look | None, far: RunHistory) -> dict[str, Any]:
    return {
        **run.as_json(),
        "phase": _state(run, look),
        "live": None if look is None else look.as_json(),
        "attempts": [
            {"attempt": name, "layout": layout} for name, layout in zip(far.attempts, far.layouts, strict=True)
        ],
        "step": far.step,
        "steps": far.steps,
    }


def _print(found: Sequence[_Found]) -> None:
    from llmlaunch.causes.cause import in_words
    from llmlaunch.report.text import one_line, table
    from llmlaunch.units import duration, gib

    rows, now = [], time.time()
    for run, look, far in found:
        state = _state(run, look)
        if look is not None and state == "pending" and look.state.reason:
            state += f" ({look.state.reason})"
        elif run.cause is not None:
            state += f": {in_words(run.cause)}"
        step = "-" if far.step is None else f"{far.step}/{far.steps}" if far.steps else str(far.step)
        since = run.submitted_at or run.started_at
        sizes = ["-" if size is None else gib(size) for size in (run.predicted_bytes, run.measured_bytes)]
        texts = (run.run_id, run.recipe, run.launcher, run.job_id, state, far.chain, step, run.peak_kind)
        age = "-" if since is None else duration(max(0.0, now - since))
        rows.append([*(one_line(text or "-") for text in texts), *sizes, age, one_line(str(run.directory))])
    say(table(HEAD, rows, indent=""))


def _moment(word: str) -> float:
    """Unix seconds of `7d` (ago) or a date. Raises UserError."""
    match = re.fullmatch(r"(\d+)([mhdw])", word)
    if match:
        return time.time() - int(match[1]) * _UNITS[match[2]]
    try:
        return datetime.fromisoformat(word).timestamp()
    except ValueError:
        raise UserError(f"--since {word}: not 30m, 12h, 7d, 2w or a date such as 2026-11-21") from None
