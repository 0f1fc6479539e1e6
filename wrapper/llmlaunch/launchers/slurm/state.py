"""What became of a job, from what squeue, sacct and the job itself say. Pure but for the run directory's own files."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmlaunch.launchers import run_files
from llmlaunch.launchers.base import JobState, Submission
from llmlaunch.launchers.slurm.text import Row, Rows, row_of

__all__ = ["SlurmAnswers", "is_settled", "job_state"]


_SMALL_FILE_BYTES = 1 << 16


@dataclass(frozen=True)
class SlurmAnswers:
    """The rows of squeue (`live`) and of sacct (`past`), and squeue's error (`silence`) if it did not answer."""

    live: Rows
    past: Rows
    silence: str = ""


def job_state(submission: Submission, heard: SlurmAnswers) -> JobState:
    """Return the state of a submission; for a chain, the state of the job it has reached."""
    links = [_state(replace(submission, job_id=job, chain=()), heard) for job in submission.jobs]
    state = links[0] if len(links) == 1 else _of_chain(links)
    if state.phase in ("pending", "running"):
        return state
    noted = run_files.end_noted(submission)
    if noted is not None and state.phase in ("unknown", noted.phase):
        return noted  # who cancelled it, and the reason, are known for a while only
    return _told_to_end(submission, heard.silence) or state if state.phase == "unknown" else state


def is_settled(submission: Submission, live: Rows) -> bool:
    """Return whether sacct has nothing to add: each job waits or runs, has written its own status, or was noted as
    ended before."""
    missing = [job for job in submission.jobs if not _goes_on(row_of(live, job))]
    if not missing or run_files.end_noted(submission) is not None:
        return True
    return all(run_files.read_end(replace(submission, job_id=job, chain=())) is not None for job in missing)


def _goes_on(row: Row | None) -> bool:
    return row is not None and row.phase in ("pending", "running")


def _of_chain(links: Sequence[JobState]) -> JobState:
    """The link that reached the end of the training, else the one that runs, else the first that waits, else the
    last."""
    for phase in ("succeeded", "running", "pending"):
        for number, state in enumerate(links, start=1):
            if state.phase == phase:
                return replace(state, link=number)
    return replace(links[-1], link=len(links))


def _state(submission: Submission, heard: SlurmAnswers) -> JobState:
    row, record = row_of(heard.live, submission.job_id), row_of(heard.past, submission.job_id)
    restarts = max(row.restarts if row else 0, record.restarts if record else 0)
    return replace(_phase(submission, row, record, heard.silence), restarts=restarts)


def _phase(submission: Submission, row: Row | None, record: Row | None, silence: str) -> JobState:
    latest = row or record
    words = f"squeue: {silence}" if silence else f"SLURM does not know job {submission.job_id}"
    if latest is None:
        return _own_word(submission) or JobState("unknown", reason=words)
    if latest.phase in ("pending", "running"):
        if row is None and not silence:
            # The controller has forgotten it, the accounting has not heard of its end (yet, or never).
            return _own_word(submission) or JobState("unknown", latest.state, f"{words}; sacct says {latest.state}")
        if row is None:
            return JobState(latest.phase, latest.state, f"by sacct alone; {words}")
        starts = latest.starts if latest.phase == "pending" else None
        return JobState(latest.phase, latest.state, latest.reason, expected_start=starts)
    if latest.phase == "succeeded":
        words = f"SLURM says COMPLETED, but job {submission.job_id} left no status.json{_full_disk(submission)}"
        return _own_word(submission, latest.state) or JobState("unknown", latest.state, words)
    if latest.phase == "failed":
        return _failed(submission, latest, record)
    return JobState(latest.phase, latest.state, _cancelled_by(record) or latest.reason)


def _failed(submission: Submission, latest: Row, record: Row | None) -> JobState:
    own = _own_word(submission, latest.state)
    if own is None or own.phase == "succeeded":
        reason = "; ".join(part for part in (latest.reason, _lost_node(submission, latest.state)) if part)
        return JobState("failed", latest.state, reason, record.exit_code if record else None)
    if own.phase == "stopped":
        return own
    reason = "; ".join(part for part in (latest.reason, own.reason) if part)
    return JobState("failed", latest.state, reason, own.exit_code)


def _full_disk(submission: Submission) -> str:
    with contextlib.suppress(OSError):
        if shutil.disk_usage(submission.run_dir).free < _SMALL_FILE_BYTES:
            return f"; no space is left on the disk of {submission.run_dir}"
    return ""


def _lost_node(submission: Submission, state: str) -> str:
    """Which node SLURM lost. srun says so in the job's log, and waits longer for the lost node's task than SLURM leaves
    the batch script: so there is no status.json."""
    if state != "NODE_FAIL":
        return ""
    from llmlaunch.causes.attempt_cause import cause_of  # late: a question about SLURM need not wait for it
    from llmlaunch.causes.cause import sentence
    from llmlaunch.launchers.run_files import attempt_names

    names = attempt_names(submission)
    cause = cause_of(submission.run_dir, names[-1], (), 1, state) if names else None
    return "" if cause is None else sentence(cause)


def _own_word(submission: Submission, state: str = "") -> JobState | None:
    end = run_files.read_end(submission)
    if end is None:
        return None
    return JobState(end.state, state, end.why, end.exit_code)


def _told_to_end(submission: Submission, silence: str) -> JobState | None:
    """A task of an array that is cancelled while it waits may leave no trace in SLURM (seen with 22.05.8): then our own
    word counts."""
    if not silence and run_files.was_cancelled(submission):
        return JobState("cancelled", reason="cancelled with llmlaunch before it started")
    return None


def _cancelled_by(record: Row | None) -> str:
    if record is None or not record.by:
        return ""
    import pwd

    try:
        return f"by {pwd.getpwuid(int(record.by)).pw_name}"
    except (KeyError, OverflowError):
        return f"by user {record.by}"
