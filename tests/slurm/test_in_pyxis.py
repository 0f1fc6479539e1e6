"""Jobs in pyxis containers that do not start, on two real nodes.

pyxis is no Debian package: an srun in front of the real one stands in for it, and does what pyxis 0.24.0 and enroot
4.1.2 were seen to do. A step's container is `pyxis_<job>.<step>`. Where a folder of that name is there already, the
step says so in its own output and ends at once with 1, and the folder is removed. Where the image is missing, the step
ends so each time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from one_machine import Cluster

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = str(ROOT / "recipes" / "quickstart.yaml")

SRUN = """\
#!/bin/bash
options=()
while [[ $1 = --* ]]; do
  [[ $1 = --container-* || $1 = --no-container-* ]] || options+=("$1")
  shift
done
echo "$1" >>"{folder}/steps"
exec {srun} "${{options[@]}}" bash "{folder}/stepd" "$@"
"""
STEPD = """\
fail() {{
  echo "slurmstepd-$SLURMD_NODENAME: pyxis: creating container filesystem: pyxis_$SLURM_JOB_ID.$SLURM_STEP_ID"
  echo "slurmstepd-$SLURMD_NODENAME: error: pyxis: failed to create container filesystem for image: /images/box.sqsh"
  echo "slurmstepd-$SLURMD_NODENAME: error: pyxis: printing enroot log file:"
  echo "slurmstepd-$SLURMD_NODENAME: error: pyxis:     [ERROR] $1"
  exit 1
}} >&2
[[ ! -e "{folder}/no-image" ]] || fail "No such file or directory: /images/box.sqsh"
! rmdir "{folder}/$SLURM_NODEID/pyxis_$SLURM_STEP_ID" 2>/dev/null || fail "File already exists: {folder}/pyxis"
exec "$@"
"""

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("slurm")]


def submitted(tmp_path: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A followed run of two nodes, and its directory."""
    programs = tmp_path / "programs"
    programs.mkdir()
    where = subprocess.run(["which", "srun"], capture_output=True, text=True, check=True).stdout.strip()
    (programs / "srun").write_text(SRUN.format(folder=tmp_path, srun=where))
    (programs / "srun").chmod(0o755)
    (tmp_path / "stepd").write_text(STEPD.format(folder=tmp_path))
    site = f"cluster={{base: cpu-x1, setup: ['PATH={programs}:$PATH'], container: {{runtime: pyxis}}}}"
    own = ("nodes=2", site, f"python={sys.executable}", "training.steps=3", "container.image=/images/box.sqsh")
    done = subprocess.run(
        [sys.executable, "-m", "llmlaunch", "submit", QUICKSTART, *own, *words, "-o", "run", "--follow"],
        cwd=tmp_path, env={**os.environ, "XDG_DATA_HOME": str(tmp_path / "data")}, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    return done, tmp_path / "run"


def logs(run: Path) -> str:
    return "\n".join(path.read_text() for path in sorted((run / "logs").glob("*.log")))


def test_folders_that_pyxis_left_behind_cost_a_try_and_no_node_is_blamed(slurm: Cluster, tmp_path: Path) -> None:
    """One is met by the preflight on the first node, one by the training on the second."""
    for leftover in ("0/pyxis_0", "1/pyxis_1"):
        (tmp_path / leftover).mkdir(parents=True)
    done, run = submitted(tmp_path, "preflight=true")
    assert done.returncode == 0, done.stdout + done.stderr + logs(run)
    job = json.loads((run / "submission.json").read_text())["job_id"]
    first = json.loads((run / "attempts" / f"{job}.0" / "status.json").read_text())
    assert first["cause"]["kind"] == "container_busy"
    assert "File already exists" in first["cause"]["line"]
    assert first["next"] == {
        "action": "again",
        "why": "the container did not start this time",
        "layout": ".",
        "seconds": 0,
    }
    assert json.loads((run / "attempts" / f"{job}.0" / "preflight.json").read_text())["bad"] == {}
    assert json.loads((run / "status.json").read_text())["state"] == "succeeded"


def test_an_image_that_is_not_there_ends_the_job_and_is_named(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "no-image").touch()
    saves = ("training.save_interval=2", f"training.checkpoint_path={tmp_path / 'saved'}")  # so it would come back
    done, run = submitted(tmp_path, *saves)
    assert done.returncode == 1, done.stdout + done.stderr
    status = json.loads((run / "status.json").read_text())
    assert status["cause"]["kind"] == "container", logs(run)
    assert status["next"]["why"] == "a restart would end in container again"
    assert "the container does not start" in done.stdout
    assert "No such file or directory: /images/box.sqsh" in done.stdout
    assert len(list((run / "attempts").iterdir())) == 1
