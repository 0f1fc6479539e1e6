"""What ended a job on real SLURM: out of memory becomes a measurement, a lost node is left out until it is forgiven."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from one_machine import Cluster, wait_until

from llmlaunch.units import GIB

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = str(ROOT / "recipes" / "quickstart.yaml")
# two nodes with one process each: the machine under all nodes has few cores
TWO_NODES = ("nodes=2", "cluster=cpu-x1", "training.steps=6", f"python={sys.executable}")

RUNS_OUT = """
import os, time
time.sleep(300 if os.environ["RANK"] != "1" else 0)
raise RuntimeError(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.25 GiB of which 1.00 GiB is free."
    " Including non-PyTorch memory, this process has 78.00 GiB memory in use. Of the allocated memory 70.00 GiB is "
    "allocated by PyTorch, and 5.00 GiB is reserved by PyTorch but unallocated."
)
"""
FAULTY = """
import os
if os.environ["RANK"] == "1" and os.environ["LLMLAUNCH_ATTEMPT"].endswith(".0"):
    print("Traceback (most recent call last):\\nRuntimeError: MESSAGE")
    raise SystemExit(1)
"""
# Makes and saves a step; where it is told to it fails, and the next time makes one more.
SAVES = """
import os, sys, time
from pathlib import Path
if os.environ["RANK"] == "0":
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    latest = folder / "latest"
    step = 1 + (int(latest.read_text().rpartition("-")[2]) if latest.exists() else 0)
    latest.write_text(f"step-{step}")
    print(f"step {step}/6 | loss 1.0 | 0.50 s/step | 1000 tokens/s", flush=True)
    while not (folder / "fail").exists():
        time.sleep(0.1)
    (folder / "fail").unlink()
    latest.unlink()
    raise SystemExit(3)
time.sleep(600)
"""
SLOW_VERDICT = """#!/bin/bash
[[ $* != *finish* ]] || sleep {seconds}
exec {python} "$@"
"""
SLEEPS = "import time\ntime.sleep(600)\n"

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("slurm")]


def llmlaunch(home: Path, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    places = {"XDG_DATA_HOME": str(home / "data"), "XDG_CACHE_HOME": str(home / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "llmlaunch", *words],
        cwd=home, env={**os.environ, **places}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done


def submitted(home: Path, name: str, trainer: str, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """A two-node job of a trainer of our own, in the run directory `name`."""
    script = home / "trainer.py"
    script.write_text(trainer)
    own = f"backend={{name: deepspeed, script: {script}}}"
    return llmlaunch(home, "submit", QUICKSTART, *TWO_NODES, own, *words, "-o", name, code=code)


def status(home: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((home / name / "status.json").read_text())
    return found


def test_a_rank_out_of_memory_is_the_cause_and_a_measurement(tmp_path: Path) -> None:
    said = submitted(tmp_path, "run", RUNS_OUT, "--follow", code=1).stdout
    assert "rank 1 on node" in said
    found = status(tmp_path, "run")
    assert (found["cause"]["kind"], found["cause"]["rank"], found["cause"]["sick"]) == ("oom", 1, False)
    assert "out of GPU memory (rank 1 on " in found["why"]
    assert found["next"]["action"] == "end"
    records = json.loads(llmlaunch(tmp_path, "measurements", "list", "--kind", "oom", "--json").stdout)["measurements"]
    (record,) = records
    assert (record["global_rank"], record["peak_bytes"], record["run_state"]) == (1, None, "failed")
    assert record["numbers"]["asked_bytes"] == 2 * GIB
    assert record["numbers"]["non_torch_bytes"] == 3 * GIB
    assert json.loads(llmlaunch(tmp_path, "nodes", "--json").stdout) == {"nodes": []}


@pytest.mark.parametrize("verdict_seconds", [0, 120])
def test_a_lost_node_is_left_out_by_name_until_it_is_forgiven(
    slurm: Cluster, tmp_path: Path, verdict_seconds: int
) -> None:
    """SLURM kills the batch script KillWait (here 5 s) after a node was lost. A verdict that takes longer, as on a busy
    machine, is never written: then SLURM's own word counts."""
    python = tmp_path / "python"
    python.write_text(SLOW_VERDICT.format(seconds=verdict_seconds, python=sys.executable))
    python.chmod(0o755)
    submitted(tmp_path, "run", SLEEPS, "slurm.no-requeue=true", f"python={python}")
    ranks = tmp_path / "run" / "attempts"
    wait_until(lambda: len(list(ranks.glob("*/ranks/*.json"))) == 2, "both ranks have started")
    lost = json.loads(next(ranks.glob("*/ranks/1.json")).read_text())["node"]
    number = lost.removeprefix("node")

    def is_idle() -> bool:
        return slurm.ask("sinfo", "-h", "-n", lost, "-p", "train", "-o", "%t").strip() == "idle"

    def state() -> dict[str, Any]:
        said: dict[str, Any] = json.loads(llmlaunch(tmp_path, "status", "run", "--json").stdout)
        return said

    try:
        slurm.do("kill-node", number)
        wait_until(lambda: state()["phase"] == "failed", "SLURM has noticed", instead=state)
        assert f"the node failed ({lost})" in state()["reason"]
        assert verdict_seconds == 0 or not (tmp_path / "run" / "status.json").exists()
    finally:
        slurm.do("start-node", number)
        wait_until(is_idle, "the node is up again")

    said = submitted(tmp_path, "next", SLEEPS).stderr
    assert f"{lost} left out until" in said
    assert "Node failure on" in said
    job = json.loads((tmp_path / "next" / "submission.json").read_text())["job_id"]
    assert f"ExcNodeList={lost}" in slurm.ask("scontrol", "show", "job", job)
    assert lost in llmlaunch(tmp_path, "nodes").stdout

    assert "1 failure forgiven" in llmlaunch(tmp_path, "nodes", "--forgive", lost).stderr
    assert "left out" not in submitted(tmp_path, "third", SLEEPS).stderr


def test_a_checkpoint_that_vanished_ends_the_job_until_a_person_lets_it_begin_again(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(SAVES)
    folder, run = tmp_path / "checkpoints", tmp_path / "run"
    own = json.dumps(
        {"name": "deepspeed", "script": str(tmp_path / "trainer.py"), "script_args": [str(folder)]}
    )  # fmt: skip
    words = (f"training.checkpoint_path={folder}", "training.save_interval=2", "restart={backoff_seconds: 1}")
    llmlaunch(tmp_path, "submit", QUICKSTART, *TWO_NODES, f"backend={own}", *words, "-o", "run")

    def seen(attempt: str) -> bool:
        return any(
            json.loads(path.read_text())["tracker_step"] for path in run.glob(f"attempts/{attempt}/progress.json")
        )

    wait_until(lambda: seen("*.0"), "the watchdog has seen step 1 saved")
    (folder / "fail").touch()
    wait_until(lambda: len(list(run.glob("attempts/*.1/status.json"))) == 1, "the next attempt has ended")
    said = json.loads(llmlaunch(tmp_path, "status", "run", "--json").stdout)
    assert (said["phase"], said["cause"]["kind"]) == ("failed", "checkpoint")
    assert f"{folder}/latest names no checkpoint, but attempt" in said["reason"]
    assert f"llmlaunch resume {run} --from-older" in said["reason"]
    assert not list(run.glob("logs/*.1.node*.log"))  # nothing was trained

    llmlaunch(tmp_path, "resume", "run", "--from-older")
    job = json.loads((run / "submission.json").read_text())["job_id"]
    wait_until(lambda: seen(f"{job}.0"), "it trains again")
    assert not (run / "from_older").exists()


@pytest.mark.parametrize(
    ("message", "kind"),
    [("CUDA error: uncorrectable ECC error encountered", "ecc"), ("No CUDA GPUs are available", "driver")],
)
def test_a_job_that_comes_back_leaves_its_faulty_node_out(
    slurm: Cluster, tmp_path: Path, message: str, kind: str
) -> None:
    saved = f"training.checkpoint_path={tmp_path / 'checkpoints'}"
    submitted(
        tmp_path,
        "run",
        FAULTY.replace("MESSAGE", message),
        saved,
        "training.save_interval=2",
        "restart={backoff_seconds: 1}",
    )
    again = tmp_path / "run" / "attempts"
    wait_until(lambda: len(list(again.glob("*.1/ranks/1.json"))) == 1, "it started again")
    first = json.loads(next(again.glob("*.0/status.json")).read_text())
    assert (first["cause"]["kind"], first["cause"]["sick"], first["next"]["action"]) == (kind, True, "requeue")
    faulty = first["cause"]["node"]
    assert faulty not in {json.loads(path.read_text())["node"] for path in again.glob("*.1/ranks/*.json")}
    log = next((tmp_path / "run" / "logs").glob("*.0.job.log")).read_text()
    assert f"{faulty} at fault: left out when the job starts again" in log
