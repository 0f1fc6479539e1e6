"""Preflight and spare nodes on real SLURM: a node that is not well is left out and named, and the training goes on."""

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
TRAINER = Path(__file__).with_name("slow_saver.py")
SECONDS = 600

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("slurm")]

# The training environment's Python; on nodes named as broken the preflight dies as it would of a driver.
PYTHON = """\
#!/bin/bash
if [[ " {broken} " = *" $SLURMD_NODENAME "* && $* = *trainer/preflight.py* ]]; then
  echo "RuntimeError: CUDA unknown error" >&2
  exit 1
fi
exec {python} "$@"
"""


def run(tmp_path: Path, nodes: int, spare: int, broken: str) -> tuple[int, Path]:
    """Exit code of `submit --follow`, and the run directory."""
    python = tmp_path / "python"
    python.write_text(PYTHON.format(broken=broken, python=sys.executable))
    python.chmod(0o755)
    own = f"backend={{name: deepspeed, script: {TRAINER}, script_args: [--steps, '3', --save, {tmp_path / 'saved'}]}}"
    words = [f"nodes={nodes}", f"spare_nodes={spare}", "preflight=true", "cluster=cpu-x1", f"python={python}", own]
    places = {"XDG_DATA_HOME": str(tmp_path / "data"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "llmlaunch", "submit", QUICKSTART, *words, "--follow", "-o", "run"],
        cwd=tmp_path, env={**os.environ, **places, "LLMLAUNCH_PREFLIGHT_SECONDS": "45"}, capture_output=True, text=True,
        timeout=SECONDS, check=False,
    )  # fmt: skip
    return done.returncode, tmp_path / "run"


def attempt(run: Path, name: str) -> dict[str, Any]:
    (path,) = (run / "attempts").glob(f"*/{name}")
    value: dict[str, Any] = json.loads(path.read_text())
    return value


def logs(run: Path) -> str:
    return "\n".join(path.read_text() for path in sorted((run / "logs").glob("*.log")))


def test_a_broken_node_is_named_and_a_spare_one_takes_its_place(slurm: Cluster, tmp_path: Path) -> None:
    """The one in the middle: the last node is the second of those that train, and its rank says so."""
    first, broken, last = slurm.nodes[:3]
    code, run_dir = run(tmp_path, nodes=2, spare=1, broken=broken)
    assert code == 0, logs(run_dir)
    status = json.loads((run_dir / "status.json").read_text())
    assert status["state"] == "succeeded"
    assert {rank["node"]: rank["rank"] for rank in status["ranks"]} == {first: 0, last: 1}
    chosen = attempt(run_dir, "preflight.json")
    assert chosen["nodes"] == [first, last]
    assert list(chosen["bad"]) == [broken]
    assert attempt(run_dir, f"causes/{broken}.json")["sick"]
    assert attempt(run_dir, "attempt.json")["nodes"] == [first, last]
    for node in (first, last):  # the two met without the third
        assert attempt(run_dir, f"preflight/{node}.json")["stage"] == "reduced"


def test_too_few_good_nodes_end_the_job_before_it_trains(slurm: Cluster, tmp_path: Path) -> None:
    """The first is broken: nobody keeps the list of those who met, and it is named all the same."""
    broken, good = slurm.nodes[:2]
    code, run_dir = run(tmp_path, nodes=2, spare=0, broken=broken)
    assert code != 0
    status = json.loads((run_dir / "status.json").read_text())
    assert status["state"] == "failed"
    assert (status["cause"]["kind"], status["cause"]["node"]) == ("preflight", broken)
    assert "step 1/3" not in logs(run_dir)
    assert attempt(run_dir, f"preflight/{good}.json")["stage"] == "matmul"
