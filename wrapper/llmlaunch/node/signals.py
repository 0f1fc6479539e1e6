"""Signals and parenthood of node processes (Linux)."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

from ..rundir.foreign_values import is_whole_number
from .files import say

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NOT_FOUND, NOT_EXECUTABLE = 127, 126  # as a shell has them
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def hold_end_signals() -> frozenset[signal.Signals]:
    """Block the signals that end the monitor, to be taken with `signal.sigtimedwait`; returns them.

    SIGINT and SIGHUP count unless they came ignored, as they do under nohup and for a script's background jobs.
    SIGUSR1 and SIGUSR2 are what sites send to ask a trainer for a checkpoint: they do not end the monitor.
    """
    ends = {signal.SIGTERM}
    ends.update(s for s in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(s) != signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    for ignored in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)
    return frozenset(ends)


def die_with_parent(number: int, parent: int = 0) -> None:
    """Ask the kernel to send this process `number` when its parent ends; nothing where it cannot. A `parent` that has
    ended already counts."""
    try:
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        pass
    if parent and os.getppid() != parent:
        os.kill(os.getpid(), number)


def execute(program: Sequence[str], environment: Mapping[str, str]) -> int:
    """Turn this process into `program`. Returns the exit code of a shell where that cannot be started."""
    try:
        os.execvpe(program[0], list(program), environment)
    except OSError as error:
        say(f"cannot start {program[0]}: {error.strerror}")
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; `SIG35` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def signal_number(name: str) -> int:
    """The inverse of `signal_name`; 0 for what is no signal."""
    try:
        return int(signal.Signals[name])
    except KeyError:
        digits = name[3:]
        return int(digits) if is_whole_number(digits) else 0


def end_like(number: int) -> None:
    """End this process by signal `number`, without a core dump of its own. Never returns."""
    import resource

    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # still here: process 1 of a container is spared its own signals
