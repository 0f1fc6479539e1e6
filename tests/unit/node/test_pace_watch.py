"""Real monitors and the real watchdog: a GPU is judged by its clock, above the scripted driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmlaunch.node import watchdog as module
from support.node_rig import NODE, NodeRig
from support.watched_step import Watched

WINDOW = ("--pace-window", "0.5")
QUICK = ("--interval", "0.02", "--list-interval", "5", "--beat-interval", "5", *WINDOW)
WELL, SICK = "gpu util=99 power=600\n", "gpu util=99 power=320 clock=990 reasons=0x48 celsius=91\n"


@pytest.fixture(autouse=True)
def quick_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW_SECONDS", 0.5)


def watch(rig: NodeRig, watched: Watched, nodes: list[str], **run: Any) -> None:
    """Have the watchdog look at the monitors of the rig."""
    watched.use(rig.run_directory)
    rig.write_attempt("attempt.json", {"schema": 1, "nodes": nodes})
    watched.watch({"nodes": len(nodes), **run})


def until_slow(watched: Watched, count: int) -> list[dict[str, Any]]:
    watched.until(lambda: len(watched.progress().get("slow", ())) == count and watched.progress(), f"{count} slow GPUs")
    return list(watched.progress()["slow"])


def test_a_gpu_whose_clock_is_held_down_is_named_until_it_recovers(
    gpu_node: NodeRig, watched: Watched, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    second = tmp_path / "second"
    gpu_node.scenario(WELL * 2)
    second.write_text(WELL + SICK)
    gpu_node.start("monitor", *gpu_node.place, "--node", NODE, *QUICK)
    gpu_node.start("monitor", *gpu_node.place, "--node", "node2", *QUICK, FAKE_NVML_SCENARIO=str(second))
    watch(gpu_node, watched, [NODE, "node2"])
    (entry,) = until_slow(watched, 1)
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
    until_slow(watched, 0)
    said = capfd.readouterr().err
    assert said.count("slow: GPU 1 of node2 is 2.0 times slower than its peers (SM clock 990") == 1
    assert said.count("GPU 1 of node2 keeps its peers' pace again") == 1


def test_a_gpu_of_an_old_driver_is_judged_too(old_gpu_node: NodeRig, watched: Watched) -> None:
    old_gpu_node.scenario(WELL * 2 + SICK)
    old_gpu_node.start("monitor", *old_gpu_node.place, "--node", NODE, *QUICK)
    watch(old_gpu_node, watched, [NODE])
    (entry,) = until_slow(watched, 1)
    assert "hardware thermal slowdown" in entry["signs"]


def test_gpus_that_idle_have_no_pace(gpu_node: NodeRig) -> None:
    """Nothing is computed on GPU 0, and of GPU 1 the driver says so itself: their clocks are low."""
    gpu_node.scenario("gpu util=0 clock=345\ngpu util=99 clock=345 reasons=1\n" + WELL)
    gpu_node.start("monitor", *gpu_node.place, "--node", NODE, *QUICK)
    line = gpu_node.until_event("pace")
    assert [device["index"] for device in line["devices"]] == [2]


def test_the_node_of_a_slow_gpu_is_replaced_once_the_trainers_have_made_a_step(
    gpu_node: NodeRig, watched: Watched, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", f"{NODE},node[2-3]")
    gpu_node.scenario(WELL * 2 + SICK)
    gpu_node.start("monitor", *gpu_node.place, "--node", NODE, *QUICK)
    watch(gpu_node, watched, [NODE], restart={"within": "job", "times": 3, "slow_nodes": "replace"})
    watched.hear((10, 3.0))
    watched.until(lambda: "save" in watched.step.asked, "the trainers to be asked to save")
    said = capfd.readouterr().err
    assert "watchdog: slow: GPU 2 of node1 is 2.0 times slower" in said
    assert "asking the trainers to save and end: spare nodes take the place of node1" in said
    assert watched.close()["replaced"] == [NODE]
