"""However a recipe asks SLURM for GPUs, cores and memory, each step on some of the job's nodes gets all of theirs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from one_machine import Cluster, wait_until
from person import Person

pytestmark = pytest.mark.slurm

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart.yaml"
# Two make-believe GPUs in each node of a job of two nodes, of which one is spare: the training step has one node.
GPUS = "{base: h100-80gb-x8, devices_per_node: 2, gpu_request: none, slurm: {mem: 8G, exclusive: false}}"
NOTES_ITS_SHARE = """\
import json, os
from pathlib import Path
if os.environ["LOCAL_RANK"] == "0":
    names = ("CUDA_VISIBLE_DEVICES", "SLURM_CPUS_ON_NODE", "SLURM_NTASKS", "SLURM_STEP_NODELIST")
    Path("share.json").write_text(json.dumps({name: os.environ.get(name) for name in names}))
"""
# The preflight fails alike on all nodes, as these have no GPU in truth; nobody is blamed, and the training begins.
PYTHON = '#!/bin/bash\n[[ $* != *trainer/preflight.py* ]] || exit 1\nexec {python} "$@"\n'

ASKS = {
    "total": ("{gpus: 4}", "1"),
    "total-of-a-type": ("{gpus: 'h100:4', cpus-per-task: 4}", "4"),
    "total-with-cores": ("{gpus: 4, cpus-per-gpu: 1}", "2"),
    "each-node": ("{gpus-per-node: 2, mem-per-gpu: 4G}", "1"),
    "each-task": ("{gpus-per-task: 2, mem-per-cpu: 8G}", "1"),
    "gres": ("{gres: 'gpu:2', cpus-per-gpu: 2}", "4"),
    "whole-nodes": ("{gres: 'gpu:h100:2', exclusive: true}", "4"),
}


def test_each_step_has_the_gpus_and_cores_of_its_nodes(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(NOTES_ITS_SHARE)
    (tmp_path / "python").write_text(PYTHON.format(python=sys.executable))
    (tmp_path / "python").chmod(0o755)
    person = Person(slurm, tmp_path)
    own = f"backend={{name: deepspeed, script: {tmp_path / 'trainer.py'}}}"
    words = [f"cluster={GPUS}", "spare_nodes=1", "monitor.probe=false", f"python={tmp_path / 'python'}", own]
    for name, (asked, _) in ASKS.items():
        done = person.llmlaunch("submit", str(QUICKSTART), *words, f"slurm={asked}", "-o", name)
        assert done.returncode == 0, done.stderr
    waiting = ("squeue", "-h", "-t", "pending,running,completing", "-o", "%i")
    wait_until(lambda: not slurm.ask(*waiting).split(), "all jobs have ended")
    for name, (_, cpus) in ASKS.items():
        logs = "\n".join(path.read_text(errors="replace") for path in (tmp_path / name / "logs").glob("*.log"))
        assert (tmp_path / name / "share.json").exists(), f"{name}: {logs}"
        share = json.loads((tmp_path / name / "share.json").read_text())
        assert len(share["CUDA_VISIBLE_DEVICES"].split(",")) == 2, (name, share)
        assert (share["SLURM_CPUS_ON_NODE"], share["SLURM_NTASKS"]) == (cpus, "1"), (name, share)
        assert ("CPU core(s) a node for 2 trainers" in logs) == (cpus == "1"), (name, logs)


def test_what_another_jobs_step_exports_does_not_reach_the_steps(slurm: Cluster, tmp_path: Path) -> None:
    """sbatch typed in the shell of an interactive job carries that job's variables along."""
    person = Person(slurm, tmp_path)
    words = ("nodes=2", "cluster=cpu-x1", "training.steps=2", f"python={sys.executable}")
    assert person.llmlaunch("render", str(QUICKSTART), *words, "-o", "run").returncode == 0
    stale = {
        "SLURM_GPUS": "64", "SLURM_NTASKS_PER_GPU": "1", "SLURM_MEM_PER_CPU": "900", "SLURM_EXACT": "1",
        "SLURM_CPU_BIND": "quiet,mask_cpu:0xF0000000", "SLURM_DISTRIBUTION": "arbitrary", "SLURM_LABELIO": "1",
        "SRUN_OUTPUT": "none",
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in stale.items():
            patch.setitem(os.environ, name, value)
        ended = slurm.run(tmp_path / "run", "job.sbatch")
    logs = "\n".join(path.read_text() for path in sorted((tmp_path / "run" / "logs").glob("*.log")))
    assert ended == "0:0", logs
    assert "\nstep 2/2 | loss" in logs
