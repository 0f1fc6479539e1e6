"""Work that may take too long, all memory or the process itself, done in a child process.

A signal handler runs only between two instructions of Python: a regular expression or the text of a nested list is not
ended by it, nor is a read of a file system that hangs. A thread keeps the interpreter's lock meanwhile. A child is
killed, or left to the kernel where it cannot be, and whoever waits for it goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


_CHUNK_BYTES = 2**16


class WorkResult(NamedTuple):
    """`value` is the last thing that the work told or returned, None where it came to nothing; `problem` says in words
    why it did not end, and is empty where it did."""

    value: Any
    problem: str


def answer_within(seconds: float, work: Callable[[Callable[[Any], None]], Any]) -> WorkResult:
    """Do `work` in a child process, for at most `seconds`.

    It gets a function that it may tell values on its way, in case it does not come to the end; these and what it
    returns must be JSON. Whatever it raises is the problem, and nothing is raised here.
    """
    try:
        reader, writer = os.pipe()
    except OSError as error:
        return WorkResult(None, f"{type(error).__name__}: {error}")
    try:
        child = os.fork()
    except OSError as error:
        os.close(reader)
        os.close(writer)
        return WorkResult(None, f"{type(error).__name__}: {error}")
    if child == 0:
        _work_and_leave(work, writer, reader, seconds)
    os.close(writer)
    try:
        lines, in_time = _lines_until(reader, time.monotonic() + seconds)
    finally:
        os.close(reader)
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)
    ended = _how_it_ended(child)
    return _answer(lines, "" if in_time else f"not done within {seconds:g} s", ended)


def _work_and_leave(work: Callable[[Callable[[Any], None]], Any], writer: int, reader: int, seconds: float) -> None:
    """The life of the child. Never returns."""
    try:
        os.close(reader)
        _let_go(writer)
        signal.alarm(int(seconds) + 2)  # where nobody is left to kill it

        def tell(value: Any) -> None:
            _write(writer, {"value": value})

        try:
            _write(writer, {"value": work(tell), "problem": ""})
        except BaseException as error:
            _write(writer, {"problem": f"{type(error).__name__}: {error}"[:400]})
    finally:
        os._exit(0)


def _let_go(kept: int) -> None:
    """Keep neither the job's output open nor what else was: whoever reads the other end waits until it is closed. The
    signals that end a job are its parent's concern."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - one object less for each
        if int(name) > 2 and int(name) != kept:
            with contextlib.suppress(OSError):
                os.close(int(name))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _write(writer: int, message: Any) -> None:
    content = json.dumps(message).encode() + b"\n"
    while content:
        content = content[os.write(writer, content) :]


def _lines_until(reader: int, until: float) -> tuple[list[bytes], bool]:
    """Return the whole lines that came, and whether the other side closed before `until`."""
    ready = select.poll()
    ready.register(reader, select.POLLIN)
    content = bytearray()
    closed = False
    while not closed and time.monotonic() < until:
        if ready.poll(max(0.0, until - time.monotonic()) * 1000):
            chunk = os.read(reader, _CHUNK_BYTES)
            content += chunk
            closed = not chunk
    return bytes(content).split(b"\n")[:-1], closed


def _how_it_ended(child: int) -> str:
    """Return `was ended by SIGSEGV` of a child that a signal ended before it was killed; empty of any other. One that
    is stuck in the kernel is not waited for."""
    for _ in range(20):
        with contextlib.suppress(OSError):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
                return f"was ended by signal {number}" if number else ""
            time.sleep(0.01)
            continue
        break
    return ""


def _answer(lines: list[bytes], too_late: str, ended: str) -> WorkResult:
    value, problem = None, too_late or ended or "ended without a word"
    for line in lines:
        message = json.loads(line)
        value = message.get("value", value)
        problem = message.get("problem", problem)
    return WorkResult(value, problem)
