"""A DeepSpeed rank rehearsed on "one GPU", from plan to peak: real DeepSpeed on the CPU, as rank 0 of 64 under ZeRO 3
over torch's fake process group, under the real job.sbatch, train.sh, rank wrapper and monitor. Only the driver stands
in (tests/fake_nvml); torch has no device to count.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from llmlaunch.app.planned_run import PlannedRun, plan
from llmlaunch.launchers.choose import LauncherChoice
from llmlaunch.launchers.local import LocalLauncher
from llmlaunch.launchers.local_gpus import LocalGpu
from llmlaunch.rehearsal.on_gpu import STEPS, run_alone
from llmlaunch.rehearsal.ranks import RehearsedRank, chosen_ranks
from llmlaunch.units import GIB
from support.node_rig import build

pytestmark = pytest.mark.frameworks

PROCESS = 7 * GIB
OVERRIDES = (
    "model={num_layers: 2, hidden_size: 64, ffn_hidden_size: 160, num_attention_heads: 4, num_query_groups: 2, "
    "vocab_size: 256}",
    "nodes=8",
    "layout={tensor: 1, context: 1, micro_batch_size: 1, zero_stage: 3, recompute: full}",
    "training.sequence_length=64",
    "training.global_batch_size=128",
    "data={path: /nowhere/tokens}",
    "monitor.interval_seconds=0.2",
)
# The trainer's interpreter, which tells the driver of itself.
INTERPRETER = """#!/bin/bash
if [[ "$*" = *--alone* && "$*" != *node.pyz* ]]; then
  printf 'gpu uuid=GPU-0 total=80G\\nproc 0 pid=%d mem={process_mib}M\\n' $$ >'{scenario}.new'
  mv '{scenario}.new' '{scenario}'
fi
exec '{python}' "$@"
"""


def the_plan(interpreter: Path) -> PlannedRun:
    return plan("recipes/llama2-7b-deepspeed.yaml", (*OVERRIDES, f"python={interpreter}"))


def rehearse(result: PlannedRun, runs: Path) -> RehearsedRank:
    asked = chosen_ranks(result.plan, result.recipe.model, "worst")
    choice = LauncherChoice(LocalLauncher(), "here")
    found = run_alone(result.recipe, result.plan, result.json, result.rendered, asked, choice, runs, print)
    return next(iter(found))


@pytest.fixture
def interpreter(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    scenario = tmp_path / "scenario"
    scenario.write_text("gpu uuid=GPU-0 total=80G\n")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(build(tmp_path_factory.mktemp("nvml") / "driver")))
    monkeypatch.setenv("FAKE_NVML_SCENARIO", str(scenario))
    monkeypatch.setenv("FAKE_NVML_CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("LLMLAUNCH_SPOOL", str(tmp_path / "spool"))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    # This process has long looked for its libraries: what it would see of the driver that its children see.
    here = LocalGpu("NVIDIA A100-SXM4-80GB", "GPU-0", 80 * GIB, "8.0")
    monkeypatch.setattr("llmlaunch.launchers.local_gpus.local_gpus", lambda: [here])
    made = tmp_path / "python"
    made.write_text(INTERPRETER.format(process_mib=PROCESS // 2**20, scenario=scenario, python=sys.executable))
    made.chmod(0o755)
    return made


def test_a_rank_of_64_runs_alone_and_its_peak_is_read(interpreter: Path, tmp_path: Path) -> None:
    found = rehearse(the_plan(interpreter), tmp_path / "runs")
    run = tmp_path / "runs" / "rank0"
    assert (found.pipeline_rank, found.on, found.ran_out) == (0, "gpu", False)
    assert found.process_bytes == PROCESS
    assert {"deepspeed", "torch"} <= set(found.versions)
    assert any("dataset is not read" in remark for remark in found.remarks)
    said = "".join(path.read_text() for path in (run / "logs").glob("*.log"))
    assert f"alone as rank 0 of 64: {STEPS} steps, {2 * STEPS} micro-batches, none skipped" in said
    described = json.loads((run / "run.json").read_text())
    assert (described["nodes"], described["devices_per_node"], described["measurement"]["world_size"]) == (1, 1, 64)
    assert json.loads((run / "ds_config.json").read_text())["train_batch_size"] == 128
