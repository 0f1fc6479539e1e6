"""Processes of this machine as /proc shows them (Linux): one of them, those below it, and those of our job."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ..rundir.foreign_values import is_whole_number

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

CAUGHT_SIGNALS = re.compile(r"^SigCgt:\s*([0-9a-f]+)", re.MULTILINE)
# SLURM's cgroups: /slurm/uid_1000/job_7/step_0/task_0, /system.slice/slurmstepd.scope/job_7/step_0/user/task_0
JOB_CGROUP = re.compile(r"^\d+:[^:\n]*:(/(?:[^/\n]+/)*?job_\d+)(?=/|$)", re.MULTILINE)
MOST_GENERATIONS = 64  # from a data loader up to the job's script there are five


class Process:
    """The process that has the number `pid` now; another that gets the same number later is not meant."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._started = _stat(pid)[1]

    def alive(self) -> bool:
        """Whether the process runs: neither gone nor a zombie."""
        state, started, _ = _stat(self.pid)
        return state not in ("", "Z", "X") and started == self._started

    def signal(self, number: int) -> None:
        """Send the signal; a process that is gone is left alone."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class JobProcesses:
    """Which processes belong to our job. The driver lists those of every job, by numbers that may be of another pid
    namespace. Our job is what this process and its parent, which also starts the trainers, belong to."""

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._cgroup = _job_cgroup("self")

    def owns(self, pid: int, trainers: Collection[int]) -> bool:
        """Whether `pid` exists here and is of this job: by its cgroup where SLURM made one, else as a descendant of
        our parent or of `trainers`."""
        if self._cgroup is not None:
            return _job_cgroup(str(pid)) == self._cgroup
        for _ in range(MOST_GENERATIONS):
            if (pid == self._parent and pid > 1) or pid in trainers:
                return Path(f"/proc/{pid}").exists()
            pid = parent_of(pid)
            if pid <= 0:
                return False
        return False


def listeners(pid: int, number: int) -> list[int]:
    """Return the process if it has a handler for signal `number`, else those nearest below it that have one."""
    if _catches(pid, number):
        return [pid]
    children = _children()
    listening, rest = [], list(children.get(pid, []))
    for child in rest:
        if _catches(child, number):
            listening.append(child)
        else:
            rest += children.get(child, [])
    return listening


def parent_of(pid: int) -> int:
    """Return the parent's process id; -1 of a process that is not there."""
    return _stat(pid)[2]


def all_pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if is_whole_number(entry.name))


def _children() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for pid in all_pids():
        children.setdefault(parent_of(pid), []).append(pid)
    return children


def _catches(pid: int, number: int) -> bool:
    caught = CAUGHT_SIGNALS.search(_read(str(pid), "status"))
    return caught is not None and bool(int(caught.group(1), 16) >> (number - 1) & 1)


def _job_cgroup(pid: str) -> str | None:
    match = JOB_CGROUP.search(_read(pid, "cgroup"))
    return match.group(1) if match is not None else None


def _stat(pid: int) -> tuple[str, str, int]:
    """Return state letter, start (clock ticks since boot) and parent; "", "", -1 of a process that is not there. The
    name before them in proc(5)'s line is in brackets, and may hold blanks and brackets of its own."""
    fields = _read(str(pid), "stat").rpartition(")")[2].split()
    try:
        return fields[0], fields[19], int(fields[1])
    except (IndexError, ValueError):
        return "", "", -1


def _read(pid: str, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
