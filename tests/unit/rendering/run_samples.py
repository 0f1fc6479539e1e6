"""Recipes, plans and what a backend renders, built by hand: the renderer is tested without loader and planner."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmlaunch.calibration.margins import Margin
from llmlaunch.cluster.profile import Accelerator, Cluster, Link, Site
from llmlaunch.frameworks.argument import NodeVariable
from llmlaunch.frameworks.base import RankAlone, Rendered
from llmlaunch.layout import Layout
from llmlaunch.memory.estimator import Estimate, RankEstimate
from llmlaunch.models.shape import ModelShape
from llmlaunch.planner.plan import Candidate, JobLength, Plan
from llmlaunch.recipe.containers import Container
from llmlaunch.recipe.datasets import Data
from llmlaunch.recipe.sections import Notices, Tracking, WandbRun
from llmlaunch.recipe.training import Training
from llmlaunch.recipe.types import BackendChoice, Code, MemoryPolicy, Recipe, Restart
from llmlaunch.rehearsal.on_gpu import LoneRank, lone_rank
from llmlaunch.rehearsal.ranks import JobAlone
from llmlaunch.rehearsal.records import shape_of
from llmlaunch.rendering.scripts import job_script

LINK = Link(bytes_per_second=1e11, latency_seconds=5e-6)
H100 = Accelerator("H100-80GB", "gpu", 85_044_297_728, "data sheet", {"bf16": 989e12}, 3.35e12, "9.0")
CPU = Accelerator("cpu", "cpu", 4 * 2**30, "profile", {"fp32": 1e11}, 1e10)
SHAPE = ModelShape("llama3-70b", 80, 8192, 28672, 64, 8, 128, 128256, 8192)
TINY = ModelShape("tiny", 4, 128, 384, 4, 4, 32, 256, 256)

NASTY = (
    "a b",
    "$(touch PWNED)",
    "`touch PWNED`",
    "x; touch PWNED",
    "x\ntouch PWNED",
    "it's",
    '"',
    "\\",
    "-rf",
    "",
    "*",
    "~",
    "${HOME}",
    "é✓",
    "a=b",
    "!x",
    "#c",
    "{{ 7*7 }}",
    "{% raw %}",
)


def cluster(accelerator: Accelerator, devices: int, **changes: Any) -> Cluster:
    plain = Cluster(
        name="h100-80gb-x8" if accelerator.kind == "gpu" else "laptop",
        accelerator=accelerator,
        devices_per_node=devices,
        host_memory_bytes=2**40,
        nvlink_domain_devices=devices,
        node_link=LINK,
        domain_link=LINK,
        fabric_link=LINK,
    )
    return replace(plain, **changes)


def recipe(**changes: Any) -> Recipe:
    plain = Recipe(
        name="tiny",
        model=TINY,
        backend=BackendChoice("deepspeed"),
        cluster=cluster(CPU, 2),
        nodes=1,
        training=Training(256, 8, 30, precision="fp32", learning_rate=1e-3, seed=1, log_interval=1),
        data=Data(python_source=True),
        pins={},
        memory=MemoryPolicy(),
        slurm={},
        environment={},
        secrets=(),
        setup=(),
        container=None,
        code=Code(),
        path="recipes/tiny.yaml",
        text="schema: 1\nname: tiny\n",
        digest="0" * 64,
    )
    return replace(plain, **changes)


def plan(of: Recipe, layout: Layout) -> Plan:
    memory = of.cluster.accelerator.memory_bytes
    ranks = tuple(
        RankEstimate(rank, {"parameters": memory // 2}, memory // 2, memory // 2, memory // 2)
        for rank in range(layout.pipeline)
    )
    kind = "device" if of.cluster.accelerator.kind == "gpu" else "resident"
    return Plan(
        recipe=of.name,
        verdict="safe",
        chosen=Candidate(layout, memory // 2, 0, 10.0, 1000.0),
        estimate=Estimate(ranks, 2**30, kind),
        limit=Margin(memory * 8 // 10, memory, "data sheet", "80 % of device memory"),
        mfu=None,
        step_terms={"compute": 10.0},
        length=JobLength.of(of, 10.0),
        searched=1,
        refused={},
        refusal_sentences={},
        alternatives=(),
        not_modelled=(),
        assumptions=(),
    )


def script_of(of: Recipe) -> str:
    """job.sbatch, whatever the plan."""
    return job_script(of, plan(of, Layout()))


def megatron_70b() -> tuple[Recipe, Plan, Rendered]:
    """The 70B job on 64 nodes of eight H100."""
    of = recipe(
        name="llama3-70b",
        model=SHAPE,
        backend=BackendChoice("megatron-lm", version="core_v0.19.0"),
        cluster=cluster(H100, 8, cpus_per_node=96),
        nodes=64,
        training=Training(8192, 1024, 1000),
        data=Data(mock=True),
        slurm={"partition": "gpu", "time": "24:00:00", "exclusive": True, "comment": "70B, run #1"},
        environment={"NCCL_SOCKET_IFNAME": "ib0", "NCCL_DEBUG": "WARN"},
        secrets=("HF_TOKEN",),
        setup=("module load cuda/12.4", "source /sw/env/bin/activate"),
        path="recipes/llama3-70b.yaml",
        text="schema: 1\nname: llama3-70b\n",
        digest="7" * 64,
    )
    rendered = Rendered(
        program=(
            NodeVariable("MEGATRON_LM_PATH", "/pretrain_gpt.py"),
            "--tensor-model-parallel-size",
            "8",
            "--pipeline-model-parallel-size",
            "4",
            "--num-layers",
            "80",
            "--bf16",
            "--mock-data",
        ),
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        files={},
        required_variables=("MEGATRON_LM_PATH",),
    )
    layout = Layout(tensor=8, pipeline=4, data=16, sequence_parallel=1, zero_stage=1)
    return of, plan(of, layout), rendered


def rank_by_itself() -> LoneRank:
    """The last stage of the 70B job on one device, of a site that shares nodes out by the memory asked for. The job
    saves, comes back, tries its nodes and takes whole ones."""
    of, planned, rendered = tried_first()
    of = replace(
        of,
        slurm={**of.slurm, "mem": 0, "gres": "gpu:h100:8,lscratch:100", "qos": "long", "nodelist": "node[1-64]"},
        restart=Restart(),
        training=replace(of.training, save_interval=100, checkpoint_path="/checkpoints/70b"),
    )
    alone = RankAlone(
        program=(NodeVariable("LLMLAUNCH_RUN_DIR", "/trainer/rank_alone.py"), *rendered.program, "--train-iters", "3"),
        environment={"WORLD_SIZE": "512", "RANK": "384", "LOCAL_RANK": "0"},
        notes=("made-up data",),
        files={"trainer/rank_alone.py": b"print('alone')\n"},
    )
    about = {"pipeline_rank": 3, "stands_for": [3], "on": "gpu", **shape_of(of, planned)}
    return lone_rank(JobAlone(of, planned, rendered, ()), alone, about, steps=3)


def deepspeed_cpu() -> tuple[Recipe, Plan, Rendered]:
    """Two processes on this machine's CPU."""
    of = recipe()
    rendered = Rendered(
        program=("trainer/train.py", "--deepspeed-config", "ds_config.json", "--steps", "30"),
        environment={"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        files={"ds_config.json": b'{"train_batch_size": 8}\n', "trainer/train.py": b"print('trained')\n"},
    )
    return of, plan(of, Layout(data=2, micro_batch_size=4, zero_stage=1)), rendered


def container_job() -> tuple[Recipe, Plan, Rendered]:
    """Two nodes, DeepSpeed in a pyxis container, GPUs asked for as gres, an interpreter of the image's own."""
    of = recipe(
        name="boxed",
        model=SHAPE,
        cluster=cluster(H100, 4, gpu_request="gres"),
        nodes=2,
        slurm={"account": "proj-1", "time": "02:00:00", "gres": "nvme:1", "cpus-per-task": 32},
        container=Container("nvcr.io#nvidia/pytorch:25.08-py3", ("/data:/data:ro", "/my scratch:/scratch")),
        python="/usr/bin/python3",
        path="recipes/boxed.yaml",
    )
    _, _, rendered = deepspeed_cpu()
    return of, plan(of, Layout(data=8, zero_stage=3)), rendered


def apptainer_job() -> tuple[Recipe, Plan, Rendered]:
    """The same in Apptainer, at a site that says how: modules, setup, srun options, a mount; with a script of the
    person's own, and data and checkpoints in a place that is mounted already, but to be read only."""
    boxed, _, rendered = container_job()
    site = Site(
        srun={"cpu-bind": "none", "overlap": True, "mem": False},
        mpi="pmix",
        modules=("apptainer/1.3", "cuda/12.4"),
        setup=("source /sw/site.sh",),
    )
    of = replace(
        boxed,
        cluster=cluster(H100, 4, gpu_request="gres", site=site),
        container=Container("/images/pytorch 25.sif", ("/lustre:/lustre:ro",), "apptainer"),
        training=replace(boxed.training, save_interval=10, checkpoint_path="/lustre/it's/boxed"),
        data=Data(path="/lustre/data/corpus"),
        backend=BackendChoice("deepspeed", script="/home/me/train/pretrain.py"),
        setup=("export LC_ALL=C",),
    )
    return of, plan(of, Layout(data=8, zero_stage=3)), rendered


def nasty_job(script: Path) -> tuple[Recipe, Plan, Rendered]:
    """Every value a person or a backend can put into a run is hostile to shells; `script` is a harmless trainer."""
    environment = {f"NASTY_{index}": text for index, text in enumerate(NASTY)}
    of = recipe(name="nasty $(touch PWNED) 'name'", environment=environment)
    rendered = Rendered(program=(str(script), *NASTY), environment={}, files={})
    return of, plan(of, Layout(data=2)), rendered


def tried_first() -> tuple[Recipe, Plan, Rendered]:
    """The 70B job on 64 of 66 nodes, after they were tried, the arguments checked and the indexes built."""
    of, planned, rendered = megatron_70b()
    of = replace(of, preflight=True, spare_nodes=2, data=Data(path="/data/text_document"))
    check, build = (
        (NodeVariable("LLMLAUNCH_RUN_DIR", f"/trainer/megatron_{what}.py"), "--world-size", "512", *rendered.program)
        for what in ("check", "dataset")
    )
    return of, planned, replace(rendered, check=check, prepare=build)


def coming_back() -> tuple[Recipe, Plan, Rendered]:
    """A CPU job on two nodes and a spare one that saves, tells a webhook, and comes back by requeue."""
    of, _, rendered = deepspeed_cpu()
    training = replace(of.training, save_interval=10, checkpoint_path="/checkpoints/tiny")
    of = replace(of, nodes=2, spare_nodes=1, training=training, restart=Restart(save_seconds=300.0))
    of = replace(of, slurm={"time": "1-00:00:00"}, notify=Notices("TRAINING_CHANNEL"))
    return of, plan(of, Layout(data=4)), rendered


def tracked_job() -> tuple[Recipe, Plan, Rendered]:
    """The same on W&B and TensorBoard, under a name that is hostile to shells."""
    of, planned, rendered = deepspeed_cpu()
    run = WandbRun("our project", entity="team", name="$(touch PWNED) 'name'", mode="offline", save_dir="/runs/a b")
    return replace(of, tracking=Tracking(run, "/tb")), planned, rendered


def outside_slurm(*prefixes: str, **more: str) -> dict[str, str]:
    """Return this process's variables without those of a job and those that begin with `prefixes`, and `more`."""
    left_out = ("SLURM", "LLMLAUNCH", *prefixes)
    return {**{name: value for name, value in os.environ.items() if not name.startswith(left_out)}, **more}


def write_program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path
