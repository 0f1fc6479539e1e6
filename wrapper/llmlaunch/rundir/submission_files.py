"""The schemas of the files that say how a run was submitted, and what SLURM said of it (docs/run-files.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from . import file_names
from .files import read_object
from .schema import Count, Time, sound

if TYPE_CHECKING:
    from pathlib import Path

REFUSED = "refused"  # a phase


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


class JobEnd(TypedDict, total=False):
    """What SLURM said of a job that left no `status.json` of its own: how it ended, or that sbatch did not take it. The
    end counts for the job that it names, a refusal until there is a `submission.json`."""

    schema: int
    """1"""
    job_id: str | None
    """the last job of the submission; null if sbatch took none"""
    phase: str
    """`succeeded`, `failed`, `stopped`, `cancelled` or `refused`"""
    at: Time | None
    """of a refusal: when"""
    state: str
    """SLURM's own word, such as `NODE_FAIL`"""
    reason: str
    """in words; of a refusal what sbatch said"""
    exit_code: int | None
    """of the job, if it is known"""
    restarts: Count
    """how often SLURM had requeued it"""
    link: Count
    """its number in a chain, from 1; 0 outside a chain"""


def read_job_end(run_directory: Path) -> JobEnd:
    """Return what SLURM said of the last job; empty where nobody noted it. The version before had a file of its own for
    refusals."""
    noted = sound(JobEnd, read_object(run_directory / file_names.ENDED))
    earlier = None if noted else read_object(run_directory / file_names.EARLIER_REFUSAL)
    if earlier is not None:
        given = {"phase": REFUSED, "at": earlier.get("at"), "reason": earlier.get("words")}
        return sound(JobEnd, given) or JobEnd()
    return noted or JobEnd()
