"""A GPU job from recipe to store: everything real but the driver, which is a scripted libnvidia-ml.so.1.

The trainer is a person's own script that drives the scripted GPUs, and the counters of torch's allocator, instead of
training; the programs of the job and the node, the monitor with the real pynvml, `collect` and the store are what a
cluster runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.assets import asset
from support.command_line import data_folders, run_llmlaunch
from support.node_rig import GIB, build

SUPPORT = Path(__file__).resolve().parents[1] / "support"
# Baselines are 1.5 GiB, peaks 40.5 and 41.5: the stand-in's driver reserves half a GiB beside what is used.
TRAINER = """
import os, time
from pathlib import Path
import torch, fake_allocator
scenario, rank = Path(os.environ["FAKE_NVML_SCENARIO"]), int(os.environ["RANK"])

def until_written(name, *gibibytes):
    texts = [f'"{name}":{int(number * 2**30)},' for number in gibibytes]
    give_up_at = time.monotonic() + 240
    while time.monotonic() < give_up_at:
        lines = "".join(path.read_text() for path in Path(os.environ["LLMLAUNCH_RUN_DIR"]).glob("peaks/*.jsonl"))
        if all(lines.count(text) >= texts.count(text) for text in texts):
            return
        time.sleep(0.05)

until_written("baseline_bytes", 1.5, 1.5)  # the monitor sees the idle GPUs first
if rank == 0:
    fresh = scenario.with_suffix(".new")
    fresh.write_text("gpu uuid=GPU-a used=40G\\ngpu uuid=GPU-b used=41G\\n")
    fresh.replace(scenario)
fake_allocator.install()
torch.cuda.set_device(rank)
torch.cuda.init()
spike = (30 + rank) * 2**30
fake_allocator.hold(spike, rank)
time.sleep(0.02)
fake_allocator.release(spike, rank)
fake_allocator.empty_cache(rank)
torch.cuda.reset_peak_memory_stats()
until_written("device_peak_bytes", 40.5, 41.5)
"""

pytestmark = pytest.mark.frameworks


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu-run")


@pytest.fixture(scope="module")
def run(place: Path) -> subprocess.CompletedProcess[str]:
    (place / "train.py").write_text(TRAINER)
    scenario = place / "scenario"
    scenario.write_text("gpu uuid=GPU-a used=1G\ngpu uuid=GPU-b used=1G\nslow nvmlDeviceGetMemoryInfo_v2 us=20000\n")
    environment = {
        "LD_LIBRARY_PATH": str(build(place / "library")),
        "FAKE_NVML_SCENARIO": str(scenario),
        "LLMLAUNCH_PYTHON": sys.executable,
        "PYTHONPATH": ":".join(filter(None, (os.environ.get("PYTHONPATH"), str(SUPPORT)))),
    }
    words = (
        "nodes=1", "cluster={base: a100-80gb-x8, devices_per_node: 2}", "model={base: llama2-7b, num_layers: 4}",
        f"backend={{name: deepspeed, script: {place / 'train.py'}}}", "layout={zero_stage: 2}",
        "monitor.interval_seconds=0.2", "--local", "--follow", "--json", "-o", "run",
    )  # fmt: skip
    recipe = asset("recipes", "llama2-7b-deepspeed.yaml")
    return run_llmlaunch(place, "submit", recipe, *words, code=0, **data_folders(place), **environment)


@pytest.fixture(scope="module")
def measured(place: Path, run: subprocess.CompletedProcess[str]) -> dict[int, dict[str, Any]]:
    done = run_llmlaunch(place, "measurements", "list", "--json", code=0, **data_folders(place))
    listed = json.loads(done.stdout)["measurements"]
    return {record["global_rank"]: record for record in listed if record["peak_kind"] == "device"}


def test_each_ranks_device_peak_is_the_true_one(measured: dict[int, dict[str, Any]]) -> None:
    assert {rank: record["gpu_uuid"] for rank, record in measured.items()} == {0: "GPU-a", 1: "GPU-b"}
    assert measured[0]["baseline_bytes"] == measured[1]["baseline_bytes"] == GIB + GIB // 2
    assert measured[0]["peak_bytes"] == 39 * GIB
    assert measured[1]["peak_bytes"] == 40 * GIB


def test_a_spike_of_20_ms_that_the_trainer_forgot_is_in_the_store(
    measured: dict[int, dict[str, Any]], place: Path
) -> None:
    """Between two samples of the monitor, before a reset of torch's counters: the probe banked it."""
    (path,) = (place / "run" / "attempts").glob("*/summary.json")
    ranks = {one["rank"]: one for one in json.loads(path.read_text())["ranks"]}
    for rank in (0, 1):
        assert ranks[rank]["allocated_peak_bytes"] == (30 + rank) * GIB
        assert ranks[rank]["reserved_peak_bytes"] == (31 + rank) * GIB
        assert measured[rank]["observed"]["allocated_peak_bytes"] == (30 + rank) * GIB


def test_the_record_is_complete_enough_to_score_a_prediction(measured: dict[int, dict[str, Any]], place: Path) -> None:
    record = measured[0]
    assert record["predicted_bytes"] > 0
    assert record["layout"]["zero_stage"] == 2
    assert record["peak_source"]
    exported = place / "mine.jsonl"
    exported.write_text(json.dumps(record) + "\n")
    (result,) = json.loads(run_llmlaunch(place, "accuracy", exported, "--json", code=0).stdout)["records"]
    assert result["supported"], result["reason"]


def test_the_job_wrote_the_account_of_each_gpu_and_rank(measured: dict[int, dict[str, Any]], place: Path) -> None:
    status = json.loads((place / "run" / "status.json").read_text())
    account = json.loads((place / "run" / "attempts" / status["attempt"] / "summary.json").read_text())
    assert [(rank["rank"], rank["pipeline_rank"], rank["gpu_uuid"]) for rank in account["ranks"]] == [
        (0, 0, "GPU-a"),
        (1, 0, "GPU-b"),
    ]
    for rank in account["ranks"]:
        record = measured[rank["rank"]]
        assert (rank["peak_bytes"], rank["peak_source"]) == (record["peak_bytes"], "nvml device - baseline")
        assert rank["sources"]["gpu_uuid"] == "local rank, in PCI order"
        assert rank["sources"]["device_peak_bytes"] == "nvml device"
        assert rank["sources"]["resident_peak_bytes"] in ("ru_maxrss", "monitor, resident")
        assert rank["device_peak_bytes"] - rank["baseline_bytes"] == rank["peak_bytes"]
        assert record["observed"]["device_peak_bytes"] == rank["device_peak_bytes"]
        assert record["observed"]["sources"] == rank["sources"]
    (node,) = account["nodes"]
    assert (node["ended"], node["gpus"], node["remarks"]) == (True, 2, [])
    assert 0 < node["host_peak_bytes"] < node["host_total_bytes"]
    assert account["damaged"] == {}
    assert f"peaks/{node['node']}.jsonl" in account["files"]


def test_a_slow_driver_did_not_slow_the_job(run: subprocess.CompletedProcess[str], place: Path) -> None:
    status = json.loads((place / "run" / "status.json").read_text())
    assert [rank["exit_code"] for rank in status["ranks"]] == [0, 0]


def test_json_stands_alone_on_stdout_also_while_following(run: subprocess.CompletedProcess[str], place: Path) -> None:
    submission = json.loads(run.stdout)
    assert submission["run_dir"] == str(place / "run")
    assert submission["launcher"] == "local"
    assert "The run succeeded" in run.stderr
