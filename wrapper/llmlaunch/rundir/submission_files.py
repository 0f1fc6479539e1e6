"""The schemas of the files about a run's submission and about SLURM's report of its end (docs/run-files.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from . import file_names
from .files import read_object
from .schema import Count, Time, sound

if TYPE_CHECKING:
    from pathlib import Path

REFUSED = "refused"  # a phase


class SubmittedJob(TypedDict, total=False):
    """A job, or a chain of jobs, that was submitted."""

    launcher: str
    """launcher that runs the job: `slurm` or `local`"""
    job_id: str
    """id of the first job; `12_3` if the run is one task of an array"""
    submitted_at: Time | None
    """time of submission"""
    cluster: str | None
    """with SLURM the cluster that accepted the job, if sbatch named one; locally the host on which the job was
    started"""
    chain: list[str]
    """ids of all jobs; absent unless follow-up jobs were submitted with the first one"""


class SubmissionFile(SubmittedJob, total=False):
    """The job that runs this directory. The file is absent if llmlaunch never submitted the run."""

    schema: int
    """version of this format: 1"""
    earlier: list[SubmittedJob]
    """submissions before this one, oldest first; absent if there were none"""


class JobEnd(TypedDict, total=False):
    """What SLURM reported about a job that wrote no `status.json`: how it ended, or that sbatch refused it.
    An end applies to the job that it names; a refusal applies until there is a `submission.json`."""

    schema: int
    """version of this format: 1"""
    job_id: str | None
    """id of the submission's last job; null if sbatch refused the job"""
    phase: str
    """outcome: `succeeded`, `failed`, `stopped`, `cancelled` or `refused`"""
    at: Time | None
    """time of the refusal; only if `phase` is `refused`"""
    state: str
    """job state as SLURM names it, such as `NODE_FAIL`"""
    reason: str
    """reason in words; for a refusal the message of sbatch"""
    exit_code: int | None
    """exit code of the job; null if unknown"""
    restarts: Count
    """number of times SLURM had requeued the job"""
    link: Count
    """number of the job in its chain, from 1; 0 outside a chain"""


def read_job_end(run_directory: Path) -> JobEnd:
    """Return what SLURM reported about the last job; empty if nobody recorded it. The previous version had a separate
    file for refusals."""
    noted = sound(JobEnd, read_object(run_directory / file_names.ENDED))
    earlier = None if noted else read_object(run_directory / file_names.EARLIER_REFUSAL)
    if earlier is not None:
        given = {"phase": REFUSED, "at": earlier.get("at"), "reason": earlier.get("words")}
        return sound(JobEnd, given) or JobEnd()
    return noted or JobEnd()
