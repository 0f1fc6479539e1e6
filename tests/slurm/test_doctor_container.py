"""`llmlaunch doctor --container` on a real node. Apptainer is a stand-in that notes its words and runs the command; the
interpreter inside and what it finds are real."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = str(ROOT / "recipes" / "quickstart.yaml")

STAND_IN = """\
#!/bin/bash
printf '%s %s\\n' "$SLURM_JOB_ID" "$*" >"{seen}"
while [[ $1 != *.sif ]]; do shift; done
shift
exec "$@"
"""

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("slurm")]


def test_a_recipes_container_is_looked_into_on_one_node_and_remembered(tmp_path: Path) -> None:
    programs, seen = tmp_path / "programs", tmp_path / "seen"
    programs.mkdir()
    (programs / "apptainer").write_text(STAND_IN.format(seen=seen))
    (programs / "apptainer").chmod(0o755)
    (tmp_path / "box.sif").write_text("an image")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        Path(QUICKSTART).read_text()
        + f"\npython: {sys.executable}\ncontainer: {{image: box.sif, runtime: apptainer}}\n"
        + f"slurm: {{partition: train}}\nsetup: ['PATH={programs}:$PATH']\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}

    def llmlaunch(*words: str) -> str:
        command = [sys.executable, "-m", "llmlaunch", *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    deepspeed = importlib.metadata.version("deepspeed")
    assert f"deepspeed           {deepspeed}\n" in llmlaunch("doctor", "--container", "recipe.yaml")
    job, _, entered = seen.read_text().partition(" ")
    assert job.isdigit()
    assert entered.startswith(f"exec --no-home {tmp_path / 'box.sif'} bash -c ")
    assert f"Assumed: DeepSpeed {deepspeed}, as llmlaunch doctor saw" in llmlaunch("check", "recipe.yaml")
