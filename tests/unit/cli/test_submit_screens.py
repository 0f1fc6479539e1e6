"""What `submit` and its dry run show: one screen of 80 columns and 24 lines, which names the next command."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.assets import asset
from support.command_line import CommandLine
from support.recipes import recipe_text

QUICKSTART = str(asset("recipes", "quickstart.yaml"))
COLUMNS, LINES = 80, 24
ONE = "{tensor: 2, pipeline: 1, context: 1, micro_batch_size: 1, recompute: none, techniques: asked}"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put_commands: Callable[..., Path]) -> Path:
    """Make an empty folder the current one, with a SLURM that takes each job as 101."""
    put_commands(sbatch="echo 101", **dict.fromkeys(("squeue", "sacct", "sinfo", "scontrol", "scancel"), ""))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGATRON_LM_PATH", str(tmp_path))
    (tmp_path / "real.yaml").write_text(recipe_text(layout=ONE))
    return tmp_path


def row(screen: str, head: str) -> str:
    """Return the text of one row, with its wrapped lines joined."""
    lines = screen.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"  {head}"))
    texts = [lines[start].removeprefix(f"  {head}")]
    for line in lines[start + 1 :]:
        if not line.startswith("        "):
            break
        texts.append(line)
    return " ".join(" ".join(texts).split())


def assert_fits(screen: str) -> None:
    body = [line for line in screen.splitlines() if "llmlaunch submit" not in line]  # a command is as long as it is
    assert max(map(len, body)) <= COLUMNS, screen
    assert len(screen.splitlines()) <= LINES, screen


def test_a_dry_run_shows_on_one_screen_what_would_be_submitted(llmlaunch: CommandLine) -> None:
    words = ('slurm={partition: gpu, time: "8:00:00"}', "container.image=/images/megatron.sqsh")
    out = llmlaunch("submit", "real.yaml", *words, "--dry-run").stdout
    assert_fits(out)
    assert out.splitlines()[0] == "Dry run: nothing was written or submitted."
    assert row(out, "goes to") == "SLURM, partition gpu, time limit 8:00:00"
    assert row(out, "machines").startswith("4 nodes x 8 GPUs of h100-80gb")
    assert row(out, "environment") == "container /images/megatron.sqsh (pyxis)"
    assert row(out, "memory").startswith("safe (risk 0.56 %): ")
    assert "GiB on the fullest rank" in row(out, "memory")
    assert " s a step, " in row(out, "time")
    assert row(out, "run folder").startswith("runs/")
    assert "#SBATCH" not in out
    assert list(Path().glob("runs*")) == []


def test_made_up_and_real_data_are_called_what_they_are(llmlaunch: CommandLine) -> None:
    mock = llmlaunch("submit", "real.yaml", "data={mock: true}", "--dry-run").stdout
    assert row(mock, "data") == "MOCK: made-up tokens, on which a model learns nothing"
    real = llmlaunch("submit", QUICKSTART, "--dry-run").stdout
    assert row(real, "data").startswith("real: ")


def test_where_nothing_is_saved_the_dry_run_says_so(llmlaunch: CommandLine) -> None:
    assert row(llmlaunch("submit", "real.yaml", "--dry-run").stdout, "checkpoints").startswith("none: ")
    saving = ("training.checkpoint_path=/ckpt", "training.save_interval=5")
    assert row(llmlaunch("submit", "real.yaml", *saving, "--dry-run").stdout, "checkpoints") == "/ckpt, every 5 steps"


def test_a_dry_run_ends_with_the_command_that_submits(llmlaunch: CommandLine) -> None:
    words = ("submit", QUICKSTART, "training.steps=7", "--dry-run")
    *_, submits, shows = llmlaunch(*words).stdout.splitlines()
    assert shlex.split(submits) == ["Next:", "llmlaunch", "submit", QUICKSTART, "training.steps=7"]
    assert shlex.split(shows) == ["llmlaunch", *words, "--full"]
    full = llmlaunch(*words, "--full").stdout
    assert "===== job.sbatch\n#!" in full
    assert full.splitlines()[-1] == submits
    assert "Next:" not in llmlaunch(*words, "--json").stdout


def test_the_scripts_belong_to_a_dry_run(llmlaunch: CommandLine) -> None:
    assert "write --dry-run --full" in llmlaunch("submit", QUICKSTART, "--full", code=2).stderr


def test_submit_says_what_it_submitted_where_it_lies_and_how_to_look(llmlaunch: CommandLine, folder: Path) -> None:
    out, err = llmlaunch("submit", QUICKSTART, "cluster=cpu-x1", "-o", "runs/mine")
    assert_fits(out)
    assert out.splitlines()[0] == "SLURM took quickstart as job 101."
    assert row(out, "run folder") == "runs/mine"
    assert "Next: llmlaunch status --watch runs/mine" in out
    assert "101" not in err
    shown: dict[str, Any] = llmlaunch.json("submit", QUICKSTART, "cluster=cpu-x1", "-o", "runs/other")
    assert shown["run_dir"] == str(folder / "runs" / "other")


def test_several_runs_are_counted_and_named_by_their_folder(llmlaunch: CommandLine) -> None:
    out = llmlaunch("submit", QUICKSTART, "cluster=cpu-x1", "training.steps=10,20", "-o", "runs/s").stdout
    assert out.splitlines()[0] == "2 runs submitted below runs/s"
    assert "Next: llmlaunch runs" in out
