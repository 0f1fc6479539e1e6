"""However a recipe asks SLURM for GPUs, cores and memory, each step on some of the job's nodes gets all of theirs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from one_machine import IN_QUEUE, Cluster, wait_until
from person import SOURCES
from training import QUICKSTART, backend

from support.command_line import CommandLine

pytestmark = pytest.mark.slurm

# Two make-believe GPUs in each node of a job of two nodes.
NODE = "base: h100-80gb-x8, devices_per_node: 2, slurm: {mem: 8G, exclusive: false}"
# Starts a step on all nodes and one on the second, as job.sbatch does; each task says what it was given.
STEPS = f"""
import json, os, subprocess, sys
sys.path.insert(0, {str(SOURCES)!r})
from llmlaunch.node.slurm_steps import StepOptions, allocated_nodes, step_environment
with open("run.json") as file:
    options = StepOptions.of(json.load(file)["job"], os.environ)
nodes = allocated_nodes(os.environ)
shows = "IFS=,; devices=($CUDA_VISIBLE_DEVICES); echo ${{#devices[@]}} $SLURM_CPUS_ON_NODE $SLURM_NTASKS"
for name, chosen in (("all", nodes), ("one", nodes[1:])):
    words = options.srun(chosen, "errors", again=False, output=f"seen.{{name}}")
    subprocess.run([*words, "bash", "-c", shows], env=step_environment(os.environ), check=True)
"""

# What is asked of SLURM and of the cluster profile: the number of GPUs and of cores of a task.
ASKS = {
    "slurm={gpus: 4}": ("2", "1"),
    "slurm={gpus: 'h100:4', cpus-per-task: 4}": ("2", "4"),
    "slurm={gpus: 4, cpus-per-gpu: 1}": ("2", "2"),
    "slurm={gpus-per-node: 2, mem-per-gpu: 4G}": ("2", "1"),
    "slurm={gpus-per-task: 2, mem-per-cpu: 8G}": ("2", "1"),
    "slurm={gres: 'gpu:2', cpus-per-gpu: 2}": ("2", "4"),
    "slurm={gres: 'gpu:h100:2', exclusive: true}": ("2", "4"),
    "gpu_request: gpus-per-node": ("2", "1"),
    "gpu_request: gpus-per-node, gpu_type: h100": ("2", "1"),
    "gpu_request: gres": ("2", "1"),
    "gpu_request: gpus-per-task, gpu_type: h100": ("2", "1"),
    "gpu_request: none": ("0", "1"),
}


def test_each_step_gets_the_gpus_and_cores_of_its_nodes(slurm: Cluster, llmlaunch: CommandLine, tmp_path: Path) -> None:
    trainer = backend(tmp_path / "train.py")
    (tmp_path / "train.py").touch()
    for number, asked in enumerate(ASKS):
        run = tmp_path / str(number)
        of_cluster, of_recipe = ("gpu_request: none", [asked]) if asked.startswith("slurm=") else (asked, [])
        words = (f"cluster={{{NODE}, {of_cluster}}}", "nodes=2", trainer, *of_recipe)
        llmlaunch("render", QUICKSTART, *words, "-o", run)
        lines = (run / "job.sbatch").read_text().splitlines()
        directives = [line for line in lines if line.startswith(("#!", "#SBATCH"))]
        (run / "steps.py").write_text(STEPS)
        (run / "steps.sbatch").write_text("\n".join([*directives, f"exec {sys.executable} steps.py\n"]))
        slurm.ask("sbatch", "steps.sbatch", cwd=run)
    wait_until(lambda: not slurm.ask("squeue", "-h", "-t", IN_QUEUE, "-o", "%i").split(), "all jobs have ended")
    seen = {asked: [tasks(tmp_path / str(number), of) for of in ("all", "one")] for number, asked in enumerate(ASKS)}
    assert seen == {asked: [[f"{gpus} {cpus} 2"] * 2, [f"{gpus} {cpus} 1"]] for asked, (gpus, cpus) in ASKS.items()}


def tasks(run: Path, step: str) -> list[str]:
    """Return what each task of the step said."""
    return (run / f"seen.{step}").read_text().splitlines()
