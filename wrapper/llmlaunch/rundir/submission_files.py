"""The schemas of the files that say how a run was submitted, and what SLURM said of it (docs/run-files.md)."""

from __future__ import annotations

from typing import TypedDict

from .schema import Count, Time


class SubmittedJob(TypedDict, total=False):
    """A job, or a chain of jobs, that a launcher took."""

    launcher: str
    """`slurm` or `local`"""
    job_id: str
    """the first job; `12_3` where the run is one task of an array"""
    submitted_at: Time | None
    """when it was submitted"""
    cluster: str | None
    """SLURM: the cluster that took the job, where sbatch names it; local: the host it was started on"""
    chain: list[str]
    """all jobs, where follow-up jobs were submitted with the first; else absent"""


class SubmissionFile(SubmittedJob, total=False):
    """Which job runs this directory. Absent where it was never submitted by llmlaunch."""

    schema: int
    """1"""
    earlier: list[SubmittedJob]
    """the submissions before it, oldest first; absent if there were none"""


class SbatchRefusal(TypedDict, total=False):
    """A submission that sbatch did not take. It counts until there is a `submission.json`."""

    schema: int
    """1"""
    at: Time | None
    """when"""
    words: str
    """what sbatch said"""


class JobEnd(TypedDict, total=False):
    """How a job ended that left no `status.json` of its own, as SLURM said. It counts for the job that it names."""

    schema: int
    """1"""
    job_id: str
    """the last job of the submission"""
    phase: str
    """`succeeded`, `failed`, `stopped`, `cancelled` or `lost`"""
    state: str
    """SLURM's own word, such as `NODE_FAIL`"""
    reason: str
    """in words"""
    exit_code: int | None
    """of the job, if it is known"""
    restarts: Count
    """how often SLURM had requeued it"""
    link: Count
    """its number in a chain, from 1; 0 outside a chain"""
