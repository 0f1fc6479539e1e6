"""`submit` of several runs: all of them or none, each named in what is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.assets import asset
from support.command_line import CommandLine, Output

QUICKSTART = str(asset("recipes", "quickstart.yaml"))
SMALL = ("cluster=cpu-x1",)

SAVES = ("training.save_interval=1",)

Submit = Callable[..., Output]


@pytest.fixture
def submit(
    llmlaunch: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put_commands: Callable[..., Path]
) -> Submit:
    """`llmlaunch submit WORDS` in an empty folder, where sbatch says `Submitted` and counts, and refuses `nowhere`."""
    note = tmp_path / "questions"
    refuses = 'grep -q nowhere job.sbatch && { echo "sbatch: error: no" >&2; exit 1; }'
    put_commands(
        sbatch=f'echo "$PWD $@" >> {note}\n{refuses}\necho $((100 + $(wc -l < {note})))',
        scontrol="echo 'MaxArraySize = 3'",
        scancel=f'echo "cancelled $@" >> {note}',
        **dict.fromkeys(("squeue", "sacct", "sinfo"), ""),
    )
    monkeypatch.chdir(tmp_path)
    return partial(llmlaunch, "submit")


def questions(folder: Path) -> list[str]:
    path = folder / "questions"
    return path.read_text().splitlines() if path.exists() else []


def submissions(folder: Path) -> dict[str, Any]:
    return {path.parent.name: json.loads(path.read_text())["job_id"] for path in folder.glob("s/*/submission.json")}


def test_values_are_runs_of_their_own_in_one_directory(submit: Submit, tmp_path: Path) -> None:
    _, err = submit(QUICKSTART, *SMALL, "training.steps=10,20", "-o", "s")
    assert submissions(tmp_path) == {"0-quickstart": "101", "1-quickstart": "102"}
    described = json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert [run["overrides"][-1] for run in described["runs"]] == ["training.steps=10", "training.steps=20"]
    assert "run 2 of 2" in err
    assert "training.steps=20" in err


def test_a_chain_waits_for_the_one_before(submit: Submit, tmp_path: Path) -> None:
    submit(QUICKSTART, QUICKSTART, *SMALL, "--chain", "--dependency", "singleton", "-o", "s")
    first, second = questions(tmp_path)
    assert "--dependency=singleton" in first
    assert "--dependency=afterok:101 --kill-on-invalid-dep=yes" in second
    assert "singleton" not in second


def test_an_array_is_handed_in_once(submit: Submit, tmp_path: Path) -> None:
    out, _ = submit(QUICKSTART, *SMALL, "training.steps=10,20", "--array", "--array-limit", "1", "-o", "s", "--json")
    assert submissions(tmp_path) == {"0-quickstart": "101_0", "1-quickstart": "101_1"}
    assert [run["job_id"] for run in json.loads(out)["runs"]] == ["101_0", "101_1"]
    (once,) = questions(tmp_path)
    assert once.startswith(f"{tmp_path}/s ")
    assert "#SBATCH --array=0-1%1" in (tmp_path / "s" / "job.sbatch").read_text()


def test_one_that_is_not_safe_keeps_all_from_being_submitted(submit: Submit, tmp_path: Path) -> None:
    _, err = submit(QUICKSTART, *SMALL, "training.sequence_length=128,1000000", "-o", "s", code=3)
    assert "training.sequence_length=1000000: " in err
    assert "None of the 2 was submitted" in err
    assert questions(tmp_path) == []
    assert not (tmp_path / "s").exists()


def test_one_that_slurm_refuses_takes_the_others_back(submit: Submit, tmp_path: Path) -> None:
    _, err = submit(QUICKSTART, *SMALL, "--grid", "slurm.partition=train,nowhere", "-o", "s", code=4)
    assert "the 1 before it were cancelled" in err
    assert questions(tmp_path)[-1] == "cancelled 101"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["training.steps=1,2,3,4", "--array"], r"4 runs, and this cluster takes arrays of 3 tasks"),
        (["nodes=1,2", "--array"], "has --nodes=1 where 1-quickstart has --nodes=2"),
        (["training.steps=1,2", "--array", "--chain"], "choose one"),
        (["training.steps=1,2", "--array-limit", "2"], "add --array"),
        (["training.steps=1", "--array"], "there is one run only"),
        (["training.steps=1", "--chain=afterany"], "there is one run only"),
        (["--dependency", "singleton", "--after", "x"], "choose one"),
        (["--after", "nobody"], "nobody: no such run directory"),
        (["training.steps=1,2", "--local"], "several runs at once need SLURM"),
        (["training.steps=1,2", "model=a,b"], "--grid model=a,b"),
        (["training.steps=1,2", *SAVES, "training.checkpoint_path=/ck"], "training.checkpoint_path=/ck/{run}"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_written(
    submit: Submit, tmp_path: Path, arguments: list[str], why: str
) -> None:
    _, err = submit(QUICKSTART, *SMALL, *arguments, "-o", "s", code=2)
    assert why in err
    assert not (tmp_path / "s").exists()
    assert questions(tmp_path) == []


def test_each_run_side_by_side_has_checkpoints_of_its_own(submit: Submit, tmp_path: Path) -> None:
    submit(QUICKSTART, *SMALL, *SAVES, "training.steps=10,20", "training.checkpoint_path=/ck/{run}", "-o", "s")
    arguments = [run["overrides"] for run in json.loads((tmp_path / "s" / "sweep.json").read_text())["runs"]]
    assert ["training.checkpoint_path=/ck/0" in arguments[0], "training.checkpoint_path=/ck/1" in arguments[1]] == [
        True,
        True,
    ]


def test_a_chain_may_go_on_from_the_checkpoints_of_the_one_before(submit: Submit, tmp_path: Path) -> None:
    submit(QUICKSTART, *SMALL, *SAVES, "training.steps=10,20", "training.checkpoint_path=/ck", "--chain", "-o", "s")
    assert len(submissions(tmp_path)) == 2


def test_a_dry_run_shows_all_and_writes_nothing(submit: Submit, tmp_path: Path) -> None:
    out, err = submit(QUICKSTART, *SMALL, "training.steps=10,20", "--array", "--dry-run", "--full", "-o", "s")
    assert "0-quickstart: " in out
    assert "training.steps=20" in out
    assert "#SBATCH --array=0-1" in out
    assert "2 runs, one array; nothing was written or submitted" in err
    assert "nothing was written or submitted. Jobs go to SLURM" in err
    assert "Submitting" not in err
    short = submit(QUICKSTART, *SMALL, "training.steps=10,20", "--array", "--dry-run", "-o", "s").stdout
    assert "#SBATCH" not in short
    assert short.splitlines()[-1].split()[-2:] == ["s", "--full"]
    shown = json.loads(submit(QUICKSTART, *SMALL, "training.steps=10,20", "--dry-run", "--json").stdout)
    assert [run["plan"]["verdict"] for run in shown["runs"]] == ["safe", "safe"]
    assert not (tmp_path / "s").exists()
    assert questions(tmp_path) == []
