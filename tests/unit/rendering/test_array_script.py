"""One script for an array of runs: the same options for all, each task its own run directory, nothing but words."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from run_samples import NASTY, deepspeed_cpu

from llmlaunch.errors import UserError
from llmlaunch.rendering.scripts import job_script
from llmlaunch.rendering.sweep import array_script, render_sweep, run_names
from support.golden import assert_golden

HEAD = "#!/bin/bash\n#SBATCH --job-name=one\n#SBATCH --nodes=2\n#SBATCH --output=slurm-%j.out\n\nset -u\n"


def test_the_script_is_the_golden_one() -> None:
    of, plan, _ = deepspeed_cpu()
    script = array_script("lr-sweep", dict.fromkeys(["0-lr", "1-lr"], job_script(of, plan)), limit=1)
    assert_golden("array", "job.sbatch", script)


def test_the_array_asks_for_what_each_of_its_runs_asks_for() -> None:
    lines = array_script("sweep", {"a": HEAD, "b": HEAD.replace("=one", "=two")}, limit=4).splitlines()
    assert lines[1:5] == [
        "#SBATCH --job-name=sweep",
        "#SBATCH --array=0-1%4",
        "#SBATCH --nodes=2",
        "#SBATCH --output=slurm-%A_%a.out",
    ]
    assert not lines[5].startswith("#SBATCH")


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (HEAD.replace("nodes=2", "nodes=4"), "a has --nodes=2 where b has --nodes=4"),
        (HEAD.replace("#SBATCH --nodes=2\n", ""), "a has --nodes=2 where b has nothing"),
        (
            HEAD.replace("#SBATCH --nodes", "#SBATCH --exclusive\n#SBATCH --nodes"),
            "a has nothing where b has --exclusive",
        ),
    ],
)
def test_runs_that_ask_for_something_else_are_no_array(other: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        array_script("sweep", {"a": HEAD, "b": other})


def test_a_recipe_that_asks_for_an_array_of_its_own_is_no_task() -> None:
    asks = HEAD.replace("#SBATCH --nodes", "#SBATCH --array=0-3\n#SBATCH --nodes")
    with pytest.raises(UserError, match="asks for an array of its own"):
        array_script("sweep", {"a": asks, "b": asks})


def start(sweep: Path, **task: str) -> subprocess.CompletedProcess[str]:
    """The script as SLURM starts it: a copy elsewhere, in the directory where sbatch was called."""
    spooled = sweep.parent / "spooled"
    spooled.write_text((sweep / "job.sbatch").read_text())
    fake = sweep.parent / "bin"
    fake.mkdir(exist_ok=True)
    (fake / "scontrol").write_text(f"#!/bin/bash\necho '   Command={sweep}/job.sbatch'\n")
    (fake / "scontrol").chmod(0o755)
    environment = {"PATH": f"{fake}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", **task}
    return subprocess.run(["bash", str(spooled)], cwd="/", env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", [word for word in NASTY if word and "/" not in word])
def test_each_task_runs_its_own_directory_whatever_it_is_called(tmp_path: Path, name: str) -> None:
    says = HEAD + 'printf \'%s|\' "$PWD" "${BASH_SOURCE[0]}" "$SLURM_ARRAY_TASK_ID"\n'

    def write(directory: Path) -> None:
        directory.mkdir()
        (directory / "job.sbatch").write_text(says)

    sweep = tmp_path / "sweep"
    names = run_names([name, name])
    first, second = render_sweep(sweep, "sweep", "array", dict.fromkeys(names, write), [{}, {}])
    for index, directory in enumerate((first, second)):
        done = start(sweep, SLURM_ARRAY_TASK_ID=str(index))
        assert done.stdout == f"{directory}|{directory}/job.sbatch|{index}|", done.stderr
    assert "there is no run 2" in start(sweep, SLURM_ARRAY_TASK_ID="2").stderr
    assert "start it with sbatch" in start(sweep).stderr
    assert not list(tmp_path.rglob("PWNED"))


def test_a_sweep_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    def fails(directory: Path) -> None:
        raise UserError("the second is bad")

    with pytest.raises(UserError, match="second is bad"):
        render_sweep(tmp_path / "sweep", "sweep", "independent", {"0-a": Path.mkdir, "1-a": fails}, [{}, {}])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "sweep").mkdir()
    with pytest.raises(UserError, match="exists already"):
        render_sweep(tmp_path / "sweep", "sweep", "independent", {"0-a": Path.mkdir}, [{}])
