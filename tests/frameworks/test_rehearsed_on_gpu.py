"""A rank rehearsed on "one GPU", from plan to peak: real Megatron core (0.19.2) on the CPU over torch's fake process
group, as rank 256 of 512, under the real job.sbatch, train.sh, rank wrapper and monitor. Only the driver stands in
(tests/fake_nvml), and what torch would count of a device.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cpu_training import ADDED, MEGATRON_CPU, PYTHON

from llmlaunch.app.planned_run import PlannedRun, plan
from llmlaunch.assets import asset
from llmlaunch.launchers.choose import LauncherChoice
from llmlaunch.launchers.local import LocalLauncher
from llmlaunch.launchers.local_gpus import LocalGpu
from llmlaunch.rehearsal.on_gpu import STEPS, run_alone
from llmlaunch.rehearsal.ranks import RehearsedRank, chosen_ranks
from llmlaunch.units import GIB
from support.node_rig import build

pytestmark = pytest.mark.frameworks

RANK = 2  # of four stages: one in the middle, which reads no data
ALLOCATED, RESERVED, PROCESS = 5 * GIB, 6 * GIB, 7 * GIB
OVERRIDES = (
    "model={num_layers: 8, hidden_size: 64, ffn_hidden_size: 160, num_attention_heads: 4, num_query_groups: 2, "
    "vocab_size: 250}",
    "nodes=64",
    "layout={tensor: 2, pipeline: 4, virtual_pipeline: 1, context: 1, micro_batch_size: 1, recompute: none}",
    "training.sequence_length=64",
    "training.global_batch_size=512",
    "training.precision=fp32",
    "data={path: /nowhere/tokens}",
    "monitor.interval_seconds=0.2",
)

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


class Machine:
    """One with a GPU, as its driver says."""

    def __init__(self, place: Path) -> None:
        self.checkout, self.scenario, self.said = place / "checkout", place / "scenario", list[str]()
        self.runs = place / "runs"
        self.checkout.mkdir()
        self.scenario.write_text("gpu uuid=GPU-0 total=80G\n")

    def trains(self) -> None:
        script = CHECKOUT.format(
            megatron_cpu=str(MEGATRON_CPU),
            allocated=ALLOCATED,
            reserved=RESERVED,
            process_mib=PROCESS // 2**20,
            scenario=str(self.scenario),
            added=[word for change in ADDED for word in (change.flag, *change.values)],
        )
        (self.checkout / "pretrain_gpt.py").write_text(script)

    def plan(self) -> PlannedRun:
        own = (f"backend.path={self.checkout}", f"python={PYTHON}")
        return plan(str(asset("recipes", "llama3-8b.yaml")), (*OVERRIDES, *own))

    def rehearse(self) -> RehearsedRank:
        result = self.plan()
        asked = chosen_ranks(result.plan, result.recipe.model, str(RANK))
        choice = LauncherChoice(LocalLauncher(), "here")
        rendered = result.rendered
        found = run_alone(result.recipe, result.plan, result.json, rendered, asked, choice, self.runs, self.said.append)
        return next(iter(found))

    @property
    def run(self) -> Path:
        return self.runs / f"rank{RANK}"

    def log(self) -> str:
        return "".join(path.read_text() for path in (self.run / "logs").glob("*.log"))


@pytest.fixture
def machine(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Machine:
    library = build(tmp_path_factory.mktemp("nvml") / "driver")
    made = Machine(tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    monkeypatch.setenv("FAKE_NVML_SCENARIO", str(made.scenario))
    monkeypatch.setenv("FAKE_NVML_CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("LLMLAUNCH_SPOOL", str(tmp_path / "spool"))
    monkeypatch.setenv("CPU_STANDS_FOR", "9.0")
    # This process has long looked for its libraries: what it would see of the driver that its children see.
    here = LocalGpu("NVIDIA H100 80GB HBM3", "GPU-0", 80 * GIB, "9.0")
    monkeypatch.setattr("llmlaunch.launchers.local_gpus.local_gpus", lambda: [here])
    return made


def test_a_rank_of_512_runs_alone_and_its_peak_is_read(machine: Machine) -> None:
    machine.trains()
    found = machine.rehearse()
    assert (found.pipeline_rank, found.on, found.ran_out) == (RANK, "gpu", False)
    assert (found.allocated_bytes, found.reserved_bytes, found.process_bytes) == (ALLOCATED, RESERVED, PROCESS)
    assert RANK in found.stands_for
    assert found.versions["megatron-core"] == "0.19.2"
    assert found.seconds > 0
    assert any("dataset is not read" in remark for remark in found.remarks)
    said = machine.log()
    assert f"iteration        {STEPS}/       {STEPS}" in said
    assert "number of skipped iterations:   1" not in said
    described = json.loads((machine.run / "run.json").read_text())
    assert described["rehearsal"]["pipeline_rank"] == RANK
    assert (described["nodes"], described["devices_per_node"], described["measurement"]["world_size"]) == (1, 1, 512)
    account = json.loads(next(machine.run.glob("attempts/*/summary.json")).read_text())
    assert [(one["rank"], one["pipeline_rank"]) for one in account["ranks"]] == [(RANK * 128, RANK)]
