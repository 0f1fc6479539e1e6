"""Real monitors and the real watchdog: a GPU is judged by its clock, above the scripted driver."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.node_rig import ATTEMPT, NODE, NodeRig, until

WINDOW = ("--pace-window", "0.5")
QUICK = ("--interval", "0.02", "--list-interval", "5", "--beat-interval", "5", *WINDOW)
PROGRESS = {"step_patterns": [r"\bstep (?P<step>\d+)/(?P<steps>\d+)"], "slow_patterns": [], "promised": True}
WELL, SICK = "gpu util=99 power=600\n", "gpu util=99 power=320 clock=990 reasons=0x48 celsius=91\n"


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
    assert (entry["node"], entry["device"], entry["factor"]) == ("node2", 1, 2.0)
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


def test_the_node_of_a_slow_gpu_is_replaced_once_the_trainers_have_made_a_step(gpu_node: NodeRig) -> None:
    gpu_node.write(f"logs/{ATTEMPT}.{NODE}.log", "step 10/1000\n")
    gpu_node.scenario(WELL * 2 + SICK)
    gpu_node.start("monitor", *gpu_node.place, "--node", NODE, *QUICK)
    watching = watchdog(gpu_node, [NODE], restart={"within": "job", "times": 3, "slow_nodes": "replace"})
    _, stderr = watching.communicate(timeout=120)  # the training step has heard it, and ended
    assert "watchdog: slow: GPU 2 of node1 is 2.0 times slower" in stderr
    assert "asking the trainers to save and end: spare nodes take the place of node1" in stderr
    assert json.loads((gpu_node.attempt_directory / "progress.json").read_text())["replaced"] == [NODE]
