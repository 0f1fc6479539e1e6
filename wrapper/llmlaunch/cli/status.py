"""`llmlaunch status`: what became of runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmlaunch.cli.printed import print_json, say
from llmlaunch.cli.submitted import directory_of, note_ends, submission_in
from llmlaunch.errors import UserError
from llmlaunch.rundir.messages import to_type

if TYPE_CHECKING:
    from llmlaunch.launchers.base import Submission
    from llmlaunch.launchers.look import Look

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
    directories = [directory_of(run) for run in runs] if runs else _not_ended()
    submissions: list[Submission] = []
    refused: list[Look] = []
    for directory in directories:
        try:
            look = _refused(directory)
            if look is not None:
                refused.append(look)
                continue
            submissions.append(submission_in(directory))
        except UserError as failure:
            if not several:
                raise
            say(f"warning: {failure}", err=True)
    if watch and submissions:
        from llmlaunch.cli.status_watch import watch_runs

        return watch_runs(submissions, as_json, 2.0 if interval is None else interval)
    return _say(submissions, refused, several, as_json, hint=not runs)


def _refused(directory: Path) -> Look | None:
    """A look at a run that the scheduler did not take; None of any other."""
    from llmlaunch.launchers.base import JobState, Submission
    from llmlaunch.launchers.look import Look
    from llmlaunch.launchers.run_files import read_refusal

    scheduler_words = read_refusal(directory)
    if not scheduler_words:
        return None
    reason = f"{scheduler_words}; {to_type('resume', directory)} submits it again"
    submission = Submission("slurm", "-", directory.resolve(), 0.0)
    return Look(submission, JobState("refused", reason=reason), None, {}, {}, stopping=False)


def _say(submissions: list[Submission], refused: list[Look], several: bool, as_json: bool, hint: bool) -> int:
    from llmlaunch.launchers.look import look_at

    looks = look_at(submissions, lambda line: say(line, err=True))
    note_ends((look.submission, look.state) for look in looks)
    looks += refused
    if as_json:
        found = [look.as_json() for look in looks]
        print_json({"runs": found} if several else found[0])
    elif not several:
        say(looks[0].sentence())
    elif looks:
        say(_table(looks))
    elif hint:
        say("no run is going on; llmlaunch runs lists those that have ended", err=True)
    return 0


def _not_ended() -> list[Path]:
    from llmlaunch.store.location import store_exists

    if not store_exists():
        return []
    from llmlaunch.store.database import open_store
    from llmlaunch.store.runs import ONGOING, list_runs

    with open_store() as store:
        return [run.directory for run in list_runs(store) if run.state in ONGOING and run.directory.is_dir()]


def _table(looks: list[Look]) -> str:
    from llmlaunch.report.text import one_line, table

    head = ("run", "job", "phase", "step", "loss", "tokens/s", "")
    rows = [[one_line(cell) for cell in look.cells()] for look in looks]
    lines = table(head[:-1], (row[:-1] for row in rows), indent="").split("\n")
    # The last column is words: to the left, and as long as they are.
    return "\n".join(
        f"{line}  {words}".rstrip() for line, words in zip(lines, ["", *(row[-1] for row in rows)], strict=True)
    )
