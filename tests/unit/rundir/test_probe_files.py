"""The probes' files of an attempt, read back into one account per rank and device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.rundir.memory_files import summarize
from llmlaunch.rundir.probe_files import TorchPeaks, fullest_devices, largest_peaks, read_probe_file
from llmlaunch.units import GIB


def account(rank: int = 0, pid: int = 10, **device: Any) -> dict[str, Any]:
    entry = {
        "device": 0,
        "uuid": "GPU-a",
        "total_bytes": 80 * GIB,
        "allocated_peak_bytes": 10 * GIB,
        "active_peak_bytes": 11 * GIB,
        "reserved_peak_bytes": 12 * GIB,
        "reserved_bytes": 12 * GIB,
        "alloc_retries": 0,
        "ooms": 0,
        "device_used_bytes": 15 * GIB,
        "outside_bytes": 3 * GIB,
        **device,
    }
    whole = {"v": 1, "rank": rank, "local_rank": rank, "node": "n1", "pid": pid, "at": 1.7e9 + pid, "ended": True}
    return {**whole, "devices": [entry]}


def put(run: Path, value: Any) -> Path:
    folder = run / "attempts" / "1" / "memory"
    folder.mkdir(parents=True, exist_ok=True)
    text = value if isinstance(value, str) else json.dumps(value)
    name = f"{value['rank']}.{value['pid']}" if isinstance(value, dict) else f"9.{len(list(folder.iterdir()))}"
    path = folder / f"{name}.json"
    path.write_text(text)
    return path


def read(run: Path) -> tuple[TorchPeaks, ...]:
    files = [read_probe_file(path) for path in sorted((run / "attempts" / "1" / "memory").iterdir())]
    return largest_peaks([file for file in files if file is not None])


def test_one_file_is_one_ranks_account(tmp_path: Path) -> None:
    put(tmp_path, account(rank=3))
    (peaks,) = read(tmp_path)
    assert (peaks.rank, peaks.local_rank, peaks.node, peaks.pid, peaks.ended) == (3, 3, "n1", 10, True)
    assert (peaks.uuid, peaks.device, peaks.total_bytes) == ("GPU-a", 0, 80 * GIB)
    assert (peaks.allocated_peak_bytes, peaks.active_peak_bytes) == (10 * GIB, 11 * GIB)
    assert (peaks.reserved_peak_bytes, peaks.device_used_bytes, peaks.outside_bytes) == (12 * GIB, 15 * GIB, 3 * GIB)


def test_of_several_processes_of_a_rank_the_largest_counts(tmp_path: Path) -> None:
    put(tmp_path, account(pid=10, reserved_peak_bytes=20 * GIB, alloc_retries=1))
    put(tmp_path, {**account(pid=11, allocated_peak_bytes=12 * GIB, ooms=2), "ended": False})
    (peaks,) = read(tmp_path)
    assert (peaks.pid, peaks.reserved_peak_bytes, peaks.allocated_peak_bytes) == (10, 20 * GIB, 12 * GIB)
    assert (peaks.alloc_retries, peaks.ooms, peaks.ended, peaks.at) == (1, 2, False, 1.7e9 + 11)


def test_devices_are_told_apart_by_uuid_and_the_fullest_stands_for_the_rank(tmp_path: Path) -> None:
    """Index 0 of two processes may be two GPUs: CUDA_VISIBLE_DEVICES is each process's own."""
    put(tmp_path, account(pid=10))
    put(tmp_path, account(pid=11, uuid="GPU-b", reserved_peak_bytes=13 * GIB))
    put(tmp_path, account(pid=12, uuid=None, device=1))
    devices = read(tmp_path)
    assert {peaks.uuid for peaks in devices} == {"GPU-a", "GPU-b", None}
    assert {rank: peaks.uuid for rank, peaks in fullest_devices(devices).items()} == {0: "GPU-b"}


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"v":2,"rank":0,"devices":[]}', '{"v":1,"devices":[]}', '{"v":1,"rank":true,"devices":[]}',
     '{"v":1,"rank":-1,"devices":[]}', '{"v":1,"rank":0,"devices":{}}', '{"v":1,"rank":0,"devices":[7]}',
     "[" * 100_000],
)  # fmt: skip
def test_a_damaged_file_is_counted_and_costs_nothing_else(tmp_path: Path, text: str) -> None:
    put(tmp_path, account())
    bad = put(tmp_path, text)
    assert len(read(tmp_path)) == 1
    assert summarize(tmp_path, "1").damaged == {str(bad.relative_to(tmp_path)): 1}


def test_a_number_that_cannot_be_is_none(tmp_path: Path) -> None:
    put(tmp_path, account(allocated_peak_bytes=17 * 2**40, active_peak_bytes="1", outside_bytes=-1, ooms=1.5))
    (peaks,) = read(tmp_path)
    assert (peaks.allocated_peak_bytes, peaks.active_peak_bytes, peaks.outside_bytes, peaks.ooms) == (None,) * 4
    assert peaks.reserved_peak_bytes == 12 * GIB


def test_half_written_files_and_strangers_are_not_looked_at(tmp_path: Path) -> None:
    put(tmp_path, account())
    folder = tmp_path / "attempts" / "1" / "memory"
    for stranger in (".0.10.json.tmp", ".0.11.json", "notes.txt"):
        (folder / stranger).write_text("{")
    summary = summarize(tmp_path, "1")
    assert ([rank.rank for rank in summary.ranks], summary.damaged) == ([0], {})
    assert summarize(tmp_path, "2").ranks == ()
    assert read_probe_file(folder / "gone.json") is None
