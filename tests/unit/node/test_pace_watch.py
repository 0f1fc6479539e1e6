"""Real monitors and the real watchdog: a GPU by its clock, above the scripted driver, and a rank of a real gloo
training that is stopped most of the time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.node.pace_watch import rank_stages
from support.node_rig import ATTEMPT, NODE, NodeRig, until

WINDOW = ("--pace-window", "0.5")
QUICK = ("--interval", "0.02", "--list-interval", "5", "--beat-interval", "5", *WINDOW)
PROGRESS = {"step_patterns": [r"\bstep (?P<step>\d+)/(?P<steps>\d+)"], "slow_patterns": [], "promised": True}
WELL, SICK = "gpu util=99 power=600\n", "gpu util=99 power=320 clock=990 reasons=0x48 celsius=91\n"
# All ranks work as much in each step and then wait for each other.
TRAINER = """
import os, sys, time
import torch, torch.distributed as dist
rank, log = int(os.environ["RANK"]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=3)
ones = torch.ones(8)
for step in range(1, 10**6):
    end = time.thread_time() + 0.01
    while time.thread_time() < end:
        pass
    dist.all_reduce(ones)
    if rank == 0 and step % 10 == 0:
        with open(log, "a") as file:
            file.write(f"step {step}/1000000\\n")
"""
THROTTLE = """
import os, signal, sys, time
while True:
    os.kill(int(sys.argv[1]), signal.SIGSTOP)
    time.sleep(0.08)
    os.kill(int(sys.argv[1]), signal.SIGCONT)
    time.sleep(0.02)
"""


def watchdog(rig: NodeRig, nodes: list[str], **run: Any) -> Any:
    rig.write("run.json", {"nodes": len(nodes), "progress": PROGRESS, **run})
    rig.write_attempt("attempt.json", {"schema": 1, "nodes": nodes})
    child = rig.start("rank", *rig.place, "--node", "job", "--", "sleep", "600", RANK="900", LOCAL_RANK="0")
    options = ("--child", str(child.pid), "--poll", "0.05", *WINDOW)
    return rig.start("watchdog", *rig.place, *options, SLURM_JOB_NODELIST=f"{NODE},node[2-3]")


def slow(rig: NodeRig) -> list[dict[str, Any]] | None:
    path = rig.attempt_directory / "progress.json"
    return list(json.loads(path.read_text())["slow"]) if path.exists() else None


def ended(process: Any) -> str:
    process.terminate()
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    return str(stderr)


def test_a_gpu_whose_clock_is_held_down_is_named_until_it_recovers(gpu_node: NodeRig, tmp_path: Path) -> None:
    second = tmp_path / "second"
    gpu_node.scenario(WELL * 2)
    second.write_text(WELL + SICK)
    gpu_node.start("monitor", *gpu_node.place, "--node", NODE, *QUICK)
    gpu_node.start("monitor", *gpu_node.place, "--node", "node2", *QUICK, FAKE_NVML_SCENARIO=str(second))
    watching = watchdog(gpu_node, [NODE, "node2"])
    (entry,) = until(lambda: slow(gpu_node), "the slow GPU to be named")
    assert (entry["node"], entry["device"], entry["rank"], entry["factor"]) == ("node2", 1, None, 2.0)
    assert entry["uuid"] == "GPU-00000000-0000-0000-0000-000000000001"
    assert entry["signs"] == [
        "SM clock 990 MHz, its peers 1980",
        "hardware thermal slowdown",
        "hardware slowdown",
        "91 °C, its peers 60",
    ]
    gpu_node.finish(2, 1)
    assert gpu_node.status()["slow"] == [entry]
    cured = tmp_path / "cured"
    cured.write_text(WELL * 2)
    cured.replace(second)
    until(lambda: slow(gpu_node) == [], "the GPU to recover")
    stderr = ended(watching)
    assert stderr.count("slow: GPU 1 of node2 is 2.0 times slower than its peers (SM clock 990") == 1
    assert stderr.count("GPU 1 of node2 keeps its peers' pace again") == 1


def test_a_gpu_of_an_old_driver_is_judged_too(old_gpu_node: NodeRig) -> None:
    old_gpu_node.scenario(WELL * 2 + SICK)
    old_gpu_node.start("monitor", *old_gpu_node.place, "--node", NODE, *QUICK)
    watchdog(old_gpu_node, [NODE])
    (entry,) = until(lambda: slow(old_gpu_node), "the slow GPU to be named")
    assert "hardware thermal slowdown" in entry["signs"]


def test_gpus_that_idle_have_no_pace(gpu_node: NodeRig) -> None:
    """Nothing is computed on GPU 0, and of GPU 1 the driver says so itself: their clocks are low."""
    gpu_node.scenario("gpu util=0 clock=345\ngpu util=99 clock=345 reasons=1\n" + WELL)
    gpu_node.start("monitor", *gpu_node.place, "--node", NODE, *QUICK)
    line = gpu_node.until_event("pace")
    assert [device["index"] for device in line["devices"]] == [2]


@pytest.fixture
def throttles() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def test_a_rank_of_a_real_training_that_holds_the_others_up_is_named_and_its_node_replaced(
    cpu_node: NodeRig, tmp_path: Path, throttles: list[subprocess.Popen[bytes]]
) -> None:
    log = cpu_node.write(f"logs/{ATTEMPT}.{NODE}.log", "")
    meeting = str(tmp_path / "meeting")
    for rank in range(3):
        cpu_node.rank(sys.executable, "-c", TRAINER, meeting, str(log), rank=rank, OMP_NUM_THREADS="1")
    cpu_node.start("monitor", *cpu_node.place, "--node", NODE, *QUICK)
    policy = {"within": "job", "times": 3, "slow_nodes": "replace"}
    watching = watchdog(cpu_node, [NODE], devices_per_node=3, pipeline=1, restart=policy)
    until(lambda: slow(cpu_node) == [], "the first steps, of which none is slow")
    throttles.append(subprocess.Popen([sys.executable, "-c", THROTTLE, str(cpu_node.record(1)["program_pid"])]))
    (entry,) = until(lambda: slow(cpu_node), "the throttled rank to be named")
    assert (entry["node"], entry["rank"], entry["device"]) == (NODE, 1, None)
    assert entry["factor"] >= 1.5
    progress = json.loads((cpu_node.attempt_directory / "progress.json").read_text())
    assert progress["replaced"] == [NODE]
    _, stderr = watching.communicate(timeout=120)  # the training step has heard it, and ended
    assert "watchdog: slow: rank 1 on node1 is " in stderr
    assert "asking the trainers to save and end: spare nodes take the place of node1" in stderr


def test_ranks_with_experts_may_have_unequal_work() -> None:
    run = {"nodes": 2, "devices_per_node": 2, "pipeline": 2}
    assert rank_stages(run) == {0: 0, 1: 0, 2: 1, 3: 1}
    assert rank_stages({**run, "measurement": {"layout": {"expert": 2}}}) == {}
    assert rank_stages({}) == {}
