"""Resident memory of this node's ranks, from their records and /proc."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from .files import attempt_directory, read_json

if TYPE_CHECKING:
    from pathlib import Path

    from .files import Record

RESIDENT = re.compile(rb"^VmRSS:\s+(\d+) kB", re.MULTILINE)
RESIDENT_PEAK = re.compile(rb"^VmHWM:\s+(\d+) kB", re.MULTILINE)


class RankProcess:
    """One rank's program: what it holds now, and the most it ever held."""

    def __init__(self, path: Path, record: Record) -> None:
        self.path = path
        self.rank = int(record["rank"])
        self.resident_bytes: int | None = None
        self.resident_peak_bytes: int | None = None
        self._take(record)

    def _take(self, record: Record) -> None:
        """Follow the process of `record`; of one that ended, keep the kernel's own maximum."""
        self.pid = int(record["program_pid"])
        self.alive = record.get("ended_at") is None and self._open()
        self._rise(record.get("resident_peak_bytes"))

    def _open(self) -> bool:
        # A descriptor of /proc/<pid> belongs to this process for ever, whoever gets its number next.
        try:
            self._directory = os.open(f"/proc/{self.pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return False
        return True

    def _rise(self, peak: int | None) -> None:
        if peak is not None:
            self.resident_peak_bytes = max(peak, self.resident_peak_bytes or 0)

    def sample(self) -> None:
        """Read VmRSS and VmHWM while the program lives."""
        if not self.alive:
            return
        now, peak = self._read_status()
        self.resident_bytes = now
        self._rise(peak)
        if now is None:  # ended, or a zombie
            self.alive = False
            os.close(self._directory)
            self.reread()

    def _read_status(self) -> tuple[int | None, int | None]:
        try:
            descriptor = os.open("status", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._directory)
            try:
                status = os.read(descriptor, 16384)
            finally:
                os.close(descriptor)
        except OSError:
            return None, None
        return _kib(RESIDENT, status), _kib(RESIDENT_PEAK, status)

    def reread(self) -> None:
        """Of a program that is gone, take its maximum from the record, and its successor if it was restarted."""
        record = None if self.alive else read_json(self.path)
        if record is None or record.get("program_pid") is None:
            return
        if record["program_pid"] != self.pid:
            self._take(record)
        else:
            self._rise(record.get("resident_peak_bytes"))

    def record(self) -> Record:
        return {
            "rank": self.rank,
            "pid": self.pid,
            "resident_bytes": self.resident_bytes,
            "resident_peak_bytes": self.resident_peak_bytes,
        }


class RankProcesses:
    """The ranks of one node in one attempt, found by the records the rank wrapper writes.

    Where `run.json` and LLMLAUNCH_NODE_RANK say which ranks are this node's, only those files are looked for: on
    a large job, every node listing and opening every rank's record would load the file system's metadata server.
    """

    def __init__(self, run_directory: Path, attempt: str, node: str, node_rank: int | None = None) -> None:
        self._node = node
        self._directory = attempt_directory(run_directory, attempt) / "ranks"
        self._seen: dict[str, RankProcess | None] = {}  # by file name; None: another node's
        self._own_names = _own_names(run_directory, node_rank)

    @property
    def processes(self) -> list[RankProcess]:
        found = [process for process in self._seen.values() if process is not None]
        return sorted(found, key=lambda process: process.rank)

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self.processes)

    def sample(self) -> None:
        """Look for new ranks, then read the resident memory of the living."""
        self._discover()
        for process in self.processes:
            process.sample()

    def reread(self) -> None:
        """Look again at the records of those that are gone."""
        for process in self.processes:
            process.reread()

    def records(self) -> list[Record]:
        return [process.record() for process in self.processes]

    def _discover(self) -> None:
        for name in self._own_names or [path.name for path in self._directory.glob("*.json")]:
            if name in self._seen:
                continue
            path = self._directory / name
            record = read_json(path)
            if record is None or record.get("program_pid") is None or record.get("rank") is None:
                continue
            self._seen[name] = RankProcess(path, record) if record.get("node") == self._node else None


def _own_names(run_directory: Path, node_rank: int | None) -> list[str] | None:
    """File names of this node's ranks under torchrun's static rendezvous; None where that is not known."""
    run = read_json(run_directory / "run.json")
    each = run.get("devices_per_node") if run is not None else None
    if node_rank is None or not isinstance(each, int):
        return None
    return [f"{rank}.json" for rank in range(node_rank * each, (node_rank + 1) * each)]


def _kib(pattern: re.Pattern[bytes], status: bytes) -> int | None:
    found = pattern.search(status)
    return int(found.group(1)) * 1024 if found else None
