"""What earlier attempts of a run did, and how far its checkpoints have come."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..rundir.files import read_object
from ..rundir.identifiers import is_attempt, is_fallback, job_of
from ..rundir.values import byte_count, time_or_none
from .checkpoint import read_tracker
from .files import attempt_directory

if TYPE_CHECKING:
    from pathlib import Path

    from .files import Record

FIRST_LAYOUT = "."
TRACKER_BYTES = 4096


class Attempt(NamedTuple):
    """One attempt that has begun."""

    name: str
    layout: str
    from_step: int  # of the checkpoint it began with; 0 without one
    started_at: float
    is_fallback: bool  # started in the allocation of the one before, out of memory
    status: Record  # its own status.json; empty where it has none

    @property
    def was_retried(self) -> bool:
        """It never began, for want of a port or a container, and was started again at once."""
        return (self.status.get("next") or {}).get("action") == "again"


def attempts_of_run(run_directory: Path) -> list[Attempt]:
    """Every attempt that has begun, the oldest first."""
    records = [read_object(path) for path in (run_directory / "attempts").glob("*/attempt.json")]
    attempts = [
        _attempt(run_directory, record)
        for record in records
        if record is not None and is_attempt(record.get("attempt"))
    ]
    return sorted(attempts, key=lambda attempt: attempt.started_at)


def of_this_submission(attempts: list[Attempt], run_directory: Path, attempt: str) -> list[Attempt]:
    """Those of the same job or chain of jobs as `attempt`: a person who resumes a run starts counting again."""
    job = job_of(attempt)
    submission = read_object(run_directory / "submission.json") or {}
    chain = submission.get("chain")
    jobs = {str(submission.get("job_id")), *(str(link) for link in (chain if isinstance(chain, list) else []))}
    if job not in jobs:  # handed to sbatch by hand
        jobs = {job}
    return [one for one in attempts if job_of(one.name) in jobs]


def saved_step(run_directory: Path, layout: str) -> int:
    """The step of the last whole checkpoint this layout would go on from; 0 where there is none.

    Of a script that may write another tracker, and wrote none, the last step that was due to be saved stands for it.
    """
    checkpoint = checkpoint_of(run_directory, layout)
    step = read_tracker(checkpoint)
    if step is None and checkpoint is not None and not checkpoint.get("promised", True):
        return _step_due(run_directory, checkpoint)
    return step or 0


def made_a_step(run_directory: Path, attempt: Attempt) -> bool:
    """Whether its trainers have logged a step, or it began after one; also of an attempt that was killed."""
    progress = read_object(attempt_directory(run_directory, attempt.name) / "progress.json") or {}
    return attempt.from_step > 0 or attempt.status.get("step") is not None or progress.get("step") is not None


def latest_in_folder(attempts: list[Attempt], run_directory: Path, checkpoint: Record | None) -> Attempt | None:
    """The last of `attempts` that saves in the same place."""
    return next((one for one in reversed(attempts) if checkpoint_of(run_directory, one.layout) == checkpoint), None)


def checkpoint_of(run_directory: Path, layout: str) -> Record | None:
    """Where this layout saves; None where no checkpoints are written."""
    described = read_object(run_directory / layout / "run.json") or {}
    checkpoint = described.get("checkpoint")
    return checkpoint if isinstance(checkpoint, dict) else None


def _step_due(run_directory: Path, checkpoint: Record) -> int:
    """The furthest step due to be saved that a log has shown, of all attempts that save in the same place."""
    furthest = 0
    for one in attempts_of_run(run_directory):
        progress = read_object(attempt_directory(run_directory, one.name) / "progress.json") or {}
        if checkpoint_of(run_directory, one.layout) == checkpoint:
            furthest = max(furthest, byte_count(progress.get("step")) or 0)
    return furthest - furthest % (byte_count(checkpoint.get("interval")) or 1)


def fruitless(attempts: list[Attempt], layout: str, step: int) -> int:
    """How many attempts in a row, the latest ones, got with `layout` no further than `step`.

    Where no checkpoint is known at all, one that made steps and ended in order counts as progress.
    """
    count = 0
    for attempt in reversed([one for one in attempts if not one.was_retried]):
        orderly = step == 0 and attempt.status.get("state") == "stopped" and attempt.status.get("step") is not None
        if attempt.layout != layout or attempt.from_step < step or orderly:
            break
        count += 1
    return count


def _attempt(run_directory: Path, record: Record) -> Attempt:
    name, layout = str(record.get("attempt")), record.get("layout")
    status = read_object(attempt_directory(run_directory, name) / "status.json")
    return Attempt(
        name=name,
        layout=str(layout) if is_fallback(layout) else FIRST_LAYOUT,
        from_step=byte_count(record.get("from_step")) or 0,
        started_at=time_or_none(record.get("started_at")) or 0.0,
        is_fallback=bool(record.get("fallback")),
        status=status or {},
    )
