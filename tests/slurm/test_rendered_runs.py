"""Rendered run directories on real SLURM: submitted by llmlaunch and by bare sbatch, on two nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from one_machine import Cluster

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = str(ROOT / "recipes" / "quickstart.yaml")
# two nodes with one process each: the machine under all nodes has few cores
TWO_NODES = ("nodes=2", "cluster=cpu-x1", "training.steps=6", f"python={sys.executable}")
SECONDS = 600

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("slurm")]


def llmlaunch(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    places = {"XDG_DATA_HOME": str(home / "data"), "XDG_CACHE_HOME": str(home / "cache")}
    return subprocess.run(
        [sys.executable, "-m", "llmlaunch", *words],
        cwd=home, env={**os.environ, **places}, capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip


def measurements(home: Path) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = json.loads(llmlaunch(home, "measurements", "list", "--json").stdout)["measurements"]
    return records


def assert_both_nodes_are_measured(home: Path) -> None:
    everything = measurements(home)
    assert len({r["node"] for r in everything if r["peak_kind"] == "host"}) == 2
    records = [r for r in everything if r["peak_kind"] != "host"]
    assert sorted(r["global_rank"] for r in records) == [0, 1]
    assert len({r["node"] for r in records}) == 2
    for record in records:
        assert record["peak_kind"] == "resident"
        assert record["peak_bytes"] > 2**27
        assert record["world_size"] == 2


def test_the_quickstart_trains_on_two_nodes_and_both_peaks_are_collected(slurm: Cluster, tmp_path: Path) -> None:
    done = llmlaunch(tmp_path, "submit", QUICKSTART, *TWO_NODES, "--follow", "-o", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Submitting to SLURM" in done.stderr
    assert "step 6/6 | loss" in done.stdout
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "succeeded"
    assert sorted(node["node"] for node in status["nodes"]) == sorted(slurm.nodes[:2])
    progress = json.loads((tmp_path / "run" / "attempts" / status["attempt"] / "progress.json").read_text())
    assert (progress["step"], progress["steps"], progress["hung"]) == (6, 6, None)
    assert_both_nodes_are_measured(tmp_path)
    assert "succeeded" in llmlaunch(tmp_path, "status", "run").stdout


def test_bare_sbatch_of_a_rendered_directory_behaves_the_same(slurm: Cluster, tmp_path: Path) -> None:
    rendered = llmlaunch(tmp_path, "render", QUICKSTART, *TWO_NODES, "-o", "run")
    assert rendered.returncode == 0, rendered.stderr
    ended = slurm.run(tmp_path / "run", "job.sbatch")
    logs = "\n".join(path.read_text() for path in sorted((tmp_path / "run" / "logs").glob("*.log")))
    assert ended == "0:0", logs
    assert "step 6/6 | loss" in logs
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "succeeded"
    collected = llmlaunch(tmp_path, "collect", "run")
    assert collected.returncode == 0, collected.stderr
    assert_both_nodes_are_measured(tmp_path)


def test_a_trainer_that_fails_fails_the_job_and_its_own_code_is_kept(tmp_path: Path) -> None:
    script = tmp_path / "fails_on_rank_1.py"
    script.write_text("import os, sys, time\nsys.exit(7) if os.environ['RANK'] == '1' else time.sleep(300)\n")
    own = f"backend={{name: deepspeed, script: {script}}}"
    done = llmlaunch(tmp_path, "submit", QUICKSTART, *TWO_NODES, own, "--follow", "-o", "run")
    assert done.returncode == 1, done.stdout + done.stderr
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "failed"
    assert {rank["rank"]: rank["exit_code"] for rank in status["ranks"]}[1] == 7
    assert "failed" in llmlaunch(tmp_path, "status", "run").stdout


def test_a_refused_job_is_exit_code_4_with_sbatchs_own_words_and_the_directory_kept(tmp_path: Path) -> None:
    refused = llmlaunch(tmp_path, "submit", QUICKSTART, *TWO_NODES, "slurm.partition=nowhere", "-o", "run")
    assert refused.returncode == 4
    assert "invalid partition" in refused.stderr.lower()
    assert "Traceback" not in refused.stderr
    assert (tmp_path / "run" / "job.sbatch").is_file()


def test_a_cancelled_job_is_cancelled_everywhere(tmp_path: Path) -> None:
    script = tmp_path / "sleeps.py"
    script.write_text("import time\ntime.sleep(600)\n")
    own = f"backend={{name: deepspeed, script: {script}}}"
    assert llmlaunch(tmp_path, "submit", QUICKSTART, *TWO_NODES, own, "-o", "run").returncode == 0
    assert llmlaunch(tmp_path, "cancel", "run").returncode == 0
    deadline = time.monotonic() + 240
    while "cancelled" not in (said := llmlaunch(tmp_path, "status", "run").stdout):
        assert time.monotonic() < deadline, said
        time.sleep(1)
