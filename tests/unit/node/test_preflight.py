"""`node.pyz preflight` on one node: how far its devices came is on disk at any moment, whatever they do."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from support.node_rig import NODE, NodeRig, until

# Stands for preflight.py of a run directory; each device does what its line says.
DEVICE = """\
import json, os, sys, time
rank = int(sys.argv[sys.argv.index("--local-rank") + 1])
for word in {scripts}[rank].split():
    if word == "hang":
        time.sleep(600)
    elif word == "die":
        os._exit(9)
    elif word == "chatter":
        print("a library says something", flush=True)
    elif word == "bad":
        print(json.dumps({{"bad": "device %d computed a wrong product" % rank}}), flush=True)
    else:
        print(json.dumps({{"stage": word, **({{"seconds": 0.5 + rank}} if word == "matmul" else {{}})}}), flush=True)
"""
ALL = "devices chatter matmul joined reduced"


def start(rig: NodeRig, scripts: list[str], seconds: str = "60", kind: str = "cpu", **environment: str) -> Any:
    script = rig.write("preflight.py", DEVICE.format(scripts=scripts))
    node = ("--node", NODE, "--kind", kind, "--devices", str(len(scripts)), "--rank", "0", "--nodes", "1")
    group = ("--address", "127.0.0.1", "--port", "1", "--seconds", seconds)
    python = ("--python", sys.executable, "--script", str(script))
    return rig.start("preflight", *rig.place, *node, *group, *python, **environment)


def marker_after(rig: NodeRig, scripts: list[str], **options: str) -> dict[str, Any]:
    """Run the preflight to its end, with exit code 0, and return the node's marker."""
    process = start(rig, scripts, **options)
    _, stderr = process.communicate(timeout=180)
    assert process.returncode == 0, stderr
    return marker(rig)


def marker(rig: NodeRig) -> dict[str, Any]:
    return dict(json.loads((rig.attempt_directory / "preflight" / f"{NODE}.json").read_text()))


def test_a_node_that_is_well_says_so(gpu_node: NodeRig) -> None:
    result = marker_after(gpu_node, [ALL, ALL])
    assert (result["stage"], result["bad"], result["matmul_seconds"]) == ("reduced", None, [0.5, 1.5])


def test_the_slowest_device_says_how_far_the_node_came(gpu_node: NodeRig) -> None:
    process = start(gpu_node, [ALL, "devices matmul hang"])
    until(lambda: (gpu_node.attempt_directory / "preflight" / f"{NODE}.json").exists(), "the marker to be written")
    until(lambda: marker(gpu_node)["stage"] == "matmul", "both devices to have computed")
    process.kill()
    assert marker(gpu_node)["bad"] is None


def test_a_device_that_hangs_is_given_up(gpu_node: NodeRig) -> None:
    assert marker_after(gpu_node, ["devices hang", ALL], seconds="1.5")["stage"] == "devices"


@pytest.mark.parametrize(("script", "stage"), [("die", "started"), ("devices matmul joined die", "joined")])
def test_a_device_whose_process_dies_came_no_further(gpu_node: NodeRig, script: str, stage: str) -> None:
    result = marker_after(gpu_node, [script, ALL])
    assert (result["stage"], result["bad"]) == (stage, None)


def test_a_device_that_computes_wrong_makes_the_node_bad(gpu_node: NodeRig) -> None:
    assert marker_after(gpu_node, ["devices hang", "devices bad"])["bad"] == "device 1 computed a wrong product"


@pytest.mark.parametrize(
    ("gpus", "bad"),
    [
        ("gpu ecc=2\ngpu", "GPU 0 has 2 uncorrectable ECC errors since the driver was loaded"),
        ("gpu\ngpu rows=1", "GPU 1 waits for a reset to remap memory rows"),
        ("gpu pages=1\ngpu", "GPU 0 waits for a reset to retire memory pages"),
        ("gpu broken=1\ngpu", "GPU 0 could not remap a bad memory row"),
        ("gpu used=20G\ngpu", "GPU 0 has 20.5 GiB in use before the training; another process holds them"),
        ("gpu\ngpu\nfail * code=15 gpu=1", "GPU 1 does not answer: GPU is lost"),
    ],
)
def test_what_nvml_knows_of_a_gpu_makes_the_node_bad(gpu_node: NodeRig, gpus: str, bad: str) -> None:
    gpu_node.scenario(gpus + "\n")
    assert bad in marker_after(gpu_node, [ALL, ALL], kind="gpu")["bad"]


def test_gpus_of_others_and_errors_a_driver_does_not_count_are_nobodys_problem(gpu_node: NodeRig) -> None:
    """Of four GPUs the job has the last two; the driver knows nothing of ECC."""
    gpu_node.scenario("gpu used=20G\ngpu ecc=1\ngpu\ngpu\nfail nvmlDeviceGetTotalEccErrors code=3 gpu=2\n")
    result = marker_after(gpu_node, [ALL, ALL], kind="gpu", CUDA_VISIBLE_DEVICES="2,3")
    assert (result["stage"], result["bad"]) == ("reduced", None)
