"""Dumps of PyTorch's flight recorder in the form that NCCL's process groups write: torch 2.13,
FlightRecorderDetail.hpp, `getCollectiveTrace` and `getPgConfig`, pickled by protocol 2 as PyTorch's own writer does."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any


class Recorder:
    """What one rank records."""

    def __init__(self, rank: int, groups: dict[str, list[int]], forgotten: int = 0) -> None:
        self.rank = rank
        self.groups = {name: ranks for name, ranks in groups.items() if rank in ranks}
        self.forgotten = forgotten  # entries that the ring no longer holds
        self.entries: list[dict[str, Any]] = []

    def collective(
        self, group: str, number: int, state: str = "completed", name: str = "all_reduce", size: int = 4
    ) -> None:
        self._add(group, f"nccl:{name}", state, size, collective_seq_id=number, p2p_seq_id=0, is_p2p=False)

    def send(self, group: str, to: int, number: int, state: str = "completed") -> None:
        own, peer = self._place(group, self.rank), self._place(group, to)
        self._between(group, f"nccl:send {own}->{peer}", number, state)

    def recv(self, group: str, of: int, number: int, state: str = "completed") -> None:
        own, peer = self._place(group, self.rank), self._place(group, of)
        self._between(group, f"nccl:recv {own}<-{peer}", number, state)

    def batch_end(self, group: str, number: int, state: str) -> None:
        """Of `batch_isend_irecv`: the operations before it have no state of their own."""
        self._between(group, "nccl:coalesced", number, state)

    def content(self) -> bytes:
        config = {
            name: {"name": name, "desc": _description(name), "ranks": str(ranks)} for name, ranks in self.groups.items()
        }
        record = {
            "version": "2.10",
            "pg_config": config,
            "comm_lib_version": "22703",
            "pg_status": {},
            "entries": self.entries,
        }
        return pickle.dumps(record, protocol=2)

    def _place(self, group: str, rank: int) -> int:
        return self.groups[group].index(rank)

    def _between(self, group: str, name: str, number: int, state: str) -> None:
        self._add(group, name, state, 4, collective_seq_id=0, p2p_seq_id=number, is_p2p=True)

    def _add(self, group: str, name: str, state: str, size: int, **numbers: Any) -> None:
        number = self.forgotten + len(self.entries)
        self.entries.append(
            {
                "frames": [{"name": "train_step", "filename": "train.py", "line": 7}],
                "record_id": number,
                "pg_id": list(self.groups).index(group),
                "process_group": (group, _description(group)),
                "thread_name": "python",
                "thread_id": "140265361304448",
                "op_id": number,
                "profiling_name": name,
                "time_created_ns": 1_795_729_218_587_486_969 + number,
                "input_sizes": [[size]],
                "input_dtypes": ["Float"],
                "output_sizes": [[size]],
                "output_dtypes": ["Float"],
                "state": state,
                "time_discovered_started_ns": None,
                "time_discovered_completed_ns": None,
                "retired": state == "completed",
                "timeout_ms": 600_000,
                **numbers,
            }
        )


def _description(group: str) -> str:
    return "default_pg" if group == "0" else f"group {group}"


def write_dumps(folder: Path, *recorders: Recorder) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for recorder in recorders:
        (folder / f"rank_{recorder.rank}").write_bytes(recorder.content())
