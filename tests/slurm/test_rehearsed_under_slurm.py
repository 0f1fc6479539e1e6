"""A rank rehearsed under SLURM is a job of one GPU on a part of one node, for minutes, that ends and is read."""

from __future__ import annotations

import json

import pytest
from person import Person
from training import QUICKSTART

pytestmark = pytest.mark.slurm

RECIPE = QUICKSTART.with_name("llama3-70b.yaml")
LAYOUT = "layout={tensor: 8, pipeline: 4, virtual_pipeline: 1, context: 1, micro_batch_size: 1, recompute: none}"
# 512 devices, for days, on whole nodes
JOB = ("nodes=64", LAYOUT, "training.global_batch_size=1024", "slurm={exclusive: true, time: '2-00:00:00'}")

# What Megatron-LM says of its steps, and what it found itself told; it needs no torch.
TRAINER = """\
import os, sys
from pathlib import Path
rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
devices = [device for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
Path(sys.argv[0]).with_name("seen").write_text(" ".join([rank, world, *devices]))
steps = int(sys.argv[sys.argv.index("--train-iters") + 1])
memory = "allocated: 1.00 | max allocated: 51200.00 | reserved: 1.00 | max reserved: 53248.00"
for step in range(1, steps + 1):
    print(f" [2026-01-01 00:00:00.0] iteration {step:8d}/{steps:8d} | elapsed time per iteration (ms): 1.0 |")
    print(f"[Rank {rank}] (after {step} iterations) memory (MB) | {memory}", flush=True)
"""


def test_one_of_512_ranks_is_rehearsed_by_a_short_job_of_one_gpu(person: Person) -> None:
    (person.home / "pretrain_gpt.py").write_text(TRAINER)
    own = (f"backend.path={person.home}", f"python={person.python}")
    done = person.llmlaunch("rehearse", RECIPE, *JOB, *own, "--on", "gpu", "--rank", "3", "-o", "runs", "--json")
    assert done.returncode in (0, 3), done.stderr  # whatever the verdict
    (rank,) = json.loads(done.stdout)["ranks"]
    assert (rank["pipeline_rank"], rank["on"]) == (3, "gpu")
    assert (rank["allocated_bytes"], rank["reserved_bytes"]) == (50 * 2**30, 52 * 2**30)
    place, world, *devices = (person.home / "seen").read_text().split()
    assert (place, world, len(devices)) == ("384", "512", 1)
    job = json.loads((person.home / "runs" / "rank3" / "submission.json").read_text())["job_id"]
    shown = person.ask("scontrol", "show", "job", job).split()
    job_shown = dict(word.split("=", 1) for word in shown if "=" in word)
    assert (job_shown["JobState"], job_shown["NumNodes"]) == ("COMPLETED", "1")
    assert job_shown["TresPerNode"].endswith(("gpu:1", "gpu:h100:1"))
    assert (
        job_shown.get("Exclusive") == "NO" or job_shown["OverSubscribe"] == "OK"
    )  # a part of a node; 26.05 says the first
    assert job_shown["TimeLimit"] == "00:20:00"
