"""How many metadata calls on the run directory a training of 2,000 nodes with 8 GPUs each makes, counted by strace.

Two nodes are started as SLURM starts them, each by the real `node.pyz node` over a scripted driver; torch and the
trainer are stand-ins. What a node does is the same on 2 and on 2,000 nodes, so its calls are multiplied. What grows
with the nodes is measured for real on a made-up directory of 2,000 nodes and 16,000 ranks: its begin, a minute of the
watchdog, its end and `status`. Bars: 50,000 calls to start, 5,000 a minute after, 2 s for the end and `status` each.

    python benchmarks/metadata.py [NODES]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "wrapper"), str(ROOT / "tests"), str(ROOT / "benchmarks")]

import last_act  # noqa: E402

from llmlaunch.rendering.node_archive import node_archive  # noqa: E402
from support.metadata_calls import TracedProcess, by_path  # noqa: E402
from support.node_rig import build  # noqa: E402
from support.traced_node import TracedNodes  # noqa: E402

TRACED_NODES, STEADY_SECONDS, WATCHED_SECONDS = 2, 60.0, 60.0
START_BAR, MINUTE_BAR, SECONDS_BAR = 50_000, 5_000, 2.0
PROBE_LINES, MONITOR_LINES = 20, 20
IMPORTS = f"""
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
run, attempt, nodes = Path(sys.argv[2]), {last_act.ATTEMPT!r}, tuple(sys.argv[3:])
"""
# Each is what node.pyz job calls; as there, what may hang is left behind.
PARTS = {
    "begin": """
from llmlaunch.node.begin import Beginning, begin
begin(Beginning(run, attempt, nodes))
os._exit(0)
""",
    "watch": f"""
from llmlaunch.node.event_loop import EventLoop
from llmlaunch.node.line_writer import DiskThread
from llmlaunch.node.watchdog import AttemptWatchdog
from llmlaunch.rundir.step_lines import Step, StepNews
class Step_:
    is_stopping = False
step, loop, disk = 0, EventLoop((), print, lambda: None), DiskThread()
disk.start()
watchdog = AttemptWatchdog(run, attempt, ".", Step_(), loop, disk)
def a_step():
    global step
    step += 1
    watchdog.hear(StepNews([Step(step, 9000)], False))
loop.every(1.0, a_step)
ends = time.monotonic() + {WATCHED_SECONDS}
loop.run(lambda: time.monotonic() >= ends)
os._exit(0)
""",
    "finish": """
from llmlaunch.node.finish import Ending, finish
finish(Ending(run, attempt, len(nodes), 0, done=nodes))
os._exit(0)
""",
}


def main() -> None:
    nodes = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    with tempfile.TemporaryDirectory(prefix="llmlaunch-metadata-") as folder:
        start, minute, end = node_calls(Path(folder))
        run = made_up(Path(folder) / "run", nodes)
        begun, _ = traced(run, "begin", nodes)
        watched, _ = traced(run, "watch", nodes)
        finished, seconds = traced(run, "finish", nodes)
        status = status_seconds(run)
    print(f"a node of 8 ranks: {start:.0f} calls to start, {minute:.1f} a minute, {end:.0f} to end")
    print(f"{nodes} nodes: {start * nodes + begun:,.0f} to start (bar {START_BAR:,}), of them begin {begun}")
    print(f"{nodes} nodes: {minute * nodes + watched:,.0f} a minute (bar {MINUTE_BAR:,}), of them watchdog {watched}")
    print(
        f"{nodes} nodes: {end * nodes:,.0f} to end, and the job {finished} in {seconds:.1f} s; status in {status:.1f} s"
    )
    missed = start * nodes + begun > START_BAR or minute * nodes + watched > MINUTE_BAR
    sys.exit(missed or max(seconds, status) > SECONDS_BAR)


def node_calls(folder: Path) -> tuple[float, float, float]:
    """Calls of one node: to start, in a minute of training, and to end."""
    nodes = TracedNodes(folder / "nodes", build(folder / "driver"))
    nodes.start(TRACED_NODES)
    time.sleep(3)
    up = time.time()
    time.sleep(STEADY_SECONDS)
    ends = time.time()
    assert nodes.end() == [0] * TRACED_NODES
    spans = ((0.0, up), (up, ends), (ends, float("inf")))
    counts = [sum(len(node.calls(*span)) for node in nodes.nodes) / TRACED_NODES for span in spans]
    print("to start:", dict(by_path(nodes.nodes[0].calls(0.0, up)).most_common(8)))
    return counts[0], counts[1] * 60 / STEADY_SECONDS, counts[2]


def names(nodes: int) -> list[str]:
    return [f"node{node:03}" for node in range(nodes)]


def made_up(run: Path, nodes: int) -> Path:
    """A run directory after a training: every node left its log, its ranks' records, their probes and its monitor's
    lines."""
    attempt = run / "attempts" / last_act.ATTEMPT
    for folder in (run / "peaks", run / "logs", *(attempt / name for name in ("ranks", "memory", "done"))):
        folder.mkdir(parents=True)
    described = {"schema": 1, "name": "made-up", "peak_kind": "device", "nodes": nodes, "devices_per_node": 8}
    progress = {"step_patterns": [r"step (?P<step>\d+)/"], "promised": True, "floor_seconds": 600.0}
    (run / "run.json").write_text(json.dumps({**described, "pipeline": 4, "progress": progress}))
    (run / "node.pyz").write_bytes(node_archive())
    (run / "job.sbatch").touch()
    submission = {"schema": 1, "launcher": "slurm", "job_id": "4711", "cluster": None, "submitted_at": 1_760_000_000}
    (run / "submission.json").write_text(json.dumps(submission))
    for node, name in enumerate(names(nodes)):
        (attempt / "done" / name).touch()
        (run / "logs" / f"{last_act.ATTEMPT}.{name}.log").write_text("step 1/9\n" if node == nodes - 1 else "starts\n")
        (run / "peaks" / f"{name}.jsonl").write_text(
            "".join(last_act.line(name, node, n) for n in range(MONITOR_LINES))
        )
        last_act.write_ranks(attempt, node, name, PROBE_LINES)
    return run


def traced(run: Path, part: str, nodes: int) -> tuple[int, float]:
    """Calls of a part of the job under strace, and the seconds that it takes without. The archive that it is imported
    from lies beside the run directory."""
    archive = run.with_name("node.pyz")
    archive.write_bytes(node_archive())
    command = [sys.executable, "-I", "-S", "-c", IMPORTS + PARTS[part], str(archive), str(run), *names(nodes)]
    process = TracedProcess(command, run, run.with_name(f"trace-{part}"), os.environ, run.with_name("output"))
    assert process.process.wait() == 0, run.with_name("output").read_text()
    if part == "watch":
        return len(process.calls()), WATCHED_SECONDS
    began = time.monotonic()
    subprocess.run(command, capture_output=True, check=True)
    return len(process.calls()), time.monotonic() - began


def status_seconds(run: Path) -> float:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "wrapper"), "LLMLAUNCH_STORE": str(run.with_name("store.db"))}
    began = time.monotonic()
    words = [sys.executable, "-m", "llmlaunch", "status", str(run)]
    subprocess.run(words, check=True, env=environment, capture_output=True)
    return time.monotonic() - began


if __name__ == "__main__":
    main()
