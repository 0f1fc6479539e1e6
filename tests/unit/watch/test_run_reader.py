"""What is read of a run that is watched: over a real monitor and the scripted driver, whatever is missing."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from watched_run import RUN, append, write

from llmlaunch.launchers.base import JobState, Submission
from llmlaunch.launchers.run_status import RunStatus
from llmlaunch.watch import gauges
from llmlaunch.watch.model import Gauge, WatchedRun
from llmlaunch.watch.run_reader import RunReader
from support.node_rig import ATTEMPT, GIB, NODE, NodeRig, until

JOB = ATTEMPT.partition(".")[0]
TWO_STAGES = {**RUN, "pipeline": 2, "predicted_bytes": [40 * GIB, 50 * GIB]}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauges, "_MEMORY_SECONDS", 0.0)


def reader_of(directory: Path, **changes: Any) -> RunReader:
    """Write a run directory with an attempt and return its reader."""
    write(directory / "run.json", {**TWO_STAGES, **changes})
    write(directory / "plan.json", {"memory": {"limit_bytes": 64 * GIB}})
    write(directory / "attempts" / ATTEMPT / "attempt.json", {"attempt": ATTEMPT, "layout": "", "nodes": [NODE]})
    return RunReader(Submission("slurm", JOB, directory, 0.0))


def read(reader: RunReader) -> WatchedRun:
    return reader.read(RunStatus(reader.submission, JobState("running"), ATTEMPT, {}, {}, stopping=False))


def test_a_gpu_has_its_rank_its_stage_and_its_stage_s_prediction(gpu_node: NodeRig) -> None:
    reader = reader_of(gpu_node.run_directory)
    sleepers = [gpu_node.rank("sleep", "600", rank=rank) for rank in (0, 1)]
    pids = [gpu_node.until_record(rank)["program_pid"] for rank in (0, 1)]
    idle = "gpu uuid=GPU-a\ngpu uuid=GPU-b\n"
    monitor = gpu_node.started_monitor(idle)
    gpu_node.scenario(f"{idle}proc 1 pid={pids[0]} mem=30G\nproc 0 pid={pids[1]} mem=55G\n")
    gpu_node.until_line(
        "both processes", lambda line: line.get("gpus") and all(gpu["process_peak_bytes"] for gpu in line["gpus"])
    )
    gpu_node.scenario(f"{idle}proc 1 pid={pids[0]} mem=20G\nproc 0 pid={pids[1]} mem=70G\n")
    gpu_node.until_used(70.5)

    def both_gauges() -> list[Gauge] | None:
        gauges = read(reader).gauges
        return list(gauges) if {gauge.used_bytes for gauge in gauges} == {20 * GIB, 70 * GIB} else None

    first, second = until(both_gauges, "gauges")
    assert (first.ranks, first.device, first.uuid, first.pipeline_rank) == ((0,), "1", "GPU-b", 0)
    assert (first.used_bytes, first.peak_bytes) == (20 * GIB, 30 * GIB)
    assert (first.predicted_bytes, first.limit_bytes, first.total_bytes) == (40 * GIB, 64 * GIB, 80 * GIB)
    assert (second.ranks, second.pipeline_rank, second.predicted_bytes) == ((1,), 1, 50 * GIB)
    assert second.share == pytest.approx(70 / 50)
    assert read(reader).fullest == second
    gpu_node.stop(monitor)
    assert read(reader).remarks == ()
    for sleeper in sleepers:
        sleeper.kill()


def test_a_lost_gpu_and_a_silent_monitor_are_said(gpu_node: NodeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = reader_of(gpu_node.run_directory)
    monitor = gpu_node.started_monitor("gpu uuid=GPU-a used=1G\n")
    gpu_node.scenario("gpu uuid=GPU-a used=1G\nfail nvmlDeviceGetMemoryInfo_v2 gpu=0 code=15\n")
    gpu_node.until_event("gpu_lost")
    gpu_node.until_line("the lost one", lambda line: line.get("gpus") and line["gpus"][0]["lost"])
    (gauge,) = read(reader).gauges
    assert gauge.note == "lost (NVML code 15)"
    monitor.kill()
    monitor.wait()
    later = time.time() + 300
    monkeypatch.setattr(time, "time", lambda: later)
    (remark,) = read(reader).remarks
    assert remark.startswith(f"{NODE}: monitor silent for")


def test_a_bad_loss_is_a_remark(cpu_node: NodeRig) -> None:
    reader = reader_of(cpu_node.run_directory)
    bad = {"kind": "spike", "since_step": 120, "loss": 9.5, "usual": 3.03, "recovered_step": None}
    cpu_node.write_attempt("progress.json", {"step": 125, "bad_loss": bad})
    assert read(reader).remarks == ("Loss: spike since step 120 (9.5, was 3.03)",)


def test_resident_memory_of_ranks_on_a_machine_without_gpus(cpu_node: NodeRig) -> None:
    reader = reader_of(cpu_node.run_directory, peak_kind="resident", predicted_bytes=[GIB], pipeline=1)
    cpu_node.rank("sleep", "600", rank=1)
    pid = cpu_node.until_record(1)["program_pid"]
    monitor = cpu_node.monitor()
    cpu_node.until_line("a process", lambda line: any(p["resident_bytes"] for p in line.get("processes") or ()))
    (gauge,) = read(reader).gauges
    assert (gauge.ranks, gauge.uuid, gauge.total_bytes, gauge.predicted_bytes) == ((1,), None, None, GIB)
    assert 0 < (gauge.used_bytes or 0) <= (gauge.peak_bytes or 0)
    assert Path(f"/proc/{pid}").exists()
    assert read(reader).remarks == ()  # that there is no NVML is no news here
    cpu_node.stop(monitor)


def test_steps_come_from_the_log_of_the_node_that_speaks_alone(tmp_path: Path) -> None:
    reader = reader_of(tmp_path, nodes=2)
    for node in ("n1", "n2"):
        write(tmp_path / "logs" / f"{ATTEMPT}.{node}.log", "loading\n")
    assert read(reader).step is None
    time.sleep(0.2)  # of two logs nobody speaks in, a look is due every 0.1 s
    log, second = tmp_path / "logs" / f"{ATTEMPT}.n2.log", "it 2/100 loss=3.0 took 2000 ms"
    append(log, "it 1/100 loss=4.0 took 1000 ms", second, second)
    with log.open("a") as file:
        file.write("it 3/")
    run = read(reader)
    assert (run.step, run.steps, run.losses, run.loss) == (2, 100, (4.0, 3.0), 3.0)
    assert (run.step_seconds, run.tokens_per_second, run.seconds_left) == (2.0, 8000.0, 98 * 1.5)
    (tmp_path / "logs" / f"{ATTEMPT}.n1.log").unlink()
    append(log, "100 loss=2.0 took 1000 ms")
    assert read(reader).losses == (4.0, 3.0, 2.0)


def test_without_logs_that_can_be_read_the_watchdog_s_word_counts(tmp_path: Path) -> None:
    reader = reader_of(tmp_path)
    progress = {"step": 7, "steps": 90, "loss": 1.5, "tokens_per_second": 10.0, "step_seconds": 3.0, "at": 5.0}
    write(tmp_path / "attempts" / ATTEMPT / "progress.json", progress)
    run = read(reader)
    assert (run.step, run.steps, run.loss, run.tokens_per_second, run.step_seconds) == (7, 90, 1.5, 10.0, 3.0)
    assert run.step_at == 5.0


def test_another_attempt_begins_from_nothing_with_its_own_layout_s_prediction(tmp_path: Path) -> None:
    reader = reader_of(tmp_path)
    write(tmp_path / "logs" / f"{ATTEMPT}.{NODE}.log", "it 50/100 loss=4.0 took 1000 ms\n")
    gpu = {"uuid": "GPU-a", "index": 0, "pci": "1", "total_bytes": 80 * GIB, "used_bytes": 9 * GIB}
    line = {"attempt": ATTEMPT, "node": NODE, "time": time.time(), "processes": []}
    write(tmp_path / "peaks" / f"{NODE}.jsonl", json.dumps({**line, "gpus": [gpu]}) + "\n")
    assert [gauge.predicted_bytes for gauge in read(reader).gauges] == [50 * GIB]  # of no rank: the worst stage's
    again = f"{JOB}.1"
    write(tmp_path / "fallback/1/run.json", {**TWO_STAGES, "predicted_bytes": [20 * GIB, 20 * GIB]})
    write(tmp_path / "attempts" / again / "attempt.json", {"attempt": again, "layout": "fallback/1", "nodes": [NODE]})
    run = read(reader)
    assert (run.step, run.losses, run.gauges) == (None, (), ())
    append(tmp_path / "peaks" / f"{NODE}.jsonl", json.dumps({**line, "attempt": again, "gpus": [gpu]}))
    assert [gauge.predicted_bytes for gauge in read(reader).gauges] == [20 * GIB]


def test_mig_slices_have_a_bar_each_and_their_gpu_none(tmp_path: Path) -> None:
    reader = reader_of(tmp_path)
    whole = {"uuid": "GPU-a", "index": 2, "pci": "1", "used_bytes": 9 * GIB}
    slices = [{**whole, "uuid": f"MIG-{n}", "mig": "GPU-a", "total_bytes": 20 * GIB} for n in "xy"]
    slices[1]["process_peak_bytes"] = {"71": 5 * GIB}
    line = {"attempt": ATTEMPT, "node": NODE, "time": time.time(), "gpus": [whole, *slices]}
    processes = [{"rank": 1, "pid": 71, "resident_bytes": GIB, "resident_peak_bytes": GIB}]
    write(tmp_path / "peaks" / f"{NODE}.jsonl", json.dumps({**line, "processes": processes}) + "\n")
    gauges = read(reader).gauges
    devices = [(gauge.device, gauge.uuid, gauge.ranks) for gauge in gauges]
    assert devices == [("2.1", "MIG-y", (1,)), ("2.0", "MIG-x", ())]
    assert gauges[0].peak_bytes == 5 * GIB
