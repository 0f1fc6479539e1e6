"""The ranks of an observed command, as their own Pythons say (trainers/hook.py): their records in the attempt."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..rundir import file_names
from ..rundir.files import replace_json
from ..rundir.rank_records import BY_LAUNCHER, rank_records
from ..rundir.values import byte_count
from .files import RecordAppender
from .process_tree import Process

if TYPE_CHECKING:
    from pathlib import Path

    from ..rundir.attempt_files import RankRecord
    from ..rundir.node_files import ObservedEnd
    from .files import Record

KEPT = ("local_rank", "world_size", "local_world_size", "visible_devices", "python", "source")


class ObservedRanks:
    """Records of this node's ranks. `hear` takes what a rank says at its start, once it has torch, and at its end."""

    def __init__(self, attempt_folder: Path, node: str) -> None:
        self._attempt_folder, self._node = attempt_folder, node
        self._file = RecordAppender(attempt_folder / file_names.RANKS / f"{node}.jsonl")
        self._records: dict[int, Record] = {}
        self._processes: dict[int, Process] = {}

    def hear(self, pid: int, message: Record) -> None:
        """Write down what the rank of process `pid` says. Raises OSError."""
        rank = int(message["rank"])
        known = self._records.get(rank)
        if message.get("event") == "versions":
            replace_json(self._attempt_folder / file_names.VERSIONS, dict(message["versions"]))
        elif message.get("event") == "end":
            if known is not None and known["pid"] == pid:
                # who waited for this process may have been faster, and knows its exit code
                written = self._written(rank) or known
                said = {name: value for name, value in _end(message).items() if value is not None}
                self._write({**known, **written, **said})
        elif known is None or known["pid"] != pid:
            self._begin(rank, pid, message)

    def note_end(self, pid: int, end: ObservedEnd) -> None:
        """Complete the record of the rank that was the command itself, by the word of who waited for it. It may be
        another observer of this node that has written it. Raises OSError."""
        for record in rank_records(self._attempt_folder):
            if record.get("pid") == pid and record.get("node") == self._node:
                at = record.get("ended_at") or end.get("ended_at")
                self._write({**record, "ended_at": at, "exit_code": end.get("exit_code"), "signal": end.get("signal")})

    def any_alive(self) -> bool:
        """Whether a rank of this node still runs."""
        return any(process.alive() for process in self._processes.values())

    def _begin(self, rank: int, pid: int, message: Record) -> None:
        if message.get("source") != BY_LAUNCHER:  # a guess: never over the word of a rank that was told its number
            written = self._written(rank)
            if written is not None and written.get("source") == BY_LAUNCHER and written.get("pid") != pid:
                return
        empty = dict.fromkeys(("ended_at", "exit_code", "signal", "resident_peak_bytes"))
        about = {name: message.get(name) for name in KEPT}
        started = {"started_at": time.time(), "pid": pid, "program_pid": pid, "node": self._node}
        self._processes[rank] = Process(pid)
        self._write({"v": 1, "rank": rank, **about, **started, **empty})

    def _write(self, record: Record) -> None:
        self._records[record["rank"]] = record
        self._file.append(record)

    def _written(self, rank: int) -> RankRecord | None:
        return next((record for record in rank_records(self._attempt_folder) if record["rank"] == rank), None)


def _end(message: Record) -> Record:
    """Return what a rank says of its own end: only of an exception is its exit code known there."""
    code = 1 if message.get("raised") is True else None
    return {"ended_at": time.time(), "exit_code": code, "resident_peak_bytes": byte_count(message.get("peak_bytes"))}
