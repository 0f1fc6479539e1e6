"""Ends a local job: every process of it, in order first, then for good."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable

import psutil

__all__ = ["alive", "stop_job"]

_POLL_SECONDS = 0.1
_KILL_SECONDS = 10.0


def stop_job(leader: psutil.Process, kill_after_seconds: float) -> None:
    """TERM to the script, which hands it on; TERM to what outlives the script; at last KILL to all of it.

    Not to the whole group at once: torchrun would get it twice, from here and from train.sh, and a second TERM
    breaks off its orderly end. Its workers have sessions of their own, so the group alone is not the whole job.
    """
    job = _processes(leader, set())
    _each([leader], psutil.Process.terminate)
    told = False
    deadline = time.monotonic() + kill_after_seconds
    while time.monotonic() < deadline:
        job = _processes(leader, job)
        if not job:
            return
        if leader not in job and not told:
            _each(job, psutil.Process.terminate)
            told = True
        time.sleep(_POLL_SECONDS)
    deadline = time.monotonic() + _KILL_SECONDS
    # Again and again: a process may have started another between the look and the signal.
    while job and time.monotonic() < deadline:
        _each(job, psutil.Process.kill)
        time.sleep(_POLL_SECONDS)
        job = _processes(leader, job)


def alive(processes: Iterable[psutil.Process]) -> set[psutil.Process]:
    """Those that still run; a zombie does not, and neither does a stranger with a process id used again."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.add(process)
    return found


def _processes(leader: psutil.Process, known: set[psutil.Process]) -> set[psutil.Process]:
    """The job's living processes: those known before, the leader's group, and what any of them has started."""
    members = {process for process in psutil.process_iter() if _group(process) == leader.pid}
    children: set[psutil.Process] = set()
    for process in known | members | {leader}:
        with contextlib.suppress(psutil.Error):
            children.update(process.children(recursive=True))
    return alive(known | members | children | {leader})


def _group(process: psutil.Process) -> int | None:
    try:
        return os.getpgid(process.pid)
    except OSError:
        return None


def _each(processes: Iterable[psutil.Process], act: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            act(process)
