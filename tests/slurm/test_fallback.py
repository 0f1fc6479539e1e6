"""Out of memory on real SLURM: the next layout trains in the same allocation, or the run says why none does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from one_machine import Cluster

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = str(ROOT / "recipes" / "quickstart.yaml")
TRAINER = Path(__file__).with_name("picky_trainer.py")
# long sequences, so that half a micro-batch leaves memory free: 8, then 4
LAYOUTS = ("cluster=cpu-x1", "training.steps=6", "training.sequence_length=512", "layout={zero_stage: 0}")
SECONDS = 600

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("slurm")]


def llmlaunch(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    places = {"XDG_DATA_HOME": str(home / "data"), "XDG_CACHE_HOME": str(home / "cache")}
    return subprocess.run(
        [sys.executable, "-m", "llmlaunch", *words],
        cwd=home, env={**os.environ, **places}, capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip


def submit(home: Path, *words: str, nodes: int = 1, trainer: str = "--fits, '4'") -> subprocess.CompletedProcess[str]:
    """Followed to its end; a micro-batch of 8 is the planned one."""
    own = f"backend={{name: deepspeed, script: {TRAINER}, script_args: [{trainer}]}}"
    size = (f"nodes={nodes}", f"training.global_batch_size={32 * nodes}", f"python={sys.executable}")
    return llmlaunch(home, "submit", QUICKSTART, own, *size, *LAYOUTS, *words, "--follow", "-o", "run")


def read(home: Path, name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((home / "run" / name).read_text())
    return value


def attempts(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "run" / "attempts").iterdir())


def test_out_of_memory_the_next_layout_trains_in_the_same_allocation(slurm: Cluster, tmp_path: Path) -> None:
    done = submit(tmp_path, "on_oom=fallback", nodes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    job = read(tmp_path, "submission.json")["job_id"]
    assert attempts(tmp_path) == [f"{job}.0", f"{job}.1"]
    first, second = (read(tmp_path, f"attempts/{name}/status.json") for name in attempts(tmp_path))
    assert (first["state"], first["layout"], first["cause"]["kind"]) == ("failed", "", "oom")
    assert (first["next"]["action"], first["next"]["layout"]) == ("fallback", "fallback/1")
    assert (second["state"], second["layout"]) == ("succeeded", "fallback/1")
    assert read(tmp_path, "status.json") == second
    assert "fallback/1" in done.stdout
    assert "step 6/6" in done.stdout
    assert "attempt 1, rank 0 on node1 (pipeline rank 0)" in done.stdout
    assert "attempt 2, rank 0 on node1 (pipeline rank 0)" in done.stdout
    said = llmlaunch(tmp_path, "status", "run").stdout
    assert "succeeded" in said
    assert "out of memory before, so with fallback/1" in said
    (run,) = json.loads(llmlaunch(tmp_path, "runs", "--json").stdout)["runs"]
    assert (run["state"], run["attempt"], run["job_id"]) == ("succeeded", f"{job}.1", job)
    assert_each_layout_has_its_own_measurements(tmp_path, job)


def assert_each_layout_has_its_own_measurements(home: Path, job: str) -> None:
    records = json.loads(llmlaunch(home, "measurements", "list", "--json").stdout)["measurements"]
    for attempt, folder, size in ((f"{job}.0", "", 8), (f"{job}.1", "fallback/1/", 4)):
        mine = [record for record in records if record["attempt"] == attempt and record["peak_kind"] == "resident"]
        assert sorted(record["global_rank"] for record in mine) == [0, 1]
        predicted = read(home, f"{folder}run.json")["predicted_bytes"]
        died = [record for record in records if record["attempt"] == attempt and record["peak_kind"] == "oom"]
        assert [record["micro_batch_size"] for record in died] == ([] if folder else [size, size])
        assert {(r["micro_batch_size"], r["predicted_bytes"]) for r in mine} == {(size, predicted[0])}


def test_a_host_out_of_memory_is_not_answered_with_head_room_on_the_device(tmp_path: Path) -> None:
    done = submit(tmp_path, "on_oom=fallback", trainer="--fits, '4', --of, host")
    assert done.returncode == 1, done.stdout + done.stderr
    status = read(tmp_path, "status.json")
    assert (status["cause"]["kind"], status["next"]["action"]) == ("host_oom", "end")
    assert len(attempts(tmp_path)) == 1


@pytest.mark.parametrize(
    ("after", "trained", "why"),
    [
        ("reshard", False, "fallback/1 cannot load the checkpoint of step 2"),
        ("restart", True, ""),
        ("stop", False, "there is a checkpoint of step 2 (on_oom.after_checkpoint: stop)"),
    ],
)
def test_after_a_checkpoint_the_recipe_says_what_follows(tmp_path: Path, after: str, trained: bool, why: str) -> None:
    """Nobody knows what a script of the person's own can load, so it counts as unable to."""
    saving = ("training.save_interval=2", f"training.checkpoint_path={tmp_path}/ckpt")
    on_oom = f"on_oom={{layouts: 1, after_checkpoint: {after}}}"
    done = submit(tmp_path, *saving, on_oom, trainer="--fits, '4', --steps-before, '3'")
    assert done.returncode == (0 if trained else 1), done.stdout + done.stderr
    assert len(attempts(tmp_path)) == 1 + trained
    status = read(tmp_path, "status.json")
    assert status["layout"] == ("fallback/1" if trained else "")
    assert why in status["next"]["why"]
    own = Path(read(tmp_path, "run.json")["checkpoint"]["path"])
    theirs = Path(read(tmp_path, "fallback/1/run.json")["checkpoint"]["path"])
    assert theirs.name == (f"{own.name}-fallback-1" if after == "restart" else own.name)
