"""From a name to a submitted run, and how it ended to the store: what status, logs, cancel and resume share."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from llmlaunch.errors import UserError
from llmlaunch.launchers.base import JobState, Submission
from llmlaunch.rundir import file_names
from llmlaunch.rundir.files import read_run_id
from llmlaunch.rundir.values import to_type
from llmlaunch.user_data import with_home

if TYPE_CHECKING:
    from llmlaunch.app.messages import Notify


_FILES_OF_A_RUN = (
    file_names.RUN,
    file_names.JOB_SCRIPT,
    file_names.SUBMISSION,
    file_names.SWEEP,
    file_names.RUN_ID,
)


def directory_of(name: str, notify: Notify) -> Path:
    """Return the directory of a run, named by its directory's path or by what the store knows it by
    (`store.runs.find_run`), or the newest run's for `last`, which `notify` is told. Any other folder of that path is
    returned, too: the caller says what it lacks.

    Raises UserError where there is none, and with the candidates where there are several.
    """
    from llmlaunch.store.location import LAST, store_exists

    path = with_home(name)
    is_folder = os.path.isdir(path)  # noqa: PTH112 (pathlib raises for names that are too long)
    if is_folder and ("/" in name or any(os.path.lexists(path / file) for file in _FILES_OF_A_RUN)):
        return path.resolve()
    if not store_exists():
        if is_folder:
            return path.resolve()
        if name == LAST:
            raise UserError(f"{name}: there is no run yet; `llmlaunch submit RECIPE` starts one")
        raise UserError(f"{name}: no such run directory, and there is no store yet to look a run up in")
    from llmlaunch.store.database import open_store
    from llmlaunch.store.runs import find_run

    try:
        with open_store() as store:
            return find_run(store, name, notify).directory
    except UserError:
        if is_folder:
            return path.resolve()
        raise


def submission_of(name: str, notify: Notify) -> Submission:
    """Return the submission of a run by its directory, its id, the start of its id, or `last`.

    Raises:
        UserError: there is no such run, or llmlaunch did not submit it.
    """
    return submission_in(directory_of(name, notify), notify)


def submission_in(directory: Path, notify: Notify) -> Submission:
    """Return the submission of a run directory: that of llmlaunch, else the job that a person started by hand
    (`sbatch job.sbatch`), once it is in SLURM's queue. Where its submit was interrupted, SLURM is asked for the job.

    Raises UserError where there is none.
    """
    from llmlaunch.launchers import submit_mark
    from llmlaunch.launchers.run_files import gone_text, missing_files, read_submission, seen_at_work
    from llmlaunch.launchers.sweep import task_submission

    mark = submit_mark.was_submitting(directory)
    submission = read_submission(directory) or task_submission(directory)
    if mark is not None and submit_mark.at_work(mark) and submission is None:
        raise UserError(f"{directory}: is being submitted now (process {mark.pid} on {mark.host})")
    if mark is None and submission is None:
        submission = seen_at_work(directory)
    if mark is not None and not submit_mark.at_work(mark):
        submission = _interrupted_submission(directory, submission, notify)
    if submission is not None:
        return submission
    if mark is not None:
        raise UserError(
            f"{directory}: its submit was interrupted, and SLURM shows no job of it; {to_type('resume', directory)} "
            "looks again, and submits it where there is none"
        )
    if (directory / file_names.JOB_SCRIPT).is_file():
        if queued := _queued_by_hand(directory, notify):
            return queued
        raise UserError(
            f"{directory}: was not submitted by llmlaunch; {to_type('resume', directory)} does. No job of it is in "
            "the queue, or has begun"
        )
    if missing := missing_files(directory):
        raise UserError(f"{directory}: {gone_text(missing)}")
    if not directory.is_dir():
        raise UserError(
            f"{directory}: is not there any more; what was collected of its runs stays in the store "
            f"({to_type('runs')}, {to_type('measurements', 'list')})"
        )
    raise UserError(f"{directory}: not a run directory (it has no {file_names.JOB_SCRIPT})")


def _queued_by_hand(directory: Path, notify: Notify) -> Submission | None:
    from llmlaunch.launchers.slurm.by_hand import queued_by_hand

    return queued_by_hand(directory, notify)


def _interrupted_submission(directory: Path, recorded: Submission | None, notify: Notify) -> Submission | None:
    from llmlaunch.launchers.choose import slurm_asked_briefly

    submission = slurm_asked_briefly(notify).adopt(directory)
    if submission is not None and submission != recorded:
        notify(f"job {', '.join(submission.jobs)} of {directory} was found: its submit had been interrupted")
    return submission


def ongoing_directories() -> list[Path]:
    """Return the directories of all runs in the store that have not ended."""
    from llmlaunch.store.location import store_exists

    if not store_exists():
        return []
    from llmlaunch.store.database import open_store
    from llmlaunch.store.runs import ONGOING, list_runs

    with open_store() as store:
        return [run.directory for run in list_runs(store) if run.state in ONGOING and run.directory.is_dir()]


def note_ends(states: Iterable[tuple[Submission, JobState]], notify: Notify) -> None:
    """Record ends that only the launcher knows: of jobs that ended without a status.json of their own, because they
    were cancelled while they waited, or lost with their node. The store is told each end once."""
    from llmlaunch.launchers import run_files

    new = [(submission, state) for submission, state in states if run_files.note_end(submission, state)]
    with_id = [(read_run_id(submission.run_dir), state) for submission, state in new]
    ends = [(run_id, state) for run_id, state in with_id if run_id is not None]  # no other can be in the store
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
    except UserError as failure:  # the answer that a person asked for needs no store
        notify(f"warning: how runs ended was not noted: {failure}")
