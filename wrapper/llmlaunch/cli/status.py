"""`llmlaunch status`: what became of runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmlaunch.app.run_lookup import directory_of, note_ends, ongoing_directories, submission_in
from llmlaunch.cli.output import notify, print_json, say
from llmlaunch.errors import UserError
from llmlaunch.rundir.values import to_type

if TYPE_CHECKING:
    from llmlaunch.launchers.base import Submission
    from llmlaunch.launchers.run_status import RunStatus

__all__ = ["command"]


@click.command("status")
@click.argument("runs", metavar="[RUN|DIR]...", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print the states as JSON.")
@click.option("--watch", is_flag=True, help="Go on looking until all have ended, with memory by GPU, steps and loss.")
@click.option(
    "--interval",
    metavar="SECONDS",
    type=click.FloatRange(0.2, 3600),
    help="With --watch: between two looks at the files [2].",
)
def command(runs: tuple[str, ...], as_json: bool, watch: bool, interval: float | None) -> int:
    """Say whether each RUN waits, runs or has ended, how far it got, and why; without one, of all that have not ended.

    SLURM is asked once for all of them. With --watch the exit code is 1 where a run ended without success.
    """
    if interval is not None and not watch:
        raise UserError("--interval: is for --watch")
    several = len(runs) != 1
    directories = [directory_of(run) for run in runs] if runs else ongoing_directories()
    submissions: list[Submission] = []
    refused: list[RunStatus] = []
    for directory in directories:
        try:
            look = _refused(directory)
            if look is not None:
                refused.append(look)
                continue
            submissions.append(submission_in(directory, notify))
        except UserError as failure:
            if not several:
                raise
            notify(f"warning: {failure}")
    if watch and submissions:
        from llmlaunch.cli.following import watch_runs

        return watch_runs(submissions, as_json, 2.0 if interval is None else interval)
    return _show(submissions, refused, several, as_json, hint=not runs)


def _refused(directory: Path) -> RunStatus | None:
    """Return the state of a run that the scheduler refused; None for any other run."""
    from llmlaunch.launchers.base import JobState, Submission
    from llmlaunch.launchers.run_files import read_refusal
    from llmlaunch.launchers.run_status import RunStatus

    refusal = read_refusal(directory)
    if not refusal:
        return None
    reason = f"{refusal}; {to_type('resume', directory)} submits it again"
    submission = Submission("slurm", "-", directory.resolve(), 0.0)
    return RunStatus(submission, JobState("refused", reason=reason), None, {}, {}, stopping=False)


def _show(submissions: list[Submission], refused: list[RunStatus], several: bool, as_json: bool, hint: bool) -> int:
    from llmlaunch.launchers.run_status import read_statuses

    looks = read_statuses(submissions, notify)
    note_ends(((look.submission, look.state) for look in looks), notify)
    looks += refused
    if as_json:
        runs_json = [look.as_json() for look in looks]
        print_json({"runs": runs_json} if several else runs_json[0])
    elif not several:
        say(looks[0].sentence())
    elif looks:
        say(_table(looks))
    elif hint:
        say("no run is going on; llmlaunch runs lists those that have ended", err=True)
    return 0


def _table(looks: list[RunStatus]) -> str:
    from llmlaunch.report.text import one_line, table

    head = ("run", "job", "phase", "step", "loss", "tokens/s", "")
    rows = [[one_line(cell) for cell in look.cells()] for look in looks]
    lines = table(head[:-1], (row[:-1] for row in rows), indent="").split("\n")
    # The last column is prose: left-aligned, in full.
    return "\n".join(
        f"{line}  {reason}".rstrip() for line, reason in zip(lines, ["", *(row[-1] for row in rows)], strict=True)
    )
