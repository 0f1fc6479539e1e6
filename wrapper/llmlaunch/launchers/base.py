"""What every launcher does: take a run directory, say what became of it, stop it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, Protocol, get_args

from llmlaunch.rundir.values import is_attempt, job_of

Phase = Literal["pending", "running", "succeeded", "failed", "cancelled", "stopped", "refused", "unknown"]

PHASES: tuple[Phase, ...] = get_args(Phase)
ENDED: tuple[Phase, ...] = ("succeeded", "failed", "cancelled", "stopped")


@dataclass(frozen=True)
class Submission:
    """One run directory handed to a launcher; what `submission.json` holds."""

    launcher: str
    job_id: str
    """The (first) job; `12_3` where the run is one task of an array."""
    run_dir: Path
    submitted_at: float
    """Unix seconds."""
    cluster: str | None = None
    """slurm: the cluster that took the job, where sbatch names it. local: the host it was started on."""
    chain: tuple[str, ...] = ()
    """All jobs, where follow-up jobs were handed in with the first, which is among them; else empty."""
    earlier: tuple[Submission, ...] = ()
    """Those of the same directory before, oldest first; their own `earlier` is empty."""

    @property
    def jobs(self) -> tuple[str, ...]:
        return self.chain or (self.job_id,)

    def owns(self, attempt: str) -> bool:
        """Whether `attempt` (docs/run-directory.md) is one of this submission's jobs'.

        The seconds in a local attempt's name are the script's own clock and may be one later than ours, so there
        the process id decides.
        """
        if not is_attempt(attempt):
            return False
        job = job_of(attempt)
        if self.launcher == "local":
            return job.startswith("local-") and job.rpartition("-")[2] == self.job_id.rpartition("-")[2]
        return job in self.jobs


@dataclass(frozen=True)
class JobState:
    """What is known of a job now. `unknown` is neither running nor failed; `stopped` was told to, saved and ended;
    `refused` was never taken by the scheduler, and can be submitted again."""

    phase: Phase
    state: str = ""
    """The scheduler's own word, such as PENDING or OUT_OF_MEMORY; empty without a scheduler."""
    reason: str = ""
    exit_code: int | None = None
    """Known only of a job that succeeded, failed or was stopped."""
    expected_start: datetime | None = None
    """When SLURM expects a job that waits to start, in this machine's local time; it knows that of some only."""
    restarts: int = 0
    """How often the scheduler has put the job back into the queue."""
    link: int = 0
    """The job of a chain this speaks of, from 1 on; 0 where there is no chain."""

    @property
    def ended(self) -> bool:
        return self.phase in ENDED


class Launcher(Protocol):
    """`slurm` or `local`."""

    @property
    def name(self) -> str: ...

    def submit(self, run_dir: Path, extra: Sequence[str] = (), again: bool = False) -> Submission:
        """Start the job of a run directory; writes `run.id` and `submission.json` there.

        `extra` goes to sbatch before the script, where it wins over the script's own directives. With `again` a
        directory whose job has ended is submitted once more; the caller has looked that it has. Raises
        SchedulerRefused when the scheduler does not take the job, UserError when this is no run directory or it
        was submitted before. The run directory is kept in every case.
        """
        ...

    def states(self, submissions: Iterable[Submission]) -> Mapping[str, JobState]:
        """The state of each submission by job id. Never raises for one that is not found: that is `unknown`."""
        ...

    def cancel(self, submission: Submission) -> bool:
        """Stop the job, a chain's every one. Returns False where all of it had ended before, and was left alone. Raises
        UserError where it cannot be reached."""
        ...
