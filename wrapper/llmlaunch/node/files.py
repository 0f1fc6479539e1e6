"""What commands of the node side share: the arguments that say which attempt, the reader of a node's log, and what they
write for others: a line on stderr, status.json, and a monitor's peaks file."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..rundir import file_names
from ..rundir.files import LogTail, json_bytes, read_object, replace_bytes, replace_json
from ..rundir.step_lines import LONGEST_LINE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..rundir.attempt_files import AttemptStart, Status

    Record = dict[str, Any]

COMES_BACK_LATER = 75
"""Exit code of a job that saved and stopped before its last step (EX_TEMPFAIL of sysexits.h)."""


# A log that grew by more than this between two looks is read from its end: the last lines are those that count.
MOST_BYTES_A_LOOK = 4 * 2**20
LINE_ENDS = re.compile(rb"[\r\n]+")  # a progress bar goes back to the line's start


def command_parser(command: str, description: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of a command of node.pyz, with the arguments that name the attempt."""
    parser = argparse.ArgumentParser(prog=f"node.pyz {command}", description=description)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--attempt", required=True)
    return parser


def node_log_tail(path: Path, offset: int = 0, same_node: bool = False) -> LogTail:
    """Return the reader of one node's log from `offset` on: new lines, the last 4 MiB where more is new."""
    return LogTail(
        path, MOST_BYTES_A_LOOK, LONGEST_LINE, skips=True, line_end=LINE_ENDS, offset=offset, same_node=same_node
    )


def say(message: str) -> None:
    """Write one line to stderr; where even that cannot be written, nothing."""
    with contextlib.suppress(OSError):
        os.write(2, f"llmlaunch: {message}\n".encode())


def write_status(run_directory: Path, status: Status) -> None:
    """Keep the verdict of an attempt with it, then make it the run's. A full disk changes nothing else."""
    own = file_names.attempt_folder(run_directory, status["attempt"]) / file_names.STATUS
    content = json_bytes(status)  # once: of 16,000 ranks it takes half a second
    for path in (own, run_directory / file_names.STATUS):
        _write_or_say(path, content)


def note_in_attempt(attempt_folder: Path, facts: AttemptStart) -> None:
    """Add facts to an attempt's attempt.json, if it has one. Only the job writes it. Raises OSError."""
    path = attempt_folder / file_names.ATTEMPT
    record = read_object(path)
    if record is not None:
        replace_json(path, {**record, **facts})


def _write_or_say(path: Path, content: bytes) -> None:
    try:
        replace_bytes(path, content)
    except OSError as error:
        say(f"{path} not written: {error.strerror}")


def open_to_append(path: Path, mode: int = os.O_WRONLY) -> int:
    """Return a descriptor of a file that is made where it is missing, as is its folder. Raises OSError."""
    flags = mode | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags, 0o666)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o666)


class RecordAppender:
    """A file to which several processes of one node append records, each a line of its own in one write.

    They share a kernel, which appends one write after the other, on NFS and Lustre too: a client orders its own
    processes there. A line end before each record closes one that a full disk has torn. The file stays open, so that a
    record costs the server of a shared file system no call.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record and wait for the disk. Raises OSError."""
        line = b"\n%b\n" % json.dumps(record).encode()
        try:
            if self._descriptor < 0:
                self._descriptor = open_to_append(self.path)
            if os.write(self._descriptor, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            os.fsync(self._descriptor)
        except OSError:
            self.close()  # what a file server has forgotten is opened anew
            raise

    def append_or_say(self, record: Mapping[str, Any]) -> None:
        """Append a record, at the second try where the first fails, or say in one line why it cannot be written."""
        with contextlib.suppress(OSError):
            return self.append(record)
        try:
            self.append(record)
        except OSError as error:
            say(f"{self.path} not written: {error.strerror}")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            if self._descriptor >= 0:
                os.close(self._descriptor)
        self._descriptor = -1


class PeaksFile:
    """Appends whole lines and never raises for the disk's sake.

    A torn line, ours or a killed predecessor's, is closed before the next one.
    """

    def __init__(self, path: Path, fsync_seconds: float = 10.0) -> None:
        self.path = path
        self._fsync_seconds = fsync_seconds
        self._synced_at = float("-inf")
        self._descriptor = -1

    def append(self, lines: bytes, sync: bool = False) -> bool:
        """Append `lines`, each with its end; `sync` asks for fsync now, else it happens every `fsync_seconds` at most.

        False where they could not be written whole.
        """
        try:
            if self._descriptor < 0:
                self._open()
            if os.write(self._descriptor, lines) != len(lines):
                raise OSError("short write: the disk is full")
            now = time.monotonic()
            if sync or now - self._synced_at >= self._fsync_seconds:
                os.fsync(self._descriptor)
                self._synced_at = now
        except OSError:
            self.close()
            return False
        return True

    def _open(self) -> None:
        self._descriptor = open_to_append(self.path, os.O_RDWR)
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")

    def close(self) -> None:
        try:
            if self._descriptor >= 0:
                os.close(self._descriptor)
        except OSError:
            pass
        self._descriptor = -1
