"""Each job in a forked process of its own, a few at a time; whatever becomes of one, there is an answer.

A process that the kernel ends, that hangs or that says nothing gives a failure for its job. SIGINT, SIGTERM, a reader
of stdout who has left, and the death of this process by any signal, end all that it started.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from failures import ERROR, failed

__all__ = ["Answer", "Job", "ReaderLeft", "answers_of", "end_on_signals"]

Job = dict[str, Any]
Answer = dict[str, Any]

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LONGEST_LOOK_SECONDS = 1.0
READ_BYTES = 2**20


class ReaderLeft(Exception):
    """Nobody reads the answers."""


@dataclass
class _Running:
    """A job under way: its process, the reading end of its pipe, and when it has had its time."""

    job: Job
    process: int
    pipe: int
    deadline: float
    said: bytearray = field(default_factory=bytearray)


def end_on_signals() -> None:
    """SIGTERM and SIGHUP end this process as an exit does, which ends what it started."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, frame: sys.exit(128 + received))


def answers_of(
    jobs: Sequence[Job], work: Callable[[Job], Answer], processes: int, seconds: float, reader: int | None = None
) -> Generator[Answer, None, None]:
    """One answer for each job, as each is done: what `work` gives, or {"name", "failure"}.

    `seconds` is the time a job has; `reader` a descriptor whose other end must stay open. Raises ReaderLeft.
    """
    waiting, running = list(jobs), list[_Running]()
    gc.collect()
    gc.freeze()  # a child's collector leaves alone, and does not copy, what was imported once for all
    try:
        while waiting or running:
            while waiting and len(running) < max(processes, 1):
                running.append(_start(waiting.pop(0), work, seconds, running))
            for one in _finished(running, reader):
                running.remove(one)
                yield _answer(one)
    finally:
        for one in running:
            _end(one)


def _start(job: Job, work: Callable[[Job], Answer], seconds: float, others: Sequence[_Running]) -> _Running:
    reading, writing = os.pipe()
    parent, process = os.getpid(), os.fork()
    if process:
        os.close(writing)
        os.set_blocking(reading, False)
        return _Running(job, process, reading, time.monotonic() + seconds)
    code = 1
    try:
        _die_with(parent)
        for descriptor in (reading, *(other.pipe for other in others)):
            os.close(descriptor)
        said = json.dumps(work(job)).encode()
        with os.fdopen(writing, "wb") as out:
            out.write(said)
        code = 0
    finally:
        os._exit(code)  # nothing of the parent's is run to its end twice


def _die_with(parent: int) -> None:
    """In a child: to be ended by the kernel when its parent is, and by the signals that the parent only passes on."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    if os.getppid() != parent:
        os._exit(1)


def _finished(running: Sequence[_Running], reader: int | None) -> list[_Running]:
    """Those that have said all, or have had their time; waits a moment for one."""
    poll = select.poll()
    for one in running:
        poll.register(one.pipe, select.POLLIN)
    if reader is not None:
        poll.register(reader, 0)  # errors alone
    ready = dict(poll.poll(LONGEST_LOOK_SECONDS * 1000))
    if reader is not None and ready.get(reader, 0) & (select.POLLERR | select.POLLHUP):
        raise ReaderLeft
    done = [one for one in running if one.pipe in ready and _read_to_the_end(one)]
    return done + [one for one in running if one not in done and time.monotonic() > one.deadline]


def _read_to_the_end(one: _Running) -> bool:
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(one.pipe, READ_BYTES):
            one.said += chunk
        return True
    return False


def _answer(one: _Running) -> Answer:
    late = time.monotonic() > one.deadline
    status = _end(one) if late else _reap(one)
    with contextlib.suppress(json.JSONDecodeError):
        answer: Answer = json.loads(one.said)
        return answer
    if late:
        why = "it took longer than the time that a rank has"
    elif os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        why = f"its process was ended by {signal.Signals(number).name}"
        why += ", as the kernel does where memory runs out" if number == signal.SIGKILL else ""
    else:
        why = f"its process ended with code {os.waitstatus_to_exitcode(status)} and without an answer"
    return {"name": one.job.get("name"), "failure": failed(ERROR, f"the rank was not traced: {why}")}


def _end(one: _Running) -> int:
    with contextlib.suppress(ProcessLookupError):
        os.kill(one.process, signal.SIGKILL)
    return _reap(one)


def _reap(one: _Running) -> int:
    os.close(one.pipe)
    return os.waitpid(one.process, 0)[1]
