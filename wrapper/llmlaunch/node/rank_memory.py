"""Memory of this node's ranks: resident, from their records and /proc, and what trainers write into their logs.

What a log says is true since the framework last reset its counters, and up to the moment it printed: Megatron-LM never
resets, DeepSpeed does at every line. The largest of all that was printed is kept.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING

from ..rundir import file_names
from ..rundir.attempt_files import RankRecord
from ..rundir.file_names import attempt_folder
from ..rundir.files import LogTail, object_of
from ..rundir.schema import sound

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from .files import Record

MOST_BYTES = 4 * 2**20  # of a node's rank records at a look
LONGEST_RECORD = 64 * 1024

RESIDENT = re.compile(rb"^VmRSS:\s+(\d+) kB", re.MULTILINE)
RESIDENT_PEAK = re.compile(rb"^VmHWM:\s+(\d+) kB", re.MULTILINE)


class RankProcess:
    """One rank's program: what it holds now, and the most it ever held."""

    def __init__(self, record: RankRecord) -> None:
        self.rank = record["rank"]
        self.resident_bytes: int | None = None
        self.resident_peak_bytes: int | None = None
        self._follow(record)

    def _follow(self, record: RankRecord) -> None:
        """Follow the process of `record`; of one that ended, keep the kernel's own maximum."""
        self.pid = record["program_pid"] or 0
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

    def sample(self) -> bool:
        """Read VmRSS and VmHWM while the program lives; True where it has just ended."""
        if not self.alive:
            return False
        now, peak = self._read_status()
        self.resident_bytes = now
        self._rise(peak)
        if now is not None:
            return False
        self.alive = False  # or a zombie
        os.close(self._directory)
        return True

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

    def update(self, record: RankRecord) -> None:
        """Where the program is gone, take its maximum from its record, or follow its successor if it was restarted."""
        if self.alive:
            return
        if record["program_pid"] != self.pid:
            self._follow(record)
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
    """The programs of one node's ranks. Reads /proc alone: their records come from the thread that may hang."""

    def __init__(self) -> None:
        self._processes: dict[int, RankProcess] = {}  # by rank
        self._last_records: dict[int, RankRecord] = {}

    def update(self, records: dict[int, RankRecord]) -> None:
        """The records of this node's ranks, as they were last read."""
        if records is self._last_records:
            return
        self._last_records = records
        for rank, record in records.items():
            if rank in self._processes:
                self._processes[rank].update(record)
            else:
                self._processes[rank] = RankProcess(record)

    def sample(self) -> bool:
        """Read the resident memory of the living; True where one has just ended."""
        ended = [process for process in self._processes.values() if process.sample()]
        return bool(ended)

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes.values())

    def records(self) -> list[Record]:
        return [process.record() for process in sorted(self._processes.values(), key=lambda process: process.rank)]


class RankRecords:
    """What was written of one node's ranks, read from its file in the run directory as it grows."""

    def __init__(self, run_directory: Path, attempt: str, node: str) -> None:
        self.records: dict[int, RankRecord] = {}  # by rank; replaced, never changed
        self._node = node
        path = attempt_folder(run_directory, attempt) / file_names.RANKS / f"{node}.jsonl"
        self._tail = LogTail(path, MOST_BYTES, LONGEST_RECORD, same_node=True, creates=True)

    def look(self) -> None:
        fresh = {}
        for line in self._tail.lines():
            with contextlib.suppress(ValueError):
                record = sound(RankRecord, object_of(line))
                if record is not None and record.get("program_pid") is not None:
                    fresh[record["rank"]] = record
        ours = {rank: record for rank, record in fresh.items() if record.get("node") == self._node}
        if ours:
            self.records = {**self.records, **ours}


def _kib(pattern: re.Pattern[bytes], status: bytes) -> int | None:
    match = pattern.search(status)
    return int(match.group(1)) * 1024 if match else None


MEGATRON_LOG, DEEPSPEED_LOG = "megatron log", "deepspeed log"
MIB, GIB = 2**20, 2**30  # what they call MB and GB
NUMBER = rb"([0-9]+(?:\.[0-9]+)?)"
# report_memory of megatron/training/utils, the same from 0.5 to 0.19 and in Megatron-DeepSpeed: after the second step,
# around checkpoints, and every --log-memory-interval. The last word with --log-device-memory-used alone; it counts
# every process on the device.
MEGATRON = re.compile(
    rb"\[Rank ([0-9]+)\] [^|\[\n]*memory \(MB\) \| allocated: "
    + rb" \| ".join((NUMBER, rb"max allocated: " + NUMBER, rb"reserved: " + NUMBER, rb"max reserved: " + NUMBER))
    + rb"(?: \| (?:total device memory used|device usage): "
    + NUMBER
    + rb")?"
)
# see_memory_usage of deepspeed/runtime/utils.py (0.6 to 0.18), by rank 0 alone. Max_CA is rounded to whole GB.
DEEPSPEED = re.compile(rb"\bMA %b GB\s+Max_MA %b GB\s+CA %b GB\s+Max_CA %b GB" % ((NUMBER,) * 4))


class LoggedPeaks:
    """The most that each rank's lines said."""

    def __init__(self) -> None:
        self._peaks: dict[tuple[int, str], dict[str, int | None]] = {}

    def take(self, lines: Iterable[bytes]) -> None:
        """Lines of a log; one that says nothing of memory costs two searches for a word.

        The ranks of a node share a log, so that one line may run into another: a line may hold several.
        """
        for line in lines:
            if b"memory (MB)" in line:
                for match in MEGATRON.finditer(line):
                    rank, _, allocated, _, reserved, device = match.groups()
                    self._rise(int(rank), MEGATRON_LOG, "allocated_peak_bytes", float(allocated) * MIB)
                    self._rise(int(rank), MEGATRON_LOG, "reserved_peak_bytes", float(reserved) * MIB)
                    self._rise(int(rank), MEGATRON_LOG, "device_bytes", float(device or 0) * MIB)
            elif b"Max_MA" in line:
                for match in DEEPSPEED.finditer(line):
                    _, allocated, cached, most_cached = match.groups()
                    # as much was held for certain, whichever way Max_CA was rounded
                    reserved = max(float(cached), float(most_cached) - 0.5)
                    self._rise(0, DEEPSPEED_LOG, "allocated_peak_bytes", float(allocated) * GIB)
                    self._rise(0, DEEPSPEED_LOG, "reserved_peak_bytes", reserved * GIB)

    def records(self) -> list[Record]:
        """`[{"rank", "allocated_peak_bytes", "reserved_peak_bytes", "device_bytes", "source"}]`; null is not said."""
        return [{"rank": rank, **peaks, "source": source} for (rank, source), peaks in sorted(self._peaks.items())]

    def _rise(self, rank: int, source: str, name: str, amount: float) -> None:
        empty: dict[str, int | None] = {"allocated_peak_bytes": None, "reserved_peak_bytes": None, "device_bytes": None}
        peaks = self._peaks.setdefault((rank, source), empty)
        if amount > 0:
            peaks[name] = max(int(amount), peaks[name] or 0)
