"""Which processes of this machine belong to our job: the driver lists those of every job, by numbers that may be of
another pid namespace."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

# SLURM's cgroups: /slurm/uid_1000/job_7/step_0/task_0, /system.slice/slurmstepd.scope/job_7/step_0/user/task_0
JOB = re.compile(r"^\d+:[^:\n]*:(/(?:[^/\n]+/)*?job_\d+)(?=/|$)", re.MULTILINE)
MOST_STEPS = 64  # from a data loader up to the job's script there are five


class Job:
    """Ours, as seen from this process and from its parent, which starts the trainers too."""

    def __init__(self) -> None:
        self._parent = os.getppid()
        found = JOB.search(_read("self", "cgroup"))
        self._cgroup = found.group(1) if found is not None else None

    def owns(self, pid: int, trainers: Collection[int]) -> bool:
        """Whether `pid` exists here and is of this job: by its cgroup where SLURM made one, else as a descendant of
        our parent or of `trainers`."""
        if self._cgroup is not None:
            found = JOB.search(_read(str(pid), "cgroup"))
            return found is not None and found.group(1) == self._cgroup
        for _ in range(MOST_STEPS):
            if pid == self._parent or pid in trainers:
                return Path(f"/proc/{pid}").exists()
            pid = _parent_of(pid)
            if pid <= 0:
                return False
        return False


def _parent_of(pid: int) -> int:
    """0 where there is none, or no such process."""
    words = _read(str(pid), "stat").rpartition(")")[2].split()  # the name before it may hold anything
    return int(words[1]) if len(words) > 1 else 0


def _read(pid: str, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
