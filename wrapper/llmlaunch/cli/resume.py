"""`llmlaunch resume`: submit a run directory again, or for the first time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmlaunch.cli.excluded import excluded_words
from llmlaunch.cli.printed import print_json, say
from llmlaunch.cli.submitted import directory_of, note_end
from llmlaunch.errors import SchedulerRefused, UserError
from llmlaunch.rundir.files import read_run_id
from llmlaunch.rundir.messages import to_type

if TYPE_CHECKING:
    from llmlaunch.launchers.base import Submission
    from llmlaunch.launchers.choose import Choice

__all__ = ["command", "refusals_recorded"]


@click.command("resume")
@click.argument("run", metavar="RUN|DIR")
@click.argument("options", metavar="[-- SBATCH_OPTION...]", nargs=-1)
@click.option("--anyway", is_flag=True, help="Also where nobody knows whether the last job has ended, or it succeeded.")
@click.option("--local", is_flag=True, help="Run on this machine, also where there is SLURM.")
@click.option(
    "--from-older", is_flag=True, help="Also from an older checkpoint than the last one saved, or from step 0."
)
@click.option("--no-exclude", is_flag=True, help="Also on nodes that ended earlier runs.")
@click.option("--json", "as_json", is_flag=True, help="Print the submission as JSON.")
def command(
    run: str, options: tuple[str, ...], anyway: bool, local: bool, from_older: bool, no_exclude: bool, as_json: bool
) -> int:
    """Submit RUN's directory again when its last job has ended; also one that was never submitted, or whose submit
    was interrupted or refused.

    The training goes on from its last checkpoint. Where that has vanished the job ends and says so; --from-older lets
    it go on from the newest whole checkpoint there is, or from step 0. What follows `--` goes to sbatch, where it wins
    over the script.
    """
    from llmlaunch.launchers import run_files, submitting

    directory = directory_of(run)
    run_files.refuse_foreign(directory)
    before = run_files.read_submission(directory)
    interrupted = submitting.was_submitting(directory) is not None
    if not interrupted:
        _refuse_unless_ended(directory, before, anyway)
    choice = _choice(before, local)
    if run_files.remove_stop(directory):
        say("removed the file stop, with which the run had been told to end", err=True)
    if from_older:
        run_files.allow_older_checkpoint(directory)
    say(choice.why, err=True)
    words = () if no_exclude or choice.launcher.name != "slurm" else excluded_words(directory)
    with refusals_recorded(directory):
        submission = choice.launcher.submit(directory, (*words, *options), again=before is not None)
    say(f"job {', '.join(submission.jobs)} in {directory}", err=True)
    _record(directory)
    if as_json:
        print_json(
            {
                "run_id": read_run_id(directory),
                "run_dir": str(directory),
                "launcher": submission.launcher,
                "job_id": submission.job_id,
                "jobs": list(submission.jobs),
                "earlier": [job for one in submission.earlier for job in one.jobs],
            }
        )
    say(f"look again: {to_type('status', directory)}; {to_type('logs', directory)}", err=True)
    return 0


def _refuse_unless_ended(directory: Path, submitted: Submission | None, anyway: bool) -> None:
    from llmlaunch.launchers.choose import launcher_of
    from llmlaunch.launchers.run_files import seen_at_work

    before = submitted or seen_at_work(directory)
    if before is None:
        return
    state = launcher_of(before, _aside).states([before])[before.job_id]
    if submitted is not None:
        note_end(submitted, state)
    job = before.jobs[max(0, state.link - 1)]
    if state.phase == "unknown" and not anyway:
        raise UserError(
            f"{before.run_dir}: nobody knows whether its job {job} has ended ({state.reason}); two jobs in one "
            "directory would spoil each other's checkpoints. Where you know that it has: --anyway"
        )
    if state.phase == "succeeded" and not anyway:
        raise UserError(
            f"{before.run_dir}: its job {job} succeeded, so nothing is left to do; submit it again: --anyway"
        )
    if state.phase in ("pending", "running"):
        raise UserError(
            f"{before.run_dir}: its job {job} is {state.phase}; when it has ended it can be submitted again "
            f"({to_type('cancel', before.run_dir)} ends it)"
        )


def _choice(before: Submission | None, local: bool) -> Choice:
    """The launcher of the last job, unless another is asked for."""
    from llmlaunch.launchers.choose import choose

    return choose(local or (before is not None and before.launcher == "local"), _aside)


@contextlib.contextmanager
def refusals_recorded(directory: Path) -> Iterator[None]:
    """Record a run that the scheduler refuses in the store, too, and let its SchedulerRefused go on."""
    try:
        yield
    except SchedulerRefused:
        _record(directory)
        raise


def _record(directory: Path) -> None:
    """The store is an index: where it cannot be written the job runs on, and `collect` can name it later."""
    from llmlaunch.store.collect import collect
    from llmlaunch.store.database import open_store

    try:
        with open_store() as store:
            collect(store, [directory])
    except UserError as failure:
        say(
            f"warning: the run goes on, but the store does not know it ({failure}); "
            f"later: {to_type('collect', directory)}",
            err=True,
        )


def _aside(line: str) -> None:
    say(line, err=True)
