"""A process by its number and start, and those below it (Linux)."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


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


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, parents before their children; those that ended meanwhile may be among them."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            children.setdefault(_stat(int(entry.name))[2], []).append(int(entry.name))
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found[1:]


def _stat(pid: int) -> tuple[str, str, int]:
    """State letter, start (clock ticks since boot), parent; "", "", -1 of a process that is not there (proc(5))."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return fields[0], fields[19], int(fields[1])
    except (OSError, IndexError, ValueError):
        return "", "", -1
