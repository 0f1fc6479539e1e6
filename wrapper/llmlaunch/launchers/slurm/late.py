"""Finds the jobs of a run directory that a submit handed in without living to write them down."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from llmlaunch.launchers.slurm.commands import Answer, SlurmCommands
from llmlaunch.launchers.slurm.text import (
    LATE_JOB_FORMAT,
    PAST_JOB_FIELDS,
    PAST_JOB_FIELDS_BEFORE_21_08,
    Found,
    parse_late_jobs,
    parse_past_jobs,
)
from llmlaunch.rundir.identifiers import is_attempt, is_slurm_job, job_of

__all__ = ["Wanted", "comment_of", "find_jobs", "look_for_jobs"]

_LOOKS = 10
_SILENCE_SECONDS = 60.0
_PAUSE_SECONDS = 1.0
_ANY = "BF,CA,CD,DL,F,NF,OOM,PD,PR,R,S,TO"
_CLOCK_SLACK = timedelta(minutes=1)


@dataclass(frozen=True)
class Wanted:
    """Which jobs are meant: this run's, submitted since, and none of those that are `known`."""

    run_dir: Path
    run_id: str
    since: float
    """Unix seconds, when the submit began."""
    known: frozenset[str]
    clusters: Sequence[str] = ()
    """`-M` and its value, where the job was not meant for this cluster alone."""

    @property
    def mark(self) -> str:
        return f"llmlaunch={self.run_id}"

    @property
    def earliest(self) -> datetime:
        return datetime.fromtimestamp(self.since) - _CLOCK_SLACK


Job = tuple[str, str | None]
"""Its id, and its cluster where that is named."""


def comment_of(run_id: str, own: str | None) -> str:
    """The comment a job carries: the recipe's own, if any, then the run's id."""
    return f"{own} llmlaunch={run_id}" if own else f"llmlaunch={run_id}"


def look_for_jobs(slurm: SlurmCommands, wanted: Wanted) -> tuple[list[Job], Answer]:
    """The jobs, looked for ten times, because a controller that wakes up may answer squeue before it takes the job; and
    squeue's last answer. One that stays silent is waited for a minute."""
    once = replace(slurm, tries=1)
    slurm.say(f"looking for a job of {wanted.run_dir} that SLURM may have taken without saying so")
    silent_until, answered = time.monotonic() + _SILENCE_SECONDS, 0
    while True:
        jobs, answer = find_jobs(once, wanted)
        answered += answer.code == 0
        refused = answer.code != 0 and not (answer.late or answer.unreached)
        silent = answer.code != 0 and time.monotonic() > silent_until
        if jobs or refused or silent or answered == _LOOKS:
            return jobs, answer
        time.sleep(_PAUSE_SECONDS)


def find_jobs(slurm: SlurmCommands, wanted: Wanted) -> tuple[list[Job], Answer]:
    """The jobs by squeue, by sacct and by the attempts in the directory, in the order of their ids; squeue's answer."""
    queue = slurm.start(["squeue", *wanted.clusters, "-t", "all", "--me", "-o", LATE_JOB_FORMAT])
    past = _past(slurm, wanted)
    answer = slurm.insist(queue)
    now = []
    if answer.code == 0:
        now = parse_late_jobs(answer.output, wanted.mark, wanted.run_dir, wanted.earliest)
    found = [*(Found(job, False) for job in _attempted(wanted)), *past, *now]
    # By where it works only where no comment says more: somebody may have submitted one by hand.
    new = [one for one in found if str(one.job) not in wanted.known]
    jobs = {one.job: one.cluster for one in [one for one in new if one.marked] or new}  # squeue, the last, has clusters
    return [(str(job), jobs[job]) for job in sorted(jobs)], answer


def _past(slurm: SlurmCommands, wanted: Wanted) -> list[Found]:
    """By the accounting, which still knows jobs that the controller has forgotten; without it, by `sacct -c`."""
    since = (wanted.earliest - timedelta(days=1)).strftime("%Y-%m-%d")
    # Without the states sacct leaves out a job that never started (seen with 22.05.8).
    argv = [
        "sacct",
        *wanted.clusters,
        "-X",
        "-P",
        "-n",
        "-u",
        str(os.getuid()),
        "-S",
        since,
        "-E",
        "now",
        "-s",
        _ANY,
        "-o",
    ]
    answer = slurm.ask([*argv, PAST_JOB_FIELDS])
    if "Invalid field" in answer.words:
        answer = slurm.ask([*argv, PAST_JOB_FIELDS_BEFORE_21_08])
    elif "storage is disabled" in answer.words:
        answer = slurm.ask(["sacct", "-c", "-P", "-n", "-S", since, "-o", "JobID,Start,WorkDir"])
    return parse_past_jobs(answer.output, wanted.mark, wanted.run_dir, wanted.earliest) if answer.code == 0 else []


def _attempted(wanted: Wanted) -> list[int]:
    """By the folders jobs make when they start."""
    found = set()
    for folder in wanted.run_dir.glob("attempts/*"):
        job = job_of(folder.name)
        if is_attempt(folder.name) and is_slurm_job(job) and folder.lstat().st_mtime >= wanted.earliest.timestamp():
            found.add(int(job.partition("_")[0]))
    return sorted(found)
