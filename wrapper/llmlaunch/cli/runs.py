"""`llmlaunch runs`: what became of the runs."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

import click

from llmlaunch.cli.output import notify, print_json, say
from llmlaunch.errors import UserError
from llmlaunch.launchers.base import PHASES

if TYPE_CHECKING:
    from llmlaunch.app.stored_runs import RunState

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
    from llmlaunch.app.stored_runs import runs

    listed = runs(states, recipe, None if since is None else _moment(since), cluster, launcher, limit, notify)
    if as_json:
        print_json({"runs": [run.to_json() for run in listed]})
    elif listed:
        _print(listed)
    elif states or any(option is not None for option in (recipe, since, cluster, launcher, limit)):
        say("no such runs", err=True)
    else:
        say("no runs yet; `llmlaunch submit RECIPE` starts one", err=True)


def _print(listed: Sequence[RunState]) -> None:
    from llmlaunch.causes.cause import in_words
    from llmlaunch.report.text import one_line, table
    from llmlaunch.units import duration, gib

    rows, now = [], time.time()
    for entry in listed:
        run, progress, state = entry.run, entry.progress, entry.phase
        if entry.live is not None and state == "pending" and entry.live.state.reason:
            state += f" ({entry.live.state.reason})"
        elif run.cause is not None:
            state += f": {in_words(run.cause)}"
        steps = f"/{progress.steps}" if progress.steps else ""
        step = "-" if progress.step is None else f"{progress.step}{steps}"
        since = run.submitted_at or run.started_at
        sizes = ["-" if size is None else gib(size) for size in (run.predicted_bytes, run.measured_bytes)]
        texts = (run.run_id, run.recipe, run.launcher, run.job_id, state, progress.chain, step, run.peak_kind)
        age = "-" if since is None else duration(max(0.0, now - since))
        rows.append([*(one_line(text or "-") for text in texts), *sizes, age, one_line(str(run.directory))])
    say(table(HEAD, rows, indent=""))


def _moment(word: str) -> float:
    """Return the unix seconds of `7d` (ago) or of a date. Raises UserError."""
    match = re.fullmatch(r"(\d+)([mhdw])", word)
    if match:
        return time.time() - int(match[1]) * _UNITS[match[2]]
    try:
        return datetime.fromisoformat(word).timestamp()
    except ValueError:
        raise UserError(f"--since {word}: not 30m, 12h, 7d, 2w or a date such as 2026-11-21") from None
