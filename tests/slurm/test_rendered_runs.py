"""A rendered run directory is all that a job needs: bare sbatch, on two nodes."""

from __future__ import annotations

import pytest
from one_machine import Cluster
from person import Person
from training import QUICKSTART, Training, backend

pytestmark = pytest.mark.slurm

# Trains nothing, and holds as much as torch alone.
LARGE = """\
import os
held = b"x" * 2**28
if os.environ["RANK"] == "0":
    for step in range(1, 7):
        print(f"step {step}/6 | loss {1 / step:.4f} | 0.10 s/step | 1000 tokens/s", flush=True)
"""
# What an interactive job exports to the shell in which sbatch is typed.
OF_ANOTHER_JOB = {
    "SLURM_GPUS": "64", "SLURM_NTASKS_PER_GPU": "1", "SLURM_MEM_PER_CPU": "900", "SLURM_EXACT": "1",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0xF0000000", "SLURM_DISTRIBUTION": "arbitrary", "SLURM_LABELIO": "1",
    "SRUN_OUTPUT": "none",
}  # fmt: skip


def test_bare_sbatch_in_the_shell_of_another_job_trains_and_both_nodes_are_measured(
    slurm: Cluster, person: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = person.home / "run"
    (person.home / "trainer.py").write_text(LARGE)
    words = ("nodes=2", "cluster=cpu-x1", f"python={person.python}", backend(person.home / "trainer.py"))
    training = Training(person, run, person.llmlaunch("render", QUICKSTART, *words, "-o", run, code=0))
    with monkeypatch.context() as patch:
        for name, value in OF_ANOTHER_JOB.items():
            patch.setenv(name, value)
        ended = slurm.run(run, "job.sbatch")
    assert ended == "0:0", training.log()
    assert "step 6/6 | loss" in training.log()
    assert training.status()["state"] == "succeeded"
    person.llmlaunch("collect", "run", code=0)
    measurements = person.measurements()
    assert len({r["node"] for r in measurements if r["peak_kind"] == "host"}) == 2
    records = [r for r in measurements if r["peak_kind"] != "host"]
    assert sorted((r["global_rank"], r["peak_kind"], r["world_size"]) for r in records) == [
        (0, "resident", 2),
        (1, "resident", 2),
    ]
    assert len({r["node"] for r in records}) == 2
    assert min(r["peak_bytes"] for r in records) > 2**27
