"""A job in an Apptainer container at a site with a profile of its own, on two real nodes. Apptainer itself is a
stand-in that notes its words and runs the command: what is tested is that the right command reaches every node."""

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
