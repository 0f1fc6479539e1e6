"""`llmlaunch rehearse` with the real frameworks: dense gallery recipes by `--on trace`, and ranks of large jobs on "one
GPU", from plan to peak.

On the GPU real Megatron core (0.19.2), as rank 256 of 512, and real DeepSpeed, as rank 0 of 64 under ZeRO 3, run on the
CPU over torch's fake process group, under the real job.sbatch, node.pyz and monitor. Only the driver
stands in (tests/fake_nvml), and for Megatron what torch would count of a device.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cpu_training import ADDED_WORDS, MEGATRON_CPU
from judges import megatron_python

from llmlaunch.app.planned_run import PlannedRun, plan
from llmlaunch.assets import asset
from llmlaunch.launchers.choose import LauncherChoice
from llmlaunch.launchers.local import LocalLauncher
from llmlaunch.launchers.local_gpus import LocalGpu
from llmlaunch.rehearsal.on_gpu import STEPS, run_alone
from llmlaunch.rehearsal.ranks import RehearsedRank, chosen_ranks, job_alone
from llmlaunch.units import GIB
from support.node_rig import build
from support.soak import share

pytestmark = pytest.mark.frameworks

PEAK_TOLERANCE = 0.03
MOST_RESIDENT_BYTES = 4 * 2**30  # of the whole machine that a person may have
LASTING = ("parameters", "gradients", "optimizer_states")


def rehearse_traced(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llmlaunch", "rehearse", *words, "--on", "trace"]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


ADAPTED = ("backend=megatron-bridge", "training.start_from=/weights", "training.adapters={rank: 16}")


DENSE = {
    "llama3-8b": (),
    "llama3-70b": ("model={base: llama3-70b, num_layers: 16}", "nodes=16"),
    "llama3-8b with adapters": (
        *ADAPTED, "model={base: llama3-8b, num_layers: 8}", "nodes=1", "training.global_batch_size=64"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", share(DENSE, ["llama3-8b with adapters"]))
def test_the_worst_rank_of_a_dense_gallery_recipe_is_as_predicted(name: str) -> None:
    """The peak of a large job's worst rank on this machine, beside the estimate. What its allocator keeps beyond
    that, replayed, may make a plan tight that fills its limit to the last GiB."""
    recipe, words = name.split()[0], DENSE[name]
    done = rehearse_traced(str(asset("recipes", f"{recipe}.yaml")), *words, "--json")
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["verdict"]) in ((0, "safe"), (3, "tight")), done.stderr
    assert answer["worst_pipeline_rank"] in [rank["pipeline_rank"] for rank in answer["ranks"]]
    for rank in answer["ranks"]:
        assert (rank["on"], rank["peak_kind"]) == ("trace", "allocated")
        assert rank["predicted_bytes"] == pytest.approx(rank["rehearsed_bytes"], rel=PEAK_TOLERANCE)
        assert rank["versions"]["megatron-core"].startswith("0.19.")
        assert ("megatron-bridge" in rank["versions"]) == (words[: len(ADAPTED)] == ADAPTED)
        assert 0 < rank["tracer_resident_bytes"] < MOST_RESIDENT_BYTES
        assert {"parameters", "gradients"} <= set(rank["terms"])
        for name in set(LASTING) & set(rank["terms"]):  # states may be on the host
            term = rank["terms"][name]
            assert term["rehearsed_bytes"] == pytest.approx(term["predicted_bytes"], abs=2**20)
        assert sum(term["rehearsed_bytes"] for term in rank["terms"].values()) == rank["rehearsed_bytes"]
    assert answer["recorded"] is not None


def test_a_deepspeed_rank_is_traced_recorded_and_followed() -> None:
    """The same command and verdict; the tracer is the Python that runs the tests."""
    shape = "num_layers: 2, hidden_size: 1024, ffn_hidden_size: 2816, num_attention_heads: 8, vocab_size: 32000"
    words = (str(asset("recipes", "llama2-7b-deepspeed.yaml")), f"model={{{shape}}}", "training.sequence_length=16384")
    done = rehearse_traced(*words, "layout={tensor: 1, context: 1, zero_stage: 2, micro_batch_size: 1}", "--json")
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["verdict"]) == (0, "safe"), done.stderr
    (rank,) = answer["ranks"]
    assert rank["predicted_bytes"] == pytest.approx(rank["rehearsed_bytes"], rel=PEAK_TOLERANCE)
    assert rank["versions"]["deepspeed"].startswith("0.19.")
    assert sum(term["rehearsed_bytes"] for term in rank["terms"].values()) == rank["rehearsed_bytes"]
    assert answer["recorded"] is not None


SMALL = (
    "model={{num_layers: {layers}, hidden_size: 64, ffn_hidden_size: 160, num_attention_heads: 4, num_query_groups: 2, "
    "vocab_size: {vocabulary}}}"
)
USUAL = ("training.sequence_length=64", "data={path: /nowhere/tokens}", "monitor.interval_seconds=0.2")
RANK = 2  # of Megatron's four stages: one in the middle, which reads no data
OF_MEGATRON = (
    *(*USUAL, SMALL.format(layers=8, vocabulary=250), "nodes=64", "training.global_batch_size=512"),
    "layout={tensor: 2, pipeline: 4, virtual_pipeline: 1, context: 1, micro_batch_size: 1, recompute: none}",
    *("training.precision=fp32", "layout.sequence_parallel=true", "layout.tp_comm_overlap=true"),
    "layout.cuda_graphs=[]",  # a CPU captures none
)
OF_DEEPSPEED = (
    *(*USUAL, SMALL.format(layers=2, vocabulary=256), "nodes=8", "training.global_batch_size=128"),
    "layout={tensor: 1, context: 1, micro_batch_size: 1, zero_stage: 3, recompute: full}",
)
ALLOCATED, RESERVED, PROCESS = 5 * GIB, 6 * GIB, 7 * GIB

CHECKOUT = """
import os, sys
sys.path.insert(0, {megatron_cpu!r})
import torch
import train
torch.cuda.max_memory_allocated = lambda *device: {allocated}
torch.cuda.max_memory_reserved = lambda *device: {reserved}
with open({scenario!r} + ".new", "w") as scenario:
    scenario.write("gpu uuid=GPU-0 total=80G\\nproc 0 pid=%d mem={process_mib}M\\n" % os.getpid())
os.replace({scenario!r} + ".new", {scenario!r})
train.train([*sys.argv[1:], *{added!r}])
"""
# The trainer's interpreter, which tells the driver of itself.
INTERPRETER = """#!/bin/bash
if [[ "$*" = *--alone* && "$*" != *node.pyz* ]]; then
  printf 'gpu uuid=GPU-0 total=80G\\nproc 0 pid=%d mem={process_mib}M\\n' $$ >'{scenario}.new'
  mv '{scenario}.new' '{scenario}'
fi
exec '{python}' "$@"
"""


@pytest.fixture
def scenario(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the driver of a machine with a GPU says."""
    scenario = tmp_path / "scenario"
    scenario.write_text("gpu uuid=GPU-0 total=80G\n")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(build(tmp_path_factory.mktemp("nvml") / "driver")))
    monkeypatch.setenv("FAKE_NVML_SCENARIO", str(scenario))
    monkeypatch.setenv("FAKE_NVML_CALLS", str(tmp_path / "calls"))
    return scenario


def rehearse(result: PlannedRun, rank: str, gpu: LocalGpu, place: Path, patch: pytest.MonkeyPatch) -> RehearsedRank:
    # This process has long looked for its libraries: what it would see of the driver that its children see.
    patch.setattr("llmlaunch.launchers.local_gpus.local_gpus", lambda: [gpu])
    asked = chosen_ranks(result.plan, result.recipe.model, rank)
    choice = LauncherChoice(LocalLauncher(), "here")
    alone = job_alone(result.setting, result.recipe, result.plan, result.rendered, traced=False)
    ranks = run_alone(
        result.recipe, result.plan, result.json, result.rendered, alone, asked, choice, place / "runs", print
    )
    return next(iter(ranks))


def log_of(run: Path) -> str:
    return "".join(path.read_text() for path in (run / "logs").glob("*.log"))


def described(run: Path) -> dict[str, Any]:
    description: dict[str, Any] = json.loads((run / "run.json").read_text())
    return description


def megatron_rank_of_512(scenario: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_STANDS_FOR", "9.0")
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    script = CHECKOUT.format(
        megatron_cpu=str(MEGATRON_CPU),
        allocated=ALLOCATED,
        reserved=RESERVED,
        process_mib=PROCESS // 2**20,
        scenario=str(scenario),
        added=list(ADDED_WORDS),
    )
    (checkout / "pretrain_gpt.py").write_text(script)
    own = (f"backend.path={checkout}", f"python={megatron_python()}")
    result = plan(str(asset("recipes", "llama3-8b.yaml")), (*OF_MEGATRON, *own))
    gpu = LocalGpu("NVIDIA H100 80GB HBM3", "GPU-0", 80 * GIB, "9.0")
    rank = rehearse(result, str(RANK), gpu, tmp_path, monkeypatch)
    assert (rank.pipeline_rank, rank.on, rank.ran_out) == (RANK, "gpu", False)
    assert (rank.allocated_bytes, rank.reserved_bytes, rank.process_bytes) == (ALLOCATED, RESERVED, PROCESS)
    assert RANK in rank.stands_for
    assert rank.versions["megatron-core"] == "0.19.2"
    assert rank.seconds > 0
    assert any("dataset is not read" in remark for remark in rank.remarks)
    assert [omission.technique for omission in rank.omissions] == ["tp_comm_overlap"]
    run = tmp_path / "runs" / f"rank{RANK}"
    log = log_of(run)
    assert f"iteration        {STEPS}/       {STEPS}" in log
    assert "number of skipped iterations:   1" not in log
    run_json = described(run)
    assert run_json["rehearsal"]["pipeline_rank"] == RANK
    assert (run_json["nodes"], run_json["devices_per_node"], run_json["measurement"]["world_size"]) == (1, 1, 512)
    account = json.loads(next(run.glob("attempts/*/summary.json")).read_text())
    assert [(each["rank"], each["pipeline_rank"]) for each in account["ranks"]] == [(RANK * 128, RANK)]


def deepspeed_rank_of_64(scenario: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    interpreter = tmp_path / "python"
    interpreter.write_text(INTERPRETER.format(process_mib=PROCESS // 2**20, scenario=scenario, python=sys.executable))
    interpreter.chmod(0o755)
    result = plan(str(asset("recipes", "llama2-7b-deepspeed.yaml")), (*OF_DEEPSPEED, f"python={interpreter}"))
    gpu = LocalGpu("NVIDIA A100-SXM4-80GB", "GPU-0", 80 * GIB, "8.0")
    rank = rehearse(result, "worst", gpu, tmp_path, monkeypatch)
    assert (rank.pipeline_rank, rank.on, rank.ran_out) == (0, "gpu", False)
    assert rank.process_bytes == PROCESS
    assert {"deepspeed", "torch"} <= set(rank.versions)
    assert any("dataset is not read" in remark for remark in rank.remarks)
    run = tmp_path / "runs" / "rank0"
    assert f"alone as rank 0 of 64: {STEPS} steps, {2 * STEPS} micro-batches, none skipped" in log_of(run)
    run_json = described(run)
    assert (run_json["nodes"], run_json["devices_per_node"], run_json["measurement"]["world_size"]) == (1, 1, 64)
    assert json.loads((run / "ds_config.json").read_text())["train_batch_size"] == 128


ALONE = {"megatron_rank_of_512": megatron_rank_of_512, "deepspeed_rank_of_64": deepspeed_rank_of_64}


@pytest.mark.parametrize("rank", share(ALONE, ("megatron_rank_of_512",)))
def test_a_rank_runs_alone_and_its_peak_is_read(
    rank: str, scenario: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ALONE[rank](scenario, tmp_path, monkeypatch)
