"""What earlier attempts of a run did, and how far its checkpoints have come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..rundir import file_names
from ..rundir.files import read_object
from ..rundir.run import begun_attempts
from ..rundir.values import byte_count, job_of
from .checkpoint import read_tracker

if TYPE_CHECKING:
    from pathlib import Path

    from ..rundir.attempt import Attempt
    from .files import Record

FIRST_LAYOUT = "."


def layout_of(attempt: Attempt) -> str:
    """Return the folder of the layout that an attempt ran, as the commands of node.pyz name it."""
    return attempt.layout or FIRST_LAYOUT


def of_this_submission(attempts: list[Attempt], run_directory: Path, attempt: str) -> list[Attempt]:
    """Those of the same job or chain of jobs as `attempt`: a person who resumes a run starts counting again."""
    job = job_of(attempt)
    submission = read_object(run_directory / file_names.SUBMISSION) or {}
    chain = submission.get("chain")
    jobs = {str(submission.get("job_id")), *(str(link) for link in (chain if isinstance(chain, list) else []))}
    if job not in jobs:  # handed to sbatch by hand
        jobs = {job}
    return [earlier for earlier in attempts if job_of(earlier.name) in jobs]


def saved_step(run_directory: Path, layout: str) -> int:
    """The step of the last whole checkpoint this layout would go on from; 0 where there is none.

    Of a script that may write another tracker, and wrote none, the last step that was due to be saved stands for it.
    """
    checkpoint = checkpoint_of(run_directory, layout)
    step = read_tracker(checkpoint)
    if step is None and checkpoint is not None and not checkpoint.get("promised", True):
        return _step_due(run_directory, checkpoint)
    return step or 0


def made_a_step(attempt: Attempt) -> bool:
    """Whether its trainers have logged a step, or it began after one; also of an attempt that was killed."""
    return any(step is not None for step in (attempt.from_step or None, *_steps_logged(attempt)))


def _steps_logged(attempt: Attempt) -> list[object]:
    return [record.get("step") for record in (attempt.status, attempt.progress)]


def latest_in_folder(attempts: list[Attempt], run_directory: Path, checkpoint: Record | None) -> Attempt | None:
    """The last of `attempts` that saves in the same place."""
    in_folder = (item for item in reversed(attempts) if checkpoint_of(run_directory, item.layout) == checkpoint)
    return next(in_folder, None)


def checkpoint_of(run_directory: Path, layout: str) -> Record | None:
    """Where this layout saves; None where no checkpoints are written."""
    described = read_object(run_directory / layout / file_names.RUN) or {}
    checkpoint = described.get("checkpoint")
    return checkpoint if isinstance(checkpoint, dict) else None


def _step_due(run_directory: Path, checkpoint: Record) -> int:
    """The furthest step due to be saved that a log has shown, of all attempts that save in the same place."""
    furthest = 0
    for attempt in begun_attempts(run_directory):
        if checkpoint_of(run_directory, attempt.layout) == checkpoint:
            furthest = max(furthest, byte_count(attempt.progress.get("step")) or 0)
    return furthest - furthest % (byte_count(checkpoint.get("interval")) or 1)


def fruitless(attempts: list[Attempt], layout: str, step: int) -> int:
    """How many attempts in a row, the latest ones, got with `layout` no further than `step`.

    Where no checkpoint is known at all, one that made steps and ended in order counts as progress.
    """
    count = 0
    for attempt in reversed([item for item in attempts if not item.was_retried]):
        orderly = step == 0 and attempt.status.get("state") == "stopped" and attempt.status.get("step") is not None
        if layout_of(attempt) != layout or attempt.from_step < step or orderly:
            break
        count += 1
    return count
