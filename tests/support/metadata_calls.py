"""The metadata calls of processes on one folder, as strace hears them: what the server of a shared file system answers
one by one, whatever the size of the file.

Each of CALLS that names a path or lists a folder counts one, be it answered from a cache or not. Read, write, fsync,
close and seek count nothing, nor does what asks an open file for its state, which came with its opening.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

CALLS = (
    *("open", "openat", "openat2", "creat", "stat", "lstat", "fstat", "newfstatat", "statx", "access", "faccessat"),
    *("faccessat2", "rename", "renameat", "renameat2", "unlink", "unlinkat", "mkdir", "mkdirat", "rmdir", "getdents"),
    *("getdents64", "link", "linkat", "symlink", "symlinkat", "readlink", "readlinkat", "utime", "utimes", "utimensat"),
    *("chmod", "fchmod", "fchmodat", "chown", "fchown", "lchown", "fchownat", "truncate", "ftruncate", "statfs"),
    *("fstatfs", "mknod", "mknodat"),
)
LINE = re.compile(r"\d+ +(?P<at>\d+\.\d+) (?P<call>\w+)\((?P<arguments>.*)")
DESCRIPTOR = re.compile(r"(?:AT_FDCWD|\d+)<(?P<place>[^>]*)>(?:, (?P<path>\"(?:[^\"\\]|\\.)*\"))?")
PATH = re.compile(r"\"(?P<path>(?:[^\"\\]|\\.)*)\"")


class Call(NamedTuple):
    at: float  # unix seconds
    of_open_file: bool
    name: str
    path: str  # in the folder; empty for the folder itself


class TracedProcess:
    """A process and all that it starts, under strace; what they print goes through a pipe, as under SLURM."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        trace: Path,
        environment: Mapping[str, str],
        output: Path,
        said: str | None = None,
    ) -> None:
        """`said`: what comes on its standard input, which then stays open."""
        self._folder, self._trace = os.path.realpath(folder), trace
        known = [f"?{name}" for name in CALLS]  # ?: where the architecture has it
        strace = ["strace", "-f", "--seccomp-bpf", "-qq", "-ttt", "-y", "-s", "4096", "-o", str(trace)]
        with output.open("ab") as log:
            slurmstepd = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=log)
        self.process = subprocess.Popen(
            [*strace, "-e", "trace=" + ",".join(known), *command],
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL if said is None else subprocess.PIPE,
            stdout=slurmstepd.stdin,
            stderr=subprocess.STDOUT,
        )
        if self.process.stdin is not None:
            self.process.stdin.write((said or "").encode())
            self.process.stdin.flush()
        assert slurmstepd.stdin is not None
        slurmstepd.stdin.close()
        self.started_at = time.time()

    def terminate(self) -> None:
        """SIGTERM to the process itself, of which strace is the parent and deaf; wait for its end."""
        (child,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGTERM)
        self.process.wait()

    def calls(self, since: float = 0.0, until: float = float("inf")) -> list[Call]:
        """Return the calls on the folder and what is below it, made in a span of unix seconds."""
        return [call for call in self.all_calls() if since <= call.at < until and not call.of_open_file]

    def all_calls(self) -> Iterator[Call]:
        with self._trace.open(errors="replace") as lines:
            for line in lines:
                match = LINE.match(line)
                path = match and self._path(match["arguments"])
                if match and path is not None:
                    on_open = '>, ""' in match["arguments"] or match["call"].startswith(("fstat", "fch", "ftrunc"))
                    yield Call(float(match["at"]), on_open, match["call"], path)

    def _path(self, arguments: str) -> str | None:
        """The path that a call names, relative to the folder; None where it is elsewhere. A relative path of a call
        that does not say where it begins is taken for one in the folder, where these processes work."""
        described = DESCRIPTOR.match(arguments)
        if described:
            place, name = described["place"], (described["path"] or '""')[1:-1]
        else:
            named = PATH.match(arguments)
            if named is None:
                return None
            place, name = self._folder, named["path"]
        path = os.path.normpath(name if name.startswith("/") else f"{place}/{name}")
        if path == self._folder:
            return ""
        return path[len(self._folder) + 1 :] if path.startswith(self._folder + "/") else None


def by_path(calls: Sequence[Call]) -> Counter[str]:
    """Return how many calls each path got."""
    return Counter(call.path for call in calls)
