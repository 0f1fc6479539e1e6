"""A job in an Apptainer container at a site with a profile of its own, on two real nodes. Apptainer itself is a
stand-in that notes its words and runs the command: what is tested is that the right command reaches every node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from one_machine import Cluster, wait_until

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = str(ROOT / "recipes" / "quickstart.yaml")

STAND_IN = """\
#!/bin/bash
printf '%s\\n' "$@" >"{seen}/$SLURM_NODEID"
while [[ $1 != *.sif ]]; do shift; done
shift
exec "$@"
"""
PROFILE = """\
base: cpu-x1
slurm: {{partition: train}}
srun: {{cpu-bind: none, unbuffered: true}}
mpi: none
setup:
  - module() {{ [[ $1 = load && $2 = apptainer/1.3 ]] && PATH="{programs}:$PATH"; }}
  - export SITE_SAYS='two words'
modules: [apptainer/1.3]
container: {{runtime: apptainer, mounts: ["{data}:/data:ro"]}}
"""
TRAINER = "import os\nassert os.environ['SITE_SAYS'] == 'two words'\nprint('trains in', os.getcwd(), flush=True)\n"

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("slurm")]


def test_the_container_command_reaches_every_node_with_what_the_recipe_names(slurm: Cluster, tmp_path: Path) -> None:
    programs, seen, script = tmp_path / "programs", tmp_path / "seen", tmp_path / "mine" / "train.py"
    for folder in (programs, seen, script.parent, tmp_path / "clusters", tmp_path / "data"):
        folder.mkdir()
    (programs / "apptainer").write_text(STAND_IN.format(seen=seen))
    (programs / "apptainer").chmod(0o755)
    script.write_text(TRAINER)
    (tmp_path / "clusters" / "ours.yaml").write_text(PROFILE.format(data=tmp_path / "data", programs=programs))
    words = [
        *("nodes=2", "cluster=ours", f"python={sys.executable}", "container.image=box.sif"),
        f"backend={{name: deepspeed, script: {script}}}",
    ]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(Path(QUICKSTART).read_text())
    environment = {**os.environ, "LLMLAUNCH_CLUSTERS": str(tmp_path / "clusters"), "XDG_DATA_HOME": str(tmp_path / "x")}
    done = subprocess.run(
        [sys.executable, "-m", "llmlaunch", "submit", str(recipe), *words, "-o", "run", "--follow"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    run = tmp_path / "run"
    logs = "\n".join(path.read_text() for path in sorted((run / "logs").glob("*.log")))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    assert json.loads((run / "status.json").read_text())["state"] == "succeeded"
    assert logs.count(f"trains in {run}") == 2
    assert "setup: exit code" not in logs
    bound = [f"{tmp_path / 'data'}:/data:ro", f"{script.parent}:{script.parent}", f"{run}:{run}"]
    expected = ["exec", "--no-home", "--pwd", str(run), *(word for bind in bound for word in ("--bind", bind))]
    for node in ("0", "1"):
        called = (seen / node).read_text().splitlines()
        assert called == [*expected, str(tmp_path / "box.sif"), "bash", f"{run}/./train.sh"]


def test_a_container_that_is_slow_to_go_does_not_cost_the_verdict(slurm: Cluster, tmp_path: Path) -> None:
    """The ranks have ended and the step has not, nor does it until SLURM kills it."""
    lingering = STAND_IN.replace("exec ", "trap '' TERM\n").rstrip() + "\nsleep 1000\n"
    for folder in ("programs", "seen"):
        (tmp_path / folder).mkdir()
    (tmp_path / "programs" / "apptainer").write_text(lingering.format(seen=tmp_path / "seen"))
    (tmp_path / "programs" / "apptainer").chmod(0o755)
    (tmp_path / "train.py").write_text("print('trains', flush=True)\n")
    words = [
        *("nodes=2", "cluster=cpu-x1", f"python={sys.executable}", f"setup=['PATH={tmp_path}/programs:$PATH']"),
        "container={image: box.sif, runtime: apptainer}",
        f"backend={{name: deepspeed, script: {tmp_path / 'train.py'}}}",
    ]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(Path(QUICKSTART).read_text())
    command = [sys.executable, "-m", "llmlaunch", "submit", str(recipe), *words, "-o", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    job = str(json.loads((run / "submission.json").read_text())["job_id"])
    wait_until((run / "status.json").exists, "the job is judged", instead=lambda: logs_of(run))
    assert json.loads((run / "status.json").read_text())["state"] == "succeeded"
    assert slurm.ask("squeue", "-h", "-j", job, "-o", "%T").strip() == "RUNNING"
    slurm.ask("scancel", "--batch", "--signal=TERM", job)  # as at the time limit, which then kills what is left
    wait_until(lambda: not slurm.ask("squeue", "-h", "-j", job, "-t", "running", "-o", "%i"), "the script has ended")
    assert "what was judged before it stands" in logs_of(run)
    assert json.loads((run / "status.json").read_text())["state"] == "succeeded"


def logs_of(run: Path) -> str:
    return "\n".join(path.read_text() for path in sorted((run / "logs").glob("*.log")))
