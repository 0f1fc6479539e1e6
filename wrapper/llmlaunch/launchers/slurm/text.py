"""What sbatch, squeue and sacct print, as text.

Text and never --json: its shape changed in 23.11 and 24.05, and `squeue --json` ignores -j in 22.05. Every format
is given explicitly, because SQUEUE_FORMAT and SACCT_FORMAT change the defaults.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from llmlaunch.launchers.base import Phase
from llmlaunch.rundir.foreign_values import is_whole_number

SQUEUE_FORMAT = "JobArrayID:|,State:|,RestartCnt:|,StartTime:|,Reason:|"
"""For `squeue -O`: job id, state, how often it was requeued, start (expected, of one that waits), reason. Asked with
`-r`, each task of an array is a line, also where several wait; its id is then `<array id>_<index>`."""

LATE_JOB_FORMAT = "%F|%V|%Z|%k"
"""For `squeue -o`: job id (an array's tasks share it), when it was submitted, where it works, its comment."""

OWNER_FORMAT = "%F|%U|%Z|%k"
"""For `squeue -o`: job id (an array's tasks share it), its user's id, where it works, its comment."""

QUEUED_SCRIPT_FORMAT = "%F|%V|%Z|%o"
"""For `squeue -o`: job id (an array's tasks share it), when it was submitted, where it works, the script as it was
typed: relative to where sbatch was called, which is where it works unless an option says otherwise."""

SACCT_FIELDS = "JobID,State,ExitCode"

PAST_JOB_FIELDS = "JobID,Submit,WorkDir,Comment,SubmitLine"
"""The comment stands in SubmitLine (from 21.08 on), too: sacct keeps Comment only where the site asks for it."""

PAST_JOB_FIELDS_BEFORE_21_08 = "JobID,Submit,WorkDir,Comment"

# Job states of squeue(1) and sacct(1), by what they mean for someone who waits.
_STATES: Mapping[Phase, tuple[str, ...]] = {
    "pending": ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"),
    "running": ("RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED"),
    "succeeded": ("COMPLETED",),
    "failed": ("BOOT_FAIL", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"),
    "cancelled": ("CANCELLED", "REVOKED"),
}
_PHASE_OF: Mapping[str, Phase] = {state: phase for phase, states in _STATES.items() for state in states}

# Of an array's tasks the one that says most about the whole: still going on before gone wrong before done.
_TELLING: tuple[Phase, ...] = ("running", "pending", "failed", "cancelled", "unknown", "succeeded")


@dataclass(frozen=True)
class Row:
    """One job, or one task of an array, as squeue or sacct shows it."""

    state: str
    reason: str = ""
    exit_code: int | None = None
    starts: datetime | None = None
    """When it started, or is expected to; the local time of this machine."""
    restarts: int = 0
    by: str = ""
    """User id of who cancelled it, where sacct says."""

    @property
    def phase(self) -> Phase:
        return _PHASE_OF.get(self.state, "unknown")


Rows = Mapping[str, Row]
"""By job id as SLURM shows it: `12`, of an array's tasks `12_3`."""


def row_of(rows: Rows, job_id: str) -> Row | None:
    """The row of a job or of one task; of an array asked for as a whole, the task's that says most about it."""
    if job_id in rows:
        return rows[job_id]
    tasks = [row for name, row in rows.items() if name.startswith(f"{job_id}_")]
    return min(tasks, key=lambda row: _TELLING.index(row.phase), default=None)


def parse_job_id(text: str) -> tuple[str, str | None] | None:
    """Job id and cluster from `sbatch --parsable`: `12` or `12;cluster`, maybe below a site's own greeting."""
    for line in reversed(text.splitlines()):
        match = re.fullmatch(r"(\d+)(?:;(\S+))?", line.strip())
        if match:
            return match[1], match[2]
    return None


@dataclass(frozen=True)
class JobMatch:
    """A job that may be the one looked for. It is `marked` if its comment names the run; else its folder and its submit
    time match."""

    job: int
    marked: bool
    cluster: str | None = None


def parse_late_jobs(text: str, mark: str, work_dir: Path, earliest: datetime) -> list[JobMatch]:
    """Jobs of `squeue -o LATE_JOB_FORMAT` whose comment has the word `mark`, or that work in `work_dir`, were submitted
    since `earliest`, and carry no other run's mark."""
    cluster: str | None = None
    matches = []
    for line in text.splitlines():
        if line.startswith("CLUSTER: "):  # squeue -M names each cluster before its jobs
            cluster = line.removeprefix("CLUSTER: ").strip()
        fields = line.split("|", 2)
        if len(fields) == 3 and is_whole_number(fields[0]):
            matches += _match_of(
                JobMatch(int(fields[0]), False, cluster), fields[1], fields[2], mark, work_dir, earliest
            )
    return matches


def parse_queued_scripts(text: str, script: Path) -> list[tuple[str, float]]:
    """Return the jobs of `squeue -h -o QUEUED_SCRIPT_FORMAT` that run `script`, each with the unix seconds in which it
    was submitted, the newest last."""
    jobs = []
    for line in text.splitlines():
        fields = line.split("|", 3)
        submitted_at = _time(fields[1]) if len(fields) == 4 else None
        if submitted_at is None or not is_whole_number(fields[0]):
            continue
        if os.path.realpath(os.path.join(fields[2], fields[3])) == str(script):  # noqa: PTH118 (any text is a path here)
            jobs.append((fields[0], submitted_at.timestamp()))
    return sorted(jobs, key=lambda job: int(job[0]))


def parse_past_jobs(text: str, mark: str, work_dir: Path, earliest: datetime) -> list[JobMatch]:
    """Return the same from `sacct -X -P -n -o PAST_JOB_FIELDS` or from `sacct -c -o JobID,Start,WorkDir`."""
    matches = []
    for line in text.splitlines():
        fields = line.split("|", 2)
        job = re.match(r"\d+", fields[0])
        if len(fields) == 3 and job is not None:
            matches += _match_of(JobMatch(int(job[0]), False), fields[1], fields[2], mark, work_dir, earliest)
    return matches


def _match_of(job: JobMatch, at: str, rest: str, mark: str, work_dir: Path, earliest: datetime) -> list[JobMatch]:
    """Return the job if it matches, else nothing. `rest` holds its working directory, then its comment."""
    if _has_word(rest, mark):
        return [replace(job, marked=True)]
    here = rest == str(work_dir) or rest.startswith(f"{work_dir}|")
    submitted_at, foreign = _time(at), "llmlaunch=" in rest.removeprefix(str(work_dir))
    return [job] if here and not foreign and submitted_at is not None and submitted_at >= earliest else []


def strange_jobs(text: str, uid: int, marks: Sequence[str], work_dirs: Sequence[Path]) -> list[str]:
    """Jobs of `squeue -h -o OWNER_FORMAT` that are another user's, or that neither carry one of `marks` in their
    comment nor work in one of `work_dirs`."""
    strange = []
    for line in text.splitlines():
        fields = line.split("|", 2)
        if len(fields) != 3 or not is_whole_number(fields[0]):
            continue
        job, user, rest = fields
        here = any(rest == str(folder) or rest.startswith(f"{folder}|") for folder in work_dirs)
        if user.strip() != str(uid) or not (here or any(_has_word(rest, mark) for mark in marks)):
            strange.append(job)
    return list(dict.fromkeys(strange))


def parse_squeue(text: str) -> dict[str, Row]:
    """Return rows by job id from the output of `squeue -h -r -O SQUEUE_FORMAT`."""
    rows = {}
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|", 4)]
        if len(fields) == 5:
            job, state, restarts, starts, reason = fields
            reason = reason.removesuffix("|")
            count = int(restarts) if is_whole_number(restarts) else 0
            rows[_job(job)] = Row(
                _first_word(state), "" if reason == "None" else reason, starts=_time(starts), restarts=count
            )
    # SLURM 26.05 shows tasks that were cancelled before they began by their array's own number: one more of its tasks.
    for array in {job.partition("_")[0] for job in rows if "_" in job} & rows.keys():
        rows[f"{array}_"] = rows.pop(array)
    return rows


def parse_sacct(text: str) -> dict[str, Row]:
    """Rows by job id, from `sacct -X -D -P -n -o SACCT_FIELDS`. Of a requeued job's rows (-D) the last counts, and the
    others are its restarts. Tasks that never began are listed together (`12_[4-6]`), also some that have since."""
    last: dict[str, Row] = {}
    together: dict[str, Row] = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) != 3:
            continue
        by = re.fullmatch(r"CANCELLED by (\d+)", fields[1].strip())
        row = Row(_first_word(fields[1]), exit_code=_exit_code(fields[2]), by=by[1] if by else "")
        if "[" in fields[0]:
            together.update(dict.fromkeys(_tasks(fields[0]), row))
        else:
            job = _job(fields[0])
            last[job] = replace(row, restarts=last[job].restarts + 1 if job in last else 0)
    return {**together, **last}


def _first_word(state: str) -> str:
    """`CANCELLED by 1000` -> `CANCELLED`; a trailing + marks a word cut to its column's width."""
    words = state.split()
    return words[0].rstrip("+") if words else ""


def _exit_code(text: str) -> int | None:
    """`5:0` -> 5; `0:9` (ended by signal 9) -> 137, as a shell has it."""
    match = re.fullmatch(r"(\d+):(\d+)", text.strip())
    if not match:
        return None
    code, signal = int(match[1]), int(match[2])
    return 128 + signal if signal else code


def _time(text: str) -> datetime | None:
    """`2026-11-21T13:41:58`; None for N/A and what else is no time."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def _job(text: str) -> str:
    """`12_3`, `12+0` (one part of a job of several), `12.batch` -> the job or task."""
    return re.split(r"[+.]", text.strip())[0]


def _tasks(text: str) -> list[str]:
    """`12_[1,4-6%2]` -> 12_1, 12_4, 12_5, 12_6; as far as it can be read."""
    match = re.fullmatch(r"(\d+)_\[([^\]%]*)(?:%\d+)?\]", text.strip())
    if match is None:
        return []
    tasks: list[str] = []
    for part in match[2].split(","):
        ends = re.fullmatch(r"(\d+)(?:-(\d+))?(?::(\d+))?", part.strip())
        if ends:
            first, to, step = int(ends[1]), int(ends[2] or ends[1]), int(ends[3] or 1)
            tasks += [f"{match[1]}_{number}" for number in range(first, to + 1, max(1, step))]
    return tasks


def _has_word(text: str, mark: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(mark)}(?![\w.-])", text) is not None
