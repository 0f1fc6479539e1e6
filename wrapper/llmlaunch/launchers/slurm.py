"""A thin layer over sbatch, squeue, sacct and scancel.

Traps behind the shape of this module were seen with SLURM 22.05.8: a controller that answers late has taken the job
although sbatch exits 1; squeue forgets a job after MinJobAge; sacct lags a few seconds, and is disabled on some
clusters; a step that never started left a job COMPLETED.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from llmlaunch.errors import SchedulerRefused, UserError
from llmlaunch.launchers import environment, run_files
from llmlaunch.launchers.base import JobState, Submission
from llmlaunch.launchers.slurm_text import (
    LATE_JOB_FORMAT,
    SACCT_FIELDS,
    SQUEUE_FORMAT,
    Row,
    complaint,
    parse_job_id,
    parse_late_jobs,
    parse_sacct,
    parse_squeue,
)

__all__ = ["SlurmLauncher"]

# After these words of sbatch the controller may still have taken the job.
_LATE = ("timed out", "Zero Bytes were transmitted", "Unexpected message received")

_PAUSE_SECONDS = 1.0
_LOOKS_FOR_A_LATE_JOB = 10
_CLOCK_SLACK = timedelta(minutes=1)


@dataclass(frozen=True)
class _Answer:
    """What a command printed; `code` is None where it did not end in time."""

    code: int | None
    output: str
    words: str


@dataclass(frozen=True)
class SlurmLauncher:
    """Submits to SLURM. Each call of a command may take `timeout_seconds`; questions are asked `tries` times."""

    timeout_seconds: float = 60.0
    tries: int = 2

    @property
    def name(self) -> str:
        return "slurm"

    def submit(self, run_dir: Path, extra: Sequence[str] = ()) -> Submission:
        run_dir = run_files.prepare(run_dir)
        job_id, cluster, submitted_at = self._sbatch(run_dir, extra)
        submission = Submission(self.name, job_id, run_dir, submitted_at, cluster)
        try:
            run_files.write_submission(submission)
        except (OSError, UserError):
            # Another submit was faster, or the disk is full: a job nobody knows of must not run on.
            self.cancel(submission)
            raise
        return submission

    def states(self, submissions: Iterable[Submission]) -> Mapping[str, JobState]:
        by_cluster: dict[str | None, list[Submission]] = {}
        for submission in submissions:
            by_cluster.setdefault(submission.cluster, []).append(submission)
        return {
            job_id: state
            for cluster, group in by_cluster.items()
            for job_id, state in self._states(cluster, group).items()
        }

    def cancel(self, submission: Submission) -> None:
        answer = self._ask(["scancel", *_on(submission.cluster), submission.job_id])
        ended = "already completing or completed" in answer.words
        if answer.code != 0 and not ended:
            raise SchedulerRefused(f"scancel did not cancel job {submission.job_id}: {answer.words}")
        with contextlib.suppress(OSError):  # a full disk must not keep a job from being stopped
            run_files.cancel_mark(submission).touch()

    def _sbatch(self, run_dir: Path, extra: Sequence[str]) -> tuple[str, str | None, float]:
        script = (run_dir / run_files.SCRIPT).read_text(encoding="utf-8")
        env = environment.for_sbatch(os.environ, script)
        submitted_at = time.time()
        argv = ["sbatch", "--parsable", *extra, run_files.SCRIPT]
        # Once: sbatch itself waits and retries, and a second job in the same directory would be worse than none.
        answer = _run(argv, env, self.timeout_seconds, run_dir)
        job = parse_job_id(answer.output) if answer.code == 0 else None
        if job is None and _may_have_taken(answer):
            job = self._find(run_dir, submitted_at, answer)
        if job is None:
            raise SchedulerRefused(f"sbatch refused the job: {answer.words}; the run directory is kept: {run_dir}")
        return *job, submitted_at

    def _find(self, run_dir: Path, since: float, late: _Answer) -> tuple[str, str | None]:
        """The job that a late answer hides: this user's latest one with the run directory to work in.

        Looked for some time, because a controller that wakes up may answer squeue before it takes the job. Raises
        SchedulerRefused where it does not turn up.
        """
        earliest = datetime.fromtimestamp(since) - _CLOCK_SLACK
        for _ in range(_LOOKS_FOR_A_LATE_JOB):
            answer = self._ask(["squeue", "-h", "-t", "all", "--me", "-o", LATE_JOB_FORMAT])
            found = parse_late_jobs(answer.output, run_dir, earliest) if answer.code == 0 else []
            if found:
                return str(max(found)), None
            time.sleep(_PAUSE_SECONDS)
        raise SchedulerRefused(
            f"SLURM did not answer in time ({late.words}), and the job is not seen in the queue; it may still turn "
            f"up: look with 'squeue --me' before submitting again. The run directory is kept: {run_dir}"
        )

    def _states(self, cluster: str | None, submissions: Sequence[Submission]) -> dict[str, JobState]:
        job_ids = ",".join(submission.job_id for submission in submissions)
        queue = self._ask(["squeue", *_on(cluster), "-h", "-r", "-t", "all", "-j", job_ids, "-o", SQUEUE_FORMAT])
        live = parse_squeue(queue.output) if queue.code == 0 else {}
        # An id squeue has forgotten is an error when it is asked for alone, and left out among others.
        answered = queue.code == 0 or "Invalid job id" in queue.words
        gone = [s for s in submissions if s.job_id not in live or live[s.job_id].phase not in ("pending", "running")]
        past = self._account(cluster, gone)
        states = {}
        for submission in submissions:
            row, record = live.get(submission.job_id), past.get(submission.job_id)
            words = f"SLURM does not know job {submission.job_id}" if answered else f"squeue: {queue.words}"
            states[submission.job_id] = _conclude(submission, row, record, answered, words)
        return states

    def _account(self, cluster: str | None, submissions: Sequence[Submission]) -> dict[str, Row]:
        """What the accounting knows; without slurmdbd, what the job completion file of `sacct -c` does."""
        if not submissions:
            return {}
        # From a day before: sacct otherwise looks at today only, and an older job may have had the same id.
        since = datetime.fromtimestamp(min(s.submitted_at for s in submissions)) - timedelta(days=1)
        jobs = ["-P", "-n", "-j", ",".join(s.job_id for s in submissions), "-o", SACCT_FIELDS]
        answer = self._ask(["sacct", *_on(cluster), "-X", "-D", "-S", f"{since:%Y-%m-%d}", *jobs])
        if answer.code != 0 and "storage is disabled" in answer.words:
            answer = self._ask(["sacct", "-c", *jobs])
        return parse_sacct(answer.output) if answer.code == 0 else {}

    def _ask(self, argv: list[str]) -> _Answer:
        """Run a command that changes nothing (or, scancel, may be repeated), again where SLURM did not answer."""
        env = environment.for_queries(os.environ)
        answer = _run(argv, env, self.timeout_seconds)
        for _ in range(self.tries - 1):
            if not _unanswered(answer):
                break
            time.sleep(_PAUSE_SECONDS)
            answer = _run(argv, env, self.timeout_seconds)
        return answer


def _conclude(submission: Submission, row: Row | None, record: Row | None, answered: bool, words: str) -> JobState:
    """One state from squeue's row, sacct's record and the job's own status.json."""
    known = row or record
    if known is None:
        return _own_word(submission) or _told_to_end(submission, answered) or JobState("unknown", reason=words)
    if known.phase in ("pending", "running"):
        if row is None and answered:
            # The controller has forgotten it, the accounting has not heard of its end (yet, or never).
            return _own_word(submission) or JobState("unknown", known.state, f"{words}; sacct says {known.state}")
        return JobState(
            known.phase,
            known.state,
            known.reason,
            expected_start=known.starts if known.phase == "pending" else None,
        )
    if known.phase == "succeeded":
        return _own_word(submission, known.state) or JobState(
            "unknown", known.state, f"SLURM says COMPLETED, but job {submission.job_id} left no status.json"
        )
    if known.phase == "failed":
        own = _own_word(submission)
        if own is None or own.phase != "failed":
            return JobState("failed", known.state, known.reason, record.exit_code if record else None)
        reason = "; ".join(part for part in (known.reason, own.reason) if part)
        return JobState("failed", known.state, reason, own.exit_code)
    return JobState(known.phase, known.state, known.reason)


def _own_word(submission: Submission, state: str = "") -> JobState | None:
    end = run_files.read_end(submission)
    if end is None:
        return None
    return JobState("succeeded" if end.succeeded else "failed", state, end.why, end.exit_code)


def _told_to_end(submission: Submission, answered: bool) -> JobState | None:
    """A task of an array that is cancelled while it waits leaves no trace in SLURM, not even in its accounting (seen
    with 22.05.8): then our own word counts."""
    if answered and run_files.cancel_mark(submission).exists():
        return JobState("cancelled", reason="cancelled with llmlaunch before it started")
    return None


def _on(cluster: str | None) -> list[str]:
    return ["-M", cluster] if cluster else []


def _may_have_taken(answer: _Answer) -> bool:
    return answer.code in (0, None) or any(words in answer.words for words in _LATE)


def _unanswered(answer: _Answer) -> bool:
    return answer.code is None or any(words in answer.words for words in (*_LATE, "Unable to contact"))


def _run(argv: Sequence[str], env: Mapping[str, str], timeout_seconds: float, cwd: Path | None = None) -> _Answer:
    try:
        done = subprocess.run(
            argv,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _Answer(None, "", f"{argv[0]} did not answer within {timeout_seconds:g} s")
    except OSError as error:
        raise UserError(
            f"{argv[0]} cannot be run ({error.strerror}); is this a SLURM machine? --local runs the job here"
        ) from error
    return _Answer(done.returncode, done.stdout, complaint(done.stderr) or f"{argv[0]} exit code {done.returncode}")
