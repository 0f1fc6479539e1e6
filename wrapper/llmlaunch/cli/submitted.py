"""What status, logs, cancel and resume share: from a word to a submitted run."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from llmlaunch.cli.printed import say
from llmlaunch.errors import UserError
from llmlaunch.launchers.base import JobState, Submission
from llmlaunch.rundir.files import read_run_id
from llmlaunch.rundir.messages import to_type

__all__ = ["directory_of", "note_end", "note_ends", "submission_in", "submission_of"]


_OF_A_RUN = ("run.json", "job.sbatch", "submission.json", "sweep.json", "run.id")


def submission_of(word: str) -> Submission:
    """The submission of a run directory, or of a run by its id (or the start of it) in the store.

    Raises:
        UserError: no such run, or one that llmlaunch did not submit.
    """
    return submission_in(directory_of(word))


def submission_in(directory: Path) -> Submission:
    """The submission of a run directory. Where its submit was interrupted, SLURM is asked for the job.

    Raises UserError where there is none.
    """
    from llmlaunch.launchers import submitting
    from llmlaunch.launchers.run_files import SCRIPT, read_submission

    mark = submitting.was_submitting(directory)
    submission = read_submission(directory) or _of_an_array(directory)
    if mark is not None and submitting.at_work(mark) and submission is None:
        raise UserError(f"{directory}: is being submitted now (process {mark.pid} on {mark.host})")
    if mark is not None and not submitting.at_work(mark):
        submission = _adopted(directory, submission)
    if submission is not None:
        return submission
    if mark is not None:
        raise UserError(
            f"{directory}: its submit was interrupted, and SLURM shows no job of it; {to_type('resume', directory)} "
            "looks again, and submits it where there is none"
        )
    if (directory / SCRIPT).is_file():
        raise UserError(f"{directory}: was not submitted by llmlaunch; {to_type('resume', directory)} does")
    raise UserError(f"{directory}: not a run directory (it has no {SCRIPT})")


def _of_an_array(directory: Path) -> Submission | None:
    from llmlaunch.launchers.sweep import task_submission

    return task_submission(directory)


def _adopted(directory: Path, written: Submission | None) -> Submission | None:
    from llmlaunch.launchers.slurm.launcher import SlurmLauncher

    found = SlurmLauncher(say=_aside).adopt(directory)
    if found is not None and found != written:
        _aside(f"job {', '.join(found.jobs)} of {directory} was found: its submit had been interrupted")
    return found


def _aside(line: str) -> None:
    say(line, err=True)


def directory_of(word: str) -> Path:
    """Return the directory of the run that is meant: a run directory by its path, else a run that the store knows by
    one of its names (`store.runs.find_run`), else any folder of that path: the caller says what it lacks.

    Raises UserError where there is none, and with the candidates where there are several.
    """
    from llmlaunch.store.location import store_exists

    path = Path(os.path.expanduser(word))  # noqa: PTH111 (pathlib raises where there is no such user)
    is_folder = os.path.isdir(path)  # noqa: PTH112 (pathlib raises for names that are too long)
    if is_folder and ("/" in word or any(os.path.lexists(path / name) for name in _OF_A_RUN)):
        return path.resolve()
    if not store_exists():
        if is_folder:
            return path.resolve()
        raise UserError(f"{word}: no such run directory, and there is no store yet to look a run up in")
    from llmlaunch.store.database import open_store
    from llmlaunch.store.runs import find_run

    try:
        with open_store() as store:
            return find_run(store, word).directory
    except UserError:
        if is_folder:
            return path.resolve()
        raise


def note_end(submission: Submission, state: JobState) -> None:
    """Note what only the launcher knows: a job that ended without a status.json of its own, because it was cancelled
    while it waited, or lost with its node."""
    note_ends([(submission, state)])


def note_ends(states: Iterable[tuple[Submission, JobState]]) -> None:
    """The same of several; the store, which costs time to open, is told each end once."""
    from llmlaunch.launchers import run_files

    news = [(submission, state) for submission, state in states if run_files.note_end(submission, state)]
    known = [(read_run_id(submission.run_dir), state) for submission, state in news]
    ends = [(run_id, state) for run_id, state in known if run_id is not None]  # no other can be in the store
    if not ends:
        return
    from llmlaunch.store.location import store_exists

    if not store_exists():
        return
    from llmlaunch.store.database import open_store
    from llmlaunch.store.runs import set_state

    try:
        with open_store() as store:
            for run_id, state in ends:
                set_state(store, run_id, state.phase, state.reason or state.state or None)
    except UserError as failure:  # what a person asked for is an answer, and that needs no store
        say(f"warning: how runs ended was not noted: {failure}", err=True)
