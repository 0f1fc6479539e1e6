"""What status, logs and cancel share: from a word to a submitted run."""

from __future__ import annotations

from pathlib import Path

from llmlaunch.errors import UserError
from llmlaunch.launchers.base import JobState, Submission

__all__ = ["note_end", "submission_of"]


def submission_of(word: str) -> Submission:
    """The submission of a run directory, or of a run by its id (or the start of it) in the store.

    Raises:
        UserError: no such run, or one that llmlaunch did not submit.
    """
    from llmlaunch.launchers.run_files import read_submission

    directory = _directory(word)
    submission = read_submission(directory)
    if submission is None:
        raise UserError(f"{directory}: was not submitted by llmlaunch (no submission.json); ask squeue about it")
    return submission


def _directory(word: str) -> Path:
    path = Path(word).expanduser()
    if path.is_dir():
        return path.resolve()
    from llmlaunch.store.location import store_exists

    if not store_exists():
        raise UserError(f"{word}: no such run directory, and there is no store yet to look a run up in")
    from llmlaunch.store.open import open_store
    from llmlaunch.store.runs import find_run

    with open_store() as store:
        return find_run(store, word).directory


def note_end(submission: Submission, state: JobState) -> None:
    """Tell the store what only the launcher knows: a job that ended without a status.json of its own, because it was
    cancelled while it waited, or lost with its node."""
    if not state.ended or (submission.run_dir / "status.json").exists():
        return
    from llmlaunch.launchers.run_files import name_run
    from llmlaunch.store.location import store_exists

    if not store_exists():
        return
    from llmlaunch.store.open import open_store
    from llmlaunch.store.runs import set_state

    with open_store() as store:
        set_state(store, name_run(submission.run_dir), state.phase, state.reason or state.state or None)
