"""What `llmlaunch status --watch` costs while 64 nodes with 8 GPUs each train: the share of one core, and bytes read.

A run of this machine stands for the job; 64 monitors' files hold a day of lines when the watching begins, and get one
more each every 10 s, as monitors write while peaks rise; the log gets a step every second. The process is watched from
its first frame on. Bar: 5 % of one core.

    python benchmarks/watch_refresh.py [SECONDS]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from llmlaunch.units import GIB

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "wrapper"))

from llmlaunch.launchers.local import LocalLauncher  # noqa: E402
from llmlaunch.launchers.run_files import latest_attempt  # noqa: E402

NODES, DEVICES, PIPELINE = 64, 8, 8
DAY_LINES = 1440
BEAT_SECONDS = 10.0
SHARE_BAR = 0.05
JOB = """#!/bin/bash
attempt=local-$(date +%s)-$$.0
mkdir -p "attempts/$attempt"
sleep 3600
"""


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    with tempfile.TemporaryDirectory(prefix="llmlaunch-watch-") as name:
        run = Path(name) / "run"
        attempt, submission = begun(run)
        try:
            for node in range(NODES):
                append(run, attempt, node, DAY_LINES)
            size = sum(path.stat().st_size for path in (run / "peaks").iterdir())
            print(f"{NODES} nodes, {NODES * DEVICES} GPUs, {size / 1e6:.0f} MB of monitors' lines")
            watched(run, attempt, seconds)
        finally:
            LocalLauncher().cancel(submission)


def begun(run: Path) -> tuple[str, Any]:
    run.mkdir()
    world = NODES * DEVICES
    described = {
        "schema": 1,
        "name": "watched",
        "nodes": NODES,
        "devices_per_node": DEVICES,
        "pipeline": PIPELINE,
        "peak_kind": "device",
        "predicted_bytes": [66 * GIB] * PIPELINE,
        "measurement": {"world_size": world, "global_batch_size": 1024, "sequence_length": 8192},
        "progress": {"step_patterns": [r"it (?P<step>\d+) loss (?P<loss>\S+) (?P<seconds>\S+) s"], "steps": 10**6},
    }
    (run / "run.json").write_text(json.dumps({"schema": 1, "name": "watched", "nodes": 1}))
    (run / "plan.json").write_text(json.dumps({"memory": {"limit_bytes": 64 * GIB}}))
    (run / "job.sbatch").write_text(JOB)
    submission = LocalLauncher().submit(run)
    (run / "run.json").write_text(json.dumps(described))  # of 64 nodes, which this machine would not have started
    while (attempt := latest_attempt(submission)) is None:
        time.sleep(0.05)
    nodes = [f"node{node}" for node in range(NODES)]
    (run / "attempts" / attempt / "attempt.json").write_text(json.dumps({"attempt": attempt, "nodes": nodes}))
    (run / "peaks").mkdir()
    for name in nodes:
        (run / "logs" / f"{attempt}.{name}.log").write_text("begins\n")
    return attempt, submission


def append(run: Path, attempt: str, node: int, count: int) -> int:
    """So many more lines of a node's monitor, the peaks a little higher; how many bytes."""
    now = time.time()
    gpus = [
        {
            "index": n,
            "uuid": f"GPU-{node}-{n}",
            "name": "NVIDIA H100 80GB HBM3",
            "pci": f"00000000:{16 * n + 16:02X}:00.0",
            "total_bytes": 80 * GIB,
            "reserved_bytes": GIB // 2,
            "used_bytes": 60 * GIB + int(now) % 1000,
            "device_peak_bytes": 61 * GIB + int(now) % 1000,
            "baseline_bytes": GIB // 2,
            "process_peak_bytes": {str(1000 + n): 60 * GIB + int(now) % 1000},
            "accounting_peak_bytes": {},
            "samples": 100,
            "lost": None,
            "unavailable": {},
        }
        for n in range(DEVICES)
    ]
    processes = [
        {"rank": node * DEVICES + n, "pid": 1000 + n, "resident_bytes": GIB, "resident_peak_bytes": GIB}
        for n in range(DEVICES)
    ]
    line = {"v": 1, "event": "beat", "attempt": attempt, "node": f"node{node}", "time": now, "gpus": gpus}
    text = (json.dumps({**line, "processes": processes, "dropped": 0}) + "\n") * count
    with (run / "peaks" / f"node{node}.jsonl").open("a") as file:
        file.write(text)
    return len(text)


def watched(run: Path, attempt: str, seconds: float) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "llmlaunch", "status", "--watch", "--json", str(run)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "wrapper")},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    began = time.monotonic()
    first = json.loads(process.stdout.readline())
    assert len(first["runs"][0]["memory"]) == NODES * DEVICES
    looking = psutil.Process(process.pid)
    print(f"first frame after {time.monotonic() - began:.1f} s, {busy(looking):.1f} s of CPU")
    drain = subprocess.Popen(["cat"], stdin=process.stdout, stdout=subprocess.DEVNULL)
    cpu, read, start = busy(looking), looking.io_counters().read_chars, time.monotonic()
    written, step, beat_at = 0, 0, start
    while time.monotonic() - start < seconds:
        step += 1
        with (run / "logs" / f"{attempt}.node0.log").open("a") as log:
            written += log.write(f"it {step} loss {1 / step:.4f} 1.0 s\n")
        if time.monotonic() >= beat_at:
            beat_at += BEAT_SECONDS
            written += sum(append(run, attempt, node, 1) for node in range(NODES))
        time.sleep(1.0)
    passed = time.monotonic() - start
    share = (busy(looking) - cpu) / passed
    got = looking.io_counters().read_chars - read
    process.terminate()
    process.wait()
    drain.wait()
    said = "meets" if share <= SHARE_BAR else "misses"
    print(f"over {passed:.0f} s: {100 * share:.1f} % of one core ({said} {100 * SHARE_BAR:.0f} %)")
    print(f"read {got / 1e6:.2f} MB, written {written / 1e6:.2f} MB: {got / written:.2f} times")


def busy(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    main()
