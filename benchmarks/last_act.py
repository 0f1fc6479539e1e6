"""What the job's last act takes: the judging of 16, 64 and 128 nodes with 8 GPUs each, after a day of training.

Each node leaves 1440 lines of its monitor, and the records and a probe's line of each GPU's rank, all in the disk's
cache: what is measured is the reading and the account, in seconds of processors. The account of 128 nodes has to be
ready within the 30 s that `finish` gives it, and a node may take at most 1.25 times as long as one of 16.

    python benchmarks/last_act.py [LINES]
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "wrapper"))

from llmlaunch.node.finish import PATIENCE_SECONDS  # noqa: E402
from llmlaunch.rendering.node_archive import node_archive  # noqa: E402

COUNTS, DEVICES, RATIO_BAR = (16, 64, 128), 8, 1.25
# As node.pyz job does it; what still hangs then is left behind.
FINISH = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from llmlaunch.node.finish import Ending, finish
finish(Ending(Path(sys.argv[2]), "4711.0", int(sys.argv[3]), 0))
os._exit(0)
"""
ATTEMPT, STARTED, GIB = "4711.0", 1_760_000_000.0, 2**30


def main() -> None:
    lines = int(sys.argv[1]) if len(sys.argv) > 1 else 1440
    folder = Path(tempfile.mkdtemp(prefix="llmlaunch-last-act-"))
    try:
        (folder / "node.pyz").write_bytes(node_archive())
        by_count = {count: finish(folder, run_of(folder / f"run{count}", count, lines), count) for count in COUNTS}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    per_node = {count: busy / count for count, (_, busy) in by_count.items()}
    ratio = per_node[COUNTS[-1]] / per_node[COUNTS[0]]
    seconds = by_count[COUNTS[-1]][1]
    print(f"{COUNTS[-1]} nodes: {100 * seconds / PATIENCE_SECONDS:.0f} % of the {PATIENCE_SECONDS:g} s it is given")
    print(f"a node of {COUNTS[-1]} takes {ratio:.2f} times as long as one of {COUNTS[0]} (bar {RATIO_BAR})")
    sys.exit(seconds > PATIENCE_SECONDS or ratio > RATIO_BAR)


def finish(folder: Path, run: Path, nodes: int) -> tuple[float, float]:
    """Seconds by the clock and of processors; the summary must be there and whole."""
    before, began = os.times(), time.monotonic()
    command = [sys.executable, "-I", "-S", "-c", FINISH, str(folder / "node.pyz"), str(run), str(nodes)]
    subprocess.run(command, check=True, capture_output=True)
    seconds, after = time.monotonic() - began, os.times()
    busy = after.children_user + after.children_system - before.children_user - before.children_system
    path = run / "attempts" / ATTEMPT / "summary.json"
    if not path.exists():
        sys.exit(f"{nodes} nodes: no summary within {PATIENCE_SECONDS:g} s ({busy:.1f} s of processors)")
    account = json.loads(path.read_text())
    assert len(account["ranks"]) == nodes * DEVICES
    assert all(rank["peak_bytes"] == 61 * GIB for rank in account["ranks"])
    print(
        f"{nodes} nodes: {busy:.2f} s of processors ({seconds:.1f} s by the clock), {path.stat().st_size / 1e6:.1f} MB"
    )
    return seconds, busy


def run_of(run: Path, nodes: int, lines: int) -> Path:
    attempt = run / "attempts" / ATTEMPT
    for made in (run / "peaks", attempt / "ranks", attempt / "memory", attempt / "done"):
        made.mkdir(parents=True)
    described = {"schema": 1, "peak_kind": "device", "nodes": nodes, "devices_per_node": DEVICES, "pipeline": 4}
    (run / "run.json").write_text(json.dumps(described))
    for node in range(nodes):
        name = f"node{node:03}"
        (attempt / "done" / name).touch()
        (run / "peaks" / f"{name}.jsonl").write_text("".join(line(name, node, number) for number in range(lines)))
        write_ranks(attempt, node, name)
    return run


def write_ranks(attempt: Path, node: int, name: str, probe_lines: int = 1) -> None:
    """Write what the wrappers and the probes of a node append to its two files."""
    records, accounts = [], []
    for device in range(DEVICES):
        rank = node * DEVICES + device
        ended = rank_record(rank, device, name)
        records += [{**ended, "ended_at": None, "exit_code": None, "resident_peak_bytes": None}, ended]
        accounts += [probed(rank, device, name, node)] * probe_lines
    for folder, lines in (("ranks", records), ("memory", accounts)):
        (attempt / folder / f"{name}.jsonl").write_text("".join(f"\n{json.dumps(line)}\n" for line in lines))


def line(name: str, node: int, number: int) -> str:
    gpus = [
        {
            "index": device, "uuid": uuid(node, device), "mig": None, "name": "NVIDIA H100 80GB HBM3",
            "pci": f"00000000:{device:02X}:00.0", "total_bytes": 80 * GIB, "reserved_bytes": GIB // 2,
            "used_bytes": 60 * GIB + number, "device_peak_bytes": 61 * GIB + GIB // 2, "baseline_bytes": GIB // 2,
            "process_peak_bytes": {str(1000 + device): 60 * GIB}, "accounting_peak_bytes": {},
            "utilization_percent": 90 + number % 10, "power_watts": 600.5, "power_source": "energy",
            "power_peak_watts": 700, "samples": 60 * number, "lost": None, "unavailable": {"accounting_mode": 3},
        }
        for device in range(DEVICES)
    ]  # fmt: skip
    processes = [
        {"rank": node * DEVICES + device, "pid": 1000 + device, "resident_bytes": GIB, "resident_peak_bytes": 2 * GIB}
        for device in range(DEVICES)
    ]
    host = {
        "used_peak_bytes": 90 * GIB,
        "total_bytes": 2000 * GIB,
        "cgroup_peak_bytes": None,
        "cgroup_limit_bytes": None,
    }
    told = {"v": 1, "event": "beat", "attempt": ATTEMPT, "node": name, "time": STARTED + 60.0 * number}
    return json.dumps(
        {**told, "gpus": gpus, "processes": processes, "host": host, "logged": [], "dropped": 0}, separators=(",", ":")
    ) + "\n"  # fmt: skip


def uuid(node: int, device: int) -> str:
    return f"GPU-{node:08d}-{device:04d}-aaaa-bbbb-cccccccccccc"


def rank_record(rank: int, device: int, name: str) -> dict[str, Any]:
    return {
        "v": 1, "rank": rank, "local_rank": device, "node": name, "pid": 500 + device, "program_pid": 1000 + device,
        "started_at": STARTED, "ended_at": STARTED + 86400, "exit_code": 0, "signal": None,
        "resident_peak_bytes": 2 * GIB, "visible_devices": None,
    }  # fmt: skip


def probed(rank: int, device: int, name: str, node: int) -> dict[str, Any]:
    seen = {
        "device": device, "uuid": uuid(node, device), "total_bytes": 79 * GIB, "allocated_peak_bytes": 50 * GIB,
        "active_peak_bytes": 51 * GIB, "reserved_peak_bytes": 59 * GIB, "reserved_bytes": 59 * GIB, "alloc_retries": 0,
        "ooms": 0, "device_used_bytes": 60 * GIB, "outside_bytes": GIB,
    }  # fmt: skip
    told = {"v": 1, "rank": rank, "local_rank": device, "node": name, "pid": 1000 + device}
    return {**told, "at": STARTED + 86400, "ended": True, "devices": [seen]}


if __name__ == "__main__":
    main()
