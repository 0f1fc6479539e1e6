"""`observe`: one line in front of somebody's own trainer. The command runs as it would without it, and beside it the
observer (observer.py) writes down what it used and how it ended.

This process only waits. Its child is the command, with the same standard streams, process group and signals; the
command's end becomes its own. Everything that touches a file is done by the observer, which may die or hang.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .files import say
from .observer import Observer, is_observed
from .signals import die_with_parent, end_like, execute

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .files import Record

USAGE = "%(prog)s [--dir DIR] [--interval SECONDS] -- COMMAND [ARG ...]"
PREPARE_SECONDS = 10.0  # of the observer, to make its folder; the command starts without it then
LAST_WORD_SECONDS = 10.0  # of the observer, at the command's end
TOLD_SECONDS = 0.5  # after which a signal that came here is known to have come to nobody else
NOT_PASSED_ON = (
    *("SIGKILL", "SIGSTOP", "SIGCHLD", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGCONT"),
    *("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS", "SIGPIPE", "SIGXFSZ"),
)
PASSED_ON = frozenset(signal.valid_signals()) - {getattr(signal, name) for name in NOT_PASSED_ON}


def main(argv: list[str], prog: str = "node.pyz observe", archive: Callable[[], bytes] | None = None) -> int:
    """Run COMMAND, observed; returns its exit code, or ends by the signal that ended it. `archive` makes the bytes of
    node.pyz where this does not run from one."""
    options, command = _arguments(argv, prog)
    if is_observed(os.environ):  # a line within a line: the outer one observes both
        _become(command, os.environ, signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON | {signal.SIGCHLD})
    observer = _start_observer(options, command, archive)
    environment = {**os.environ, **observer.until_ready()}
    witness = _Witness()
    child = os.fork()
    if child == 0:
        _become(command, environment, mask)
    observer.tell({"child": child})
    status, resident_peak_bytes = _wait(child, observer, witness)
    observer.tell({"status": status, "resident_peak_bytes": resident_peak_bytes})
    report = observer.until_done()
    witness.dismiss()
    for line in report:
        say(line)
    if os.WIFSIGNALED(status):
        end_like(os.WTERMSIG(status))
    return os.WEXITSTATUS(status)


def _become(command: list[str], environment: Mapping[str, str], mask: set[int | signal.Signals]) -> None:
    """In the child: turn into the command, with the signals as they were here at first. Never returns."""
    code = 126
    try:
        # Python ignores these for itself; a program expects to inherit the defaults (as subprocess does).
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        code = execute(command, environment)
    finally:
        os._exit(code)


def _wait(child: int, observer: _Beside, witness: _Witness) -> tuple[int, int]:
    """Wait for the child's end, and pass on what this process is told meanwhile. Returns the child's wait status and
    the most main memory that it and its own children held, in bytes."""
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        number = signal.sigwaitinfo(PASSED_ON | {signal.SIGCHLD}).si_signo
        if number == signal.SIGCHLD:
            continue
        observer.tell({"told": number})
        if not witness.heard(number):
            with contextlib.suppress(OSError):
                os.kill(child, number)
    pending = signal.sigtimedwait(PASSED_ON, 0)
    while pending is not None:  # which the command had as well, and ended of
        observer.tell({"told": pending.si_signo})
        pending = signal.sigtimedwait(PASSED_ON, 0)
    _, status, usage = os.wait4(child, 0)
    return status, usage.ru_maxrss * 1024  # Linux counts KiB


class _Witness:
    """A process of the same group, session and job that only hears signals. What it was sent as well, the command has
    already: SLURM tells every process of a step, and a terminal its whole group. A second one would break off the
    orderly end of torchrun."""

    def __init__(self) -> None:
        self._pid = -1
        self._heard: list[int] = []  # two that come together may be taken in another order than here
        with contextlib.suppress(OSError):
            self._words, words = os.pipe()
            parent = os.getpid()
            self._pid = os.fork()
            if self._pid == 0:
                self._hear(words, parent)
            os.close(words)

    def _hear(self, words: int, parent: int) -> None:
        """Write each signal's number. Never returns."""
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            die_with_parent(signal.SIGKILL)
            if os.getppid() != parent:  # it went before this was asked; the observer waits for our end of its socket
                return
            null = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):  # who waits for the end of the command's output is not to wait for this
                os.dup2(null, number)
            while True:
                os.write(words, bytes([signal.sigwaitinfo(PASSED_ON).si_signo]))
        finally:
            os._exit(0)

    def heard(self, number: int) -> bool:
        """Whether the signal came here, too, in this moment."""
        until = time.monotonic() + TOLD_SECONDS
        while self._pid > 0 and number not in self._heard:
            readable, _, _ = select.select([self._words], [], [], max(0.0, until - time.monotonic()))
            word = os.read(self._words, 1) if readable else b""
            if not word:
                return False
            self._heard.append(word[0])
        if number in self._heard:
            self._heard.remove(number)
            return True
        return False

    def dismiss(self) -> None:
        if self._pid > 0:
            with contextlib.suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)


class _Beside(NamedTuple):
    """The observer as this process sees it: a socket to it, None where it could not be started."""

    link: socket.socket | None

    def until_ready(self) -> dict[str, str]:
        """Return the variables that the command gets; none where the observer is not ready in PREPARE_SECONDS."""
        ready = self._message(PREPARE_SECONDS, "environment") or {}
        if ready.get("problem"):
            say(f"observe: {ready['problem']}; the command runs unobserved")
        elif not ready:
            say("observe: the observer is not ready; the command starts without it")
        return {str(name): str(value) for name, value in ready.get("environment", {}).items()}

    def tell(self, message: Record) -> None:
        if self.link is not None:
            with contextlib.suppress(OSError):
                self.link.send(json.dumps(message).encode(), socket.MSG_DONTWAIT)

    def until_done(self) -> list[str]:
        """Wait until the observer has written how the command ended, LAST_WORD_SECONDS at most. Return what it says of
        it."""
        done = self._message(LAST_WORD_SECONDS, "done") or {}
        return [str(line) for line in done.get("report") or ()]

    def _message(self, seconds: float, kind: str) -> Record | None:
        """Return the next message of this kind, and drop others; None where none comes in time."""
        until = time.monotonic() + seconds
        while self.link is not None:
            try:
                readable, _, _ = select.select([self.link], [], [], max(0.0, until - time.monotonic()))
                data = self.link.recv(2**16) if readable else b""
            except OSError:
                return None
            if not data:  # too late, or the observer is gone
                return None
            message: Record = json.loads(data)
            if kind in message:
                return message
        return None


def _start_observer(options: argparse.Namespace, command: list[str], archive: Callable[[], bytes] | None) -> _Beside:
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.getpid()
        if os.fork() == 0:
            try:
                ours.close()
                Observer(options, command, theirs, pid, archive).run()
            finally:
                os._exit(0)
        theirs.close()
    except OSError as error:
        say(f"observe: {error.strerror}; the command runs unobserved")
        return _Beside(None)
    return _Beside(ours)


def _arguments(argv: list[str], prog: str) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog=prog, usage=USAGE)
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where to write [observed/NAME-JOB]")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between memory samples [1]")
    cut = argv.index("--") if "--" in argv else len(argv)
    options = parser.parse_args(argv[:cut])
    if not argv[cut + 1 :]:
        parser.error("no COMMAND after --")
    return options, argv[cut + 1 :]
