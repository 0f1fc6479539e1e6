"""What sbatch, squeue and sacct print, as text.

Text and never --json: its shape changed in 23.11 and 24.05, and `squeue --json` ignores -j in 22.05. Every format
is given explicitly, because SQUEUE_FORMAT and SACCT_FORMAT change the defaults.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from llmlaunch.launchers.base import Phase

__all__ = [
    "LATE_JOB_FORMAT",
    "SACCT_FIELDS",
    "SQUEUE_FORMAT",
    "Row",
    "complaint",
    "parse_job_id",
    "parse_late_jobs",
    "parse_sacct",
    "parse_squeue",
]

SQUEUE_FORMAT = "%i|%F|%T|%S|%r"
"""Job id, array's id (the tasks share it), state, start (expected, of one that waits), reason. Asked with `-r`, each
task of an array is a line, also where several wait; `%i` is then `<array id>_<index>`."""

LATE_JOB_FORMAT = "%F|%V|%Z"
"""Job id, when it was submitted, the directory it works in."""

SACCT_FIELDS = "JobID,State,ExitCode"

# Job states of squeue(1) and sacct(1), by what they mean for someone who waits.
_STATES: Mapping[Phase, tuple[str, ...]] = {
    "pending": (
        "PENDING",
        "CONFIGURING",
        "REQUEUED",
        "REQUEUE_FED",
        "REQUEUE_HOLD",
        "RESV_DEL_HOLD",
        "SPECIAL_EXIT",
    ),
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
    """One job as squeue or sacct shows it."""

    state: str
    reason: str = ""
    exit_code: int | None = None
    starts: datetime | None = None
    """When it started, or is expected to; the local time of this machine."""

    @property
    def phase(self) -> Phase:
        return _PHASE_OF.get(self.state, "unknown")


def parse_job_id(text: str) -> tuple[str, str | None] | None:
    """Job id and cluster from `sbatch --parsable`: `12` or `12;cluster`, maybe below a site's own greeting."""
    for line in reversed(text.splitlines()):
        match = re.fullmatch(r"(\d+)(?:;(\S+))?", line.strip())
        if match:
            return match[1], match[2]
    return None


def parse_late_jobs(text: str, work_dir: Path, earliest: datetime) -> list[int]:
    """Ids of the jobs that work in `work_dir` and were submitted since, from `squeue -h -o LATE_JOB_FORMAT`."""
    rows = (line.split("|", 2) for line in text.splitlines() if line.count("|") >= 2)
    return [
        int(job_id)
        for job_id, submitted, directory in rows
        if directory.strip() == str(work_dir) and datetime.fromisoformat(submitted) >= earliest
    ]


def parse_squeue(text: str) -> dict[str, Row]:
    """Rows by job id, from `squeue -h -r -o SQUEUE_FORMAT`: of an array each task, and the array as a whole."""
    rows = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|", 4)]
        if len(fields) == 5:
            task, job, state, starts, reason = fields
            row = Row(_first_word(state), "" if reason == "None" else reason, starts=_time(starts))
            rows += [(name, row) for name in dict.fromkeys((task, job))]
    return _one_each(rows)


def parse_sacct(text: str) -> dict[str, Row]:
    """Rows by job id, from `sacct -X -P -n -o SACCT_FIELDS`: of an array each task that started, and the array as a
    whole. Of a requeued job's rows (-D) the last counts."""
    last: dict[str, Row] = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) == 3:
            row = Row(_first_word(fields[1]), exit_code=_exit_code(fields[2]))
            last.pop(fields[0], None)  # so that the order is that of the last rows
            last[fields[0]] = row
    return _one_each(
        (name, row)
        for job_id, row in last.items()
        for name in dict.fromkeys((job_id.split("+")[0], re.split(r"[_+.]", job_id)[0]))
    )


def complaint(stderr: str) -> str:
    """A command's own words on one line, without `sbatch: error:` before each."""
    lines = (re.sub(r"^\w+: (error: )?", "", line.strip()) for line in stderr.splitlines())
    return "; ".join(line for line in lines if line)


def _first_word(state: str) -> str:
    """`CANCELLED by 1000` -> `CANCELLED`; a trailing + marks a word cut to its column's width."""
    words = state.split()
    return words[0].rstrip("+") if words else ""


def _time(text: str) -> datetime | None:
    """`2026-11-21T13:41:58`; None for N/A and what else is no time."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def _exit_code(text: str) -> int | None:
    """`5:0` -> 5; `0:9` (ended by signal 9) -> 137, as a shell has it."""
    match = re.fullmatch(r"(\d+):(\d+)", text.strip())
    if not match:
        return None
    code, signal = int(match[1]), int(match[2])
    return 128 + signal if signal else code


def _one_each(rows: Iterable[tuple[str, Row]]) -> dict[str, Row]:
    jobs: dict[str, Row] = {}
    for job_id, row in rows:
        known = jobs.get(job_id)
        if known is None or _TELLING.index(row.phase) < _TELLING.index(known.phase):
            jobs[job_id] = row
    return jobs
