"""A process by its number and start, and those below it (Linux)."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection


CAUGHT = re.compile(r"^SigCgt:\s*([0-9a-f]+)", re.MULTILINE)


class Child:
    """The process that has the number `pid` now; another that gets the same number later is not meant."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._started = _stat(pid)[1]

    def alive(self) -> bool:
        """Whether it runs: neither gone nor a zombie."""
        state, started, _ = _stat(self.pid)
        return state not in ("", "Z", "X") and started == self._started

    def signal(self, number: int) -> None:
        """Nothing where it is gone."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def kill_tree(child: Child) -> None:
    """SIGKILL to the process and all below it, itself first, so that it starts no more."""
    below = descendants(child.pid)
    child.signal(signal.SIGKILL)
    for pid in below:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def listeners(pid: int, number: int) -> list[int]:
    """The process, if it has a handler for signal `number`; else those nearest below it that have one."""
    if _catches(pid, number):
        return [pid]
    children = _children()
    found, rest = [], list(children.get(pid, []))
    for one in rest:
        if _catches(one, number):
            found.append(one)
        else:
            rest += children.get(one, [])
    return found


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, parents before their children; those that ended meanwhile may be among them."""
    children = _children()
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found[1:]


def _children() -> dict[int, list[int]]:
    """Every process of this machine by its parent."""
    found: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            found.setdefault(_stat(int(entry.name))[2], []).append(int(entry.name))
    return found


def _catches(pid: int, number: int) -> bool:
    """Whether it has a handler for the signal (SigCgt of proc(5))."""
    try:
        caught = CAUGHT.search(Path(f"/proc/{pid}/status").read_text(errors="replace"))
    except OSError:
        return False
    return caught is not None and bool(int(caught.group(1), 16) >> (number - 1) & 1)


def _stat(pid: int) -> tuple[str, str, int]:
    """State letter, start (clock ticks since boot), parent; "", "", -1 of a process that is not there (proc(5))."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return fields[0], fields[19], int(fields[1])
    except (OSError, IndexError, ValueError):
        return "", "", -1


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
