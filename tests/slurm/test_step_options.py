"""However a recipe asks SLURM for GPUs, cores and memory, each step on some of the job's nodes gets all of theirs."""

from __future__ import annotations

import os

import pytest
from one_machine import IN_QUEUE, wait_until
from person import Person
from training import HERE, QUICKSTART, Training, backend, submit

pytestmark = pytest.mark.slurm

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


def test_each_step_has_the_gpus_and_cores_of_its_nodes(person: Person) -> None:
    (person.home / "trainer.py").write_text(NOTES_ITS_SHARE)
    python = person.home / "own-python"
    python.write_text(PYTHON.format(python=person.python))
    python.chmod(0o755)
    words = [f"cluster={GPUS}", "spare_nodes=1", "monitor.probe=false", f"python={python}"]
    words.append(backend(person.home / "trainer.py"))
    jobs = {name: submit(person, person.home / name, *words, f"slurm={asked}") for name, (asked, _) in ASKS.items()}
    wait_until(lambda: not person.ask("squeue", "-h", "-t", IN_QUEUE, "-o", "%i").split(), "all jobs have ended")
    for name, training in jobs.items():
        cpus = ASKS[name][1]
        share = training.read("share.json")
        assert share, f"{name}: {training.log()}"
        assert len(share["CUDA_VISIBLE_DEVICES"].split(",")) == 2, (name, share)
        assert (share["SLURM_CPUS_ON_NODE"], share["SLURM_NTASKS"]) == (cpus, "1"), (name, share)
        assert ("CPU core(s) a node for 2 trainers" in training.log()) == (cpus == "1"), (name, training.log())


def test_what_another_jobs_step_exports_does_not_reach_the_steps(
    person: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch typed in the shell of an interactive job carries that job's variables along."""
    run = person.home / "run"
    trainer = backend(HERE / "slow_saver.py", "--steps", 2, "--save", person.home / "saved")
    words = ("nodes=2", "cluster=cpu-x1", f"python={person.python}", trainer)
    training = Training(person, run, person.llmlaunch("render", QUICKSTART, *words, "-o", run, code=0))
    stale = {
        "SLURM_GPUS": "64", "SLURM_NTASKS_PER_GPU": "1", "SLURM_MEM_PER_CPU": "900", "SLURM_EXACT": "1",
        "SLURM_CPU_BIND": "quiet,mask_cpu:0xF0000000", "SLURM_DISTRIBUTION": "arbitrary", "SLURM_LABELIO": "1",
        "SRUN_OUTPUT": "none",
    }  # fmt: skip
    with monkeypatch.context() as patch:
        for name, value in stale.items():
            patch.setitem(os.environ, name, value)
        ended = person.cluster.run(run, "job.sbatch")
    assert ended == "0:0", training.log()
    assert ": step 2/2 | loss" in training.log()
