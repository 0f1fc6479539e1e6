"""The pace of ranks that train on a CPU: the share of a window in which a rank did not sleep.

In synchronous training every rank's step takes equally long. The slow rank is the one that never waits for another: it
computes, waits for a core, or is stopped, while the others sleep in a collective until it comes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .files import Record

WINDOW_SECONDS = 30.0
STOPPED = (b"T", b"t")  # of proc(5): by a signal, by a debugger


class WindowClock:
    """Numbers windows of wall-clock time, the same on all nodes: unix seconds divided by their length."""

    def __init__(self, seconds: float = WINDOW_SECONDS) -> None:
        self.seconds = seconds
        self._number: int | None = None
        self._whole = False  # seen from its start

    def ended(self) -> int | None:
        """Return the number of the window that has ended since the last call, -1 where it was not seen whole, as the
        first, and None where none has ended."""
        number, before = int(time.time() // self.seconds), self._number
        if number == before:
            return None
        self._number = number
        consecutive = before is not None and number == before + 1
        whole, self._whole = self._whole and consecutive, consecutive
        return before if before is not None and whole else -1


class RankPace:
    """Reads /proc alone. What is asked of a process is asked of its main thread, which computes and waits."""

    def __init__(self, seconds: float) -> None:
        self.clock = WindowClock(seconds)
        self._began_at = time.monotonic()
        self._began: dict[int, float] = {}  # by pid: seconds that it ran or waited for a core
        self._stops: dict[int, int] = {}
        self._samples = 0

    def sample(self, ranks: Iterable[tuple[int, int]]) -> Record | None:
        """Look at the ranks, each with its pid. Returns the event of a window that has ended, else None."""
        pids = dict(ranks)
        self._samples += 1
        for pid in pids.values():
            self._stops[pid] = self._stops.get(pid, 0) + (_state(pid) in STOPPED)
        number = self.clock.ended()
        if number is None:
            return None
        wall, now = time.monotonic() - self._began_at, {pid: _awake_seconds(pid) for pid in pids.values()}
        shares = [
            {"rank": rank, "busy": round(min(1.0, (awake - began) / wall + self._stops[pid] / self._samples), 3)}
            for rank, pid in sorted(pids.items())
            for awake, began in [(now[pid], self._began.get(pid))]
            if awake is not None and began is not None and wall > 0
        ]
        self._began = {pid: awake for pid, awake in now.items() if awake is not None}
        self._began_at, self._stops, self._samples = time.monotonic(), {}, 0
        if number < 0 or not shares:
            return None
        return {"event": "pace", "window": number, "seconds": self.clock.seconds, "devices": [], "ranks": shares}


def _state(pid: int) -> bytes:
    """Return the state letter of the main thread; empty where it is gone."""
    return _read(pid, "stat").rpartition(b")")[2].strip()[:1]


def _awake_seconds(pid: int) -> float | None:
    """Return for how long the main thread has run or waited for a core (schedstat: both in nanoseconds); where the
    kernel counts neither, how long it has run. None of a process that is gone."""
    try:
        running, waiting, _ = map(int, _read(pid, "schedstat").split())
        return (running + waiting) / 1e9
    except ValueError:
        fields = _read(pid, f"task/{pid}/stat").rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if len(fields) > 12 else None


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
