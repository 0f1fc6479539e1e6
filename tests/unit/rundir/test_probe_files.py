"""The probes' files of an attempt, read back into one account per rank and device."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmlaunch.rundir.memory_files import summarize
from llmlaunch.rundir.probe_files import TorchPeaks, fullest_devices, largest_peaks, read_probe_file
from support.store_run_dirs import ATTEMPT, GIB, STARTED, RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def memory(run: RunDir) -> Path:
    return run.path / "attempts" / ATTEMPT / "memory"


def read(run: RunDir) -> tuple[TorchPeaks, ...]:
    files = [read_probe_file(path) for path in sorted(memory(run).iterdir())]
    return largest_peaks([file for file in files if file is not None])


def test_one_file_is_one_ranks_account(run: RunDir) -> None:
    run.probe(1)
    (peaks,) = read(run)
    assert (peaks.rank, peaks.local_rank, peaks.node, peaks.pid, peaks.ended) == (1, 1, "n0", 1001, True)
    assert (peaks.uuid, peaks.device, peaks.total_bytes) == ("GPU-n0-1", 1, 79 * GIB)
    assert (peaks.allocated_peak_bytes, peaks.active_peak_bytes) == (50 * GIB, 51 * GIB)
    assert (peaks.reserved_peak_bytes, peaks.device_used_bytes, peaks.outside_bytes) == (60 * GIB, 62 * GIB, 2 * GIB)


def test_of_several_processes_of_a_rank_the_largest_counts(run: RunDir) -> None:
    run.probe(0, pid=10, reserved_peak_bytes=70 * GIB, alloc_retries=1)
    run.probe(0, pid=11, allocated_peak_bytes=52 * GIB, ooms=2, ended=False)
    (peaks,) = read(run)
    assert (peaks.pid, peaks.reserved_peak_bytes, peaks.allocated_peak_bytes) == (10, 70 * GIB, 52 * GIB)
    assert (peaks.alloc_retries, peaks.ooms, peaks.ended, peaks.at) == (1, 2, False, STARTED + 11)


def test_devices_are_told_apart_by_uuid_and_the_fullest_stands_for_the_rank(run: RunDir) -> None:
    """Index 0 of two processes may be two GPUs: CUDA_VISIBLE_DEVICES is each process's own."""
    run.probe(0, pid=10)
    run.probe(0, pid=11, uuid="GPU-b", reserved_peak_bytes=61 * GIB)
    run.probe(0, pid=12, uuid="", device=1)
    devices = read(run)
    assert {peaks.uuid for peaks in devices} == {"GPU-n0-0", "GPU-b", None}
    assert {rank: peaks.uuid for rank, peaks in fullest_devices(devices).items()} == {0: "GPU-b"}


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"v":2,"rank":0,"devices":[]}', '{"v":1,"devices":[]}', '{"v":1,"rank":true,"devices":[]}',
     '{"v":1,"rank":-1,"devices":[]}', '{"v":1,"rank":0,"devices":[7]}',
     "[" * 100_000],
)  # fmt: skip
def test_a_damaged_file_is_counted_and_costs_nothing_else(run: RunDir, text: str) -> None:
    """A line of a node's file, and a file of one process as earlier versions wrote it."""
    run.probe(0)
    (memory(run) / "9.1.json").write_text(text)
    with (memory(run) / "n0.jsonl").open("a") as file:
        file.write(f"{text or '{'}\n")
    run.probe(1)
    assert len(read(run)) == 2
    lost = {f"attempts/{ATTEMPT}/memory/{name}": 1 for name in ("9.1.json", "n0.jsonl")}
    assert summarize(run.path, ATTEMPT).damaged == lost


def test_of_a_process_the_last_whole_line_counts(run: RunDir) -> None:
    run.probe(0, reserved_peak_bytes=10 * GIB, ended=False)
    run.probe(1, reserved_peak_bytes=20 * GIB, ended=False)
    path = run.probe(0, reserved_peak_bytes=60 * GIB)
    lines = path.read_text()
    path.write_text(lines + lines.split("\n")[1][:-9] + "\n")  # the disk was full amid another
    assert [(peaks.reserved_peak_bytes, peaks.ended) for peaks in read(run)] == [(60 * GIB, True), (20 * GIB, False)]
    assert summarize(run.path, ATTEMPT).damaged == {f"attempts/{ATTEMPT}/memory/n0.jsonl": 1}


def test_a_number_that_cannot_be_is_none(run: RunDir) -> None:
    run.probe(0, allocated_peak_bytes=17 * 2**40, active_peak_bytes="1", outside_bytes=-1, ooms=1.5)
    (peaks,) = read(run)
    assert (peaks.allocated_peak_bytes, peaks.active_peak_bytes, peaks.outside_bytes, peaks.ooms) == (None,) * 4
    assert peaks.reserved_peak_bytes == 60 * GIB


def test_half_written_files_and_strangers_are_not_looked_at(run: RunDir) -> None:
    run.probe(0)
    for stranger in (".0.10.json.tmp", ".0.11.json", "notes.txt"):
        (memory(run) / stranger).write_text("{")
    summary = summarize(run.path, ATTEMPT)
    assert ([rank.rank for rank in summary.ranks], summary.damaged) == ([0], {})
    assert summarize(run.path, "2").ranks == ()
    assert read_probe_file(memory(run) / "gone.json") is None
