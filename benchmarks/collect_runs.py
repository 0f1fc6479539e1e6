"""What `llmlaunch collect` takes for 250, 500 and 1000 finished runs of 8 nodes with 8 GPUs each.

The run directories are rendered by `llmlaunch render`, then filled as four hours of training leave them: 64 rank
records and probes' lines, 8 monitors' files of 240 lines, and the summary that the job's last act writes. Files are
hard links to one copy, so that a thousand runs fit on a disk. Each time is of a whole process, into a store of its own.
Bars: 1000 runs in 10 s, and a run of 1000 in at most 1.25 times as long as one of 250. Then what a second collect takes
that finds nothing new, and 25 runs that were killed, without summary: all of their files are read.

    python benchmarks/collect_runs.py [FOLDER]
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from llmlaunch.units import GIB

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "wrapper"))

from llmlaunch.rundir.memory_files import summarize  # noqa: E402

RECIPE = ROOT / "recipes" / "llama3-70b.yaml"
NODES, DEVICES = 8, 8
HOURS, BEAT_SECONDS = 4, 60
COUNTS = (250, 500, 1000)
KILLED = 25
SECONDS_BAR, RATIO_BAR = 10.0, 1.25
ATTEMPT = "4711.0"
STARTED = 1_760_000_000.0
PER_RUN = {"run.id", "submission.json"}  # every other file is the same in each


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp(prefix="llmlaunch-collect-"))
    try:
        template = rendered(folder / "template")
        fill(template)
        size = sum(path.stat().st_size for path in template.rglob("*") if path.is_file())
        print(f"a run: {sum(1 for _ in template.rglob('*.json*'))} JSON files, {size / 1e6:.1f} MB in all")
        runs = [copied(template, folder / "runs" / f"run{number}", number) for number in range(max(COUNTS))]
        finished(folder, runs)
        killed(folder, template)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def finished(folder: Path, runs: list[Path]) -> None:
    by_count = {}
    for count in COUNTS:
        store = folder / f"store-{count}.db"
        seconds, busy, _ = collect(store, runs[:count])
        again, _, _ = collect(store, [])
        by_count[count] = seconds / count
        print(
            f"{count} runs: {seconds:.2f} s ({busy:.2f} s of a core), {1000 * seconds / count:.2f} ms a run;", end=" "
        )
        print(f"nothing new: {again:.2f} s; store {store.stat().st_size / 1e6:.0f} MB")
    ratio = by_count[max(COUNTS)] / by_count[min(COUNTS)]
    print(f"{max(COUNTS)} runs: {by_count[max(COUNTS)] * max(COUNTS):.2f} s, bar {SECONDS_BAR}", end="; ")
    print(f"time of a run against {min(COUNTS)}: {ratio:.2f}, bar {RATIO_BAR}")


def killed(folder: Path, template: Path) -> None:
    for path in (template / "attempts" / ATTEMPT / "summary.json", *template.rglob("status.json")):
        path.unlink()
    runs = [copied(template, folder / "killed" / f"run{number}", number) for number in range(KILLED)]
    seconds, busy, memory = collect(folder / "store-killed.db", runs)
    print(f"{KILLED} killed runs, no summary: {seconds:.2f} s ({busy:.2f} s of a core), ", end="")
    print(f"{1000 * seconds / KILLED:.0f} ms a run, {memory / 2**20:.0f} MiB resident at most")


def collect(store: Path, runs: list[Path]) -> tuple[float, float, int]:
    """Wall time and time of a core in seconds, and the most bytes resident of any such process so far."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "LLMLAUNCH_STORE": str(store), "PYTHONPATH": str(ROOT / "wrapper")}
    command = [sys.executable, "-m", "llmlaunch", "collect", "--json", *map(str, runs)]
    start = time.perf_counter()
    told = subprocess.run(command, check=True, capture_output=True, env=environment).stdout
    seconds = time.perf_counter() - start
    for one in json.loads(told)["runs"]:
        assert one["did"] == ("collected" if runs else "unchanged"), one
        assert one["measurements"] >= NODES * DEVICES or not runs, one
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, after.ru_maxrss * 1024


def rendered(folder: Path) -> Path:
    words = [f"nodes={NODES}", "-o", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "wrapper")}
    subprocess.run([sys.executable, "-m", "llmlaunch", "render", str(RECIPE), *words], check=True, env=environment)
    return folder


def copied(template: Path, folder: Path, number: int) -> Path:
    def place(source: str, target: str) -> None:
        if Path(source).name not in PER_RUN:
            os.link(source, target)

    shutil.copytree(template, folder, copy_function=place)
    (folder / "run.id").write_text(f"llama3-70b-20260101T000000Z-{number:04d}\n")
    write(folder / "submission.json", {"launcher": "slurm", "job_id": str(number), "submitted_at": STARTED - 60})
    return folder


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def append(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(f"\n{json.dumps(value)}\n")


def fill(run: Path) -> None:
    """What nodes leave of a run that went well."""
    attempt = run / "attempts" / ATTEMPT
    names = [f"n{number}" for number in range(NODES)]
    write(attempt / "attempt.json", {"schema": 1, "attempt": ATTEMPT, "layout": "", "cluster": "c", "nodes": names})
    ranks = [rank_record(rank) for rank in range(NODES * DEVICES)]
    for record in ranks:
        append(attempt / "ranks" / f"{record['node']}.jsonl", record)
        append(attempt / "memory" / f"{record['node']}.jsonl", probe(record))
    for node, name in enumerate(names):
        write(attempt / "done" / name, "")
        (run / "logs" / f"{ATTEMPT}.{name}.log").write_text("iteration 1000/1000\n" * 1000)
        with (run / "peaks" / f"{name}.jsonl").open("w") as file:
            for line in monitor_lines(node, name):
                file.write(json.dumps(line) + "\n")
    status = {
        "schema": 1, "attempt": ATTEMPT, "state": "succeeded", "exit_code": 0, "why": "every trainer succeeded",
        "nodes": [{"node": name, "done": True} for name in names], "ranks": ranks, "layout": "", "cause": None,
        "ended_at": STARTED + HOURS * 3600 + 5, "next": {"action": "end"},
    }  # fmt: skip
    for path in (attempt / "status.json", run / "status.json"):
        write(path, status)
    write(attempt / "summary.json", summarize(run, ATTEMPT).as_json())


def rank_record(rank: int) -> dict[str, Any]:
    return {
        "v": 1, "rank": rank, "local_rank": rank % DEVICES, "node": f"n{rank // DEVICES}", "pid": 5000 + rank,
        "program_pid": 6000 + rank, "started_at": STARTED + rank / 100, "ended_at": STARTED + HOURS * 3600,
        "exit_code": 0, "signal": None, "resident_peak_bytes": 9 * GIB + rank, "visible_devices": None,
    }  # fmt: skip


def probe(record: dict[str, Any]) -> dict[str, Any]:
    device = {
        "device": record["local_rank"], "uuid": uuid(record["rank"]), "total_bytes": 80 * GIB,
        "allocated_peak_bytes": 60 * GIB + record["rank"], "active_peak_bytes": 61 * GIB,
        "reserved_peak_bytes": 66 * GIB + record["rank"], "reserved_bytes": 66 * GIB, "alloc_retries": 0, "ooms": 0,
        "device_used_bytes": 70 * GIB, "outside_bytes": 3 * GIB,
    }  # fmt: skip
    place = {name: record[name] for name in ("rank", "local_rank", "node")}
    return {"v": 1, **place, "pid": record["program_pid"], "at": STARTED, "ended": True, "devices": [device]}


def uuid(rank: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{rank:012d}"


def monitor_lines(node: int, name: str) -> list[dict[str, Any]]:
    beats = HOURS * 3600 // BEAT_SECONDS
    events = ["start", *["beat"] * beats, "end"]
    return [monitor_line(node, name, event, number) for number, event in enumerate(events)]


def monitor_line(node: int, name: str, event: str, number: int) -> dict[str, Any]:
    ranks = range(node * DEVICES, (node + 1) * DEVICES)
    gpus = [
        {
            "index": rank % DEVICES, "uuid": uuid(rank), "name": "NVIDIA H100 80GB HBM3", "mig": None,
            "pci": f"00000000:{rank % DEVICES + 1:02X}:00.0", "total_bytes": 80 * GIB, "reserved_bytes": GIB // 2,
            "used_bytes": 69 * GIB, "device_peak_bytes": 69 * GIB + number, "baseline_bytes": GIB,
            "process_peak_bytes": {str(6000 + rank): 68 * GIB}, "accounting_peak_bytes": {str(6000 + rank): 69 * GIB},
            "samples": 60 * number, "lost": False, "unavailable": {}, "utilization_percent": 91.5,
            "power_watts": 611.2, "power_peak_watts": 700.0,
        }
        for rank in ranks
    ]  # fmt: skip
    processes = [
        {"rank": rank, "pid": 6000 + rank, "resident_bytes": 8 * GIB, "resident_peak_bytes": 9 * GIB} for rank in ranks
    ]
    host = {"used_peak_bytes": 90 * GIB, "total_bytes": 1024 * GIB, "cgroup_peak_bytes": None}
    return {
        "v": 1, "event": event, "attempt": ATTEMPT, "node": name, "time": STARTED + BEAT_SECONDS * number, "gpus": gpus,
        "processes": processes, "host": host, "dropped": 0,
    }  # fmt: skip


if __name__ == "__main__":
    main()
