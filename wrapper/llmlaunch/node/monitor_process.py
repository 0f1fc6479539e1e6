"""The monitor as a child of the node's program: started, ended and never waited for. Its death is nobody's business,
and a process that is stuck in the driver cannot be waited for."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

from ..rundir import file_names
from .files import open_to_append

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

MONITOR_SECONDS = 5.0  # from its TERM to its KILL


class Monitoring(NamedTuple):
    """The monitor beside the ranks, None where it could not be started, and its log here and in the run directory."""

    process: subprocess.Popen[bytes] | None
    log: Path
    shared_log: Path


def start_monitor(
    run_directory: Path,
    attempt: str,
    node: str,
    archive: Path,
    options: Sequence[str],
    environment: Mapping[str, str],
) -> Monitoring:
    """Start the monitor out of `archive`, with `options` beside those that say where it is.

    Where the archive is this node's own, so is its log: a monitor that hangs must not hold this program's output open.
    """
    shared = run_directory / file_names.LOGS / f"{attempt}.{node}.monitor.log"
    path = shared if archive.parent == run_directory else archive.with_name("monitor.log")
    words = [sys.executable, "-I", "-S", str(archive), "monitor", "--run-dir", str(run_directory)]
    words += ["--attempt", attempt, "--node", node, "--parent", str(os.getpid()), *options]
    with contextlib.suppress(OSError), path.open("ab") as log:
        process = subprocess.Popen(
            words, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_hear_no_requests
        )
        return Monitoring(process, path, shared)
    return Monitoring(None, path, shared)


def _hear_no_requests() -> None:
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def stop_monitor(monitor: Monitoring) -> None:
    """TERM, five seconds, KILL."""
    process = monitor.process
    if process is not None:
        process.terminate()
        give_up_at = time.monotonic() + MONITOR_SECONDS
        while process.poll() is None and time.monotonic() < give_up_at:
            time.sleep(0.02)
        if process.poll() is None:
            process.kill()


def deliver_log(monitor: Monitoring) -> None:
    """Bring what the monitor said to the run directory; leave no empty log."""
    with contextlib.suppress(OSError):
        if monitor.log != monitor.shared_log:  # on this node
            said = monitor.log.read_bytes()
            if said:
                descriptor = open_to_append(monitor.shared_log)
                os.write(descriptor, said)
                os.close(descriptor)
        elif not monitor.log.stat().st_size:
            monitor.log.unlink()
