"""`llmlaunch nodes` and what `submit` makes of it, over a SLURM that answers as told."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.app.submission import exclusion_options
from llmlaunch.cli.output import notify
from support.command_line import CommandLine
from support.store_run_dirs import RunDir

SAID = {"ecc": "uncorrectable ECC error", "file_system": "OSError: [Errno 5] Input/output error"}
SINFO = "n0|train*|idle\nn1|train*|idle\nn2|train*|idle\n"


@pytest.fixture
def slurm(tmp_path: Path, put_commands: Callable[..., Path]) -> Path:
    """Stand-ins for scontrol and sinfo; what sinfo says is in the file that is returned."""
    (tmp_path / "sinfo").write_text(SINFO)
    put_commands(scontrol="echo 'ClusterName             = blue'", sinfo=f"cat {tmp_path / 'sinfo'}")
    return tmp_path / "sinfo"


def failed_on(directory: Path, node: str, cluster: str = "blue", kind: str = "ecc") -> RunDir:
    run = RunDir(directory, nodes=2, run_id=f"run-{node}")
    run.write("attempts/77.0/attempt.json", {"schema": 1, "nodes": ["n0", "n1"], "cluster": cluster})
    run.ranks(exit_code=1)
    run.status(state="failed", exit_code=1)
    cause: dict[str, Any] = {"schema": 1, "kind": kind, "node": node, "rank": None, "line": SAID[kind]}
    run.write(f"attempts/77.0/causes/{node}.json", {**cause, "numbers": {}, "sick": True, "at": time.time() - 60})
    return run


def job(tmp_path: Path, directives: str = "#SBATCH --nodes=2\n") -> Path:
    directory = tmp_path / "next"
    directory.mkdir(exist_ok=True)
    (directory / "job.sbatch").write_text(f"#!/bin/bash\n{directives}")
    return directory


def test_nothing_failed_and_nothing_is_asked_of_slurm(llmlaunch: CommandLine, tmp_path: Path) -> None:
    assert llmlaunch.json("nodes") == {"nodes": [], "suspects": []}
    assert "no node is left out" in llmlaunch("nodes").stderr
    assert "no run has failed on it" in llmlaunch("nodes", "--forgive", "n1", code=2).stderr
    assert exclusion_options(job(tmp_path), notify) == ()


@pytest.mark.usefixtures("slurm")
def test_listed_left_out_and_forgiven(
    llmlaunch: CommandLine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llmlaunch("collect", failed_on(tmp_path / "run", "n1").path)
    out = llmlaunch("nodes").stdout
    assert "n1" in out
    assert "uncorrectable ECC error" in out
    assert exclusion_options(job(tmp_path), notify) == ("--exclude=n1",)
    warning = capsys.readouterr().err
    assert "n1 left out until" in warning
    assert "uncorrectable ECC error (ecc," in warning
    assert "run run-n1)" in warning
    assert "1 failure forgiven" in llmlaunch("nodes", "--forgive", "n1").stderr
    assert exclusion_options(job(tmp_path), notify) == ()
    assert "not forgiven yet" in llmlaunch("nodes", "--forgive", "n1", code=2).stderr


@pytest.mark.usefixtures("slurm")
def test_one_soft_sign_makes_a_suspect_that_is_listed_apart_and_a_second_one_leaves_it_out(
    llmlaunch: CommandLine, tmp_path: Path
) -> None:
    llmlaunch("collect", failed_on(tmp_path / "first", "n1", kind="file_system").path)
    said = llmlaunch("nodes")
    assert "no node is left out" in said.stderr
    assert said.stdout.splitlines()[0].split()[0] == "suspected"
    assert SAID["file_system"] in said.stdout
    assert exclusion_options(job(tmp_path), notify) == ()
    second = failed_on(tmp_path / "second", "n1", kind="file_system")
    (second.path / "run.id").write_text("second\n")
    llmlaunch("collect", second.path)
    assert exclusion_options(job(tmp_path), notify) == ("--exclude=n1",)


def test_not_so_many_that_the_job_could_not_start(
    llmlaunch: CommandLine, tmp_path: Path, slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llmlaunch("collect", failed_on(tmp_path / "run", "n1").path)
    slurm.write_text("n0|train*|idle\nn1|train*|idle\n")
    assert exclusion_options(job(tmp_path), notify) == ()
    assert "n1 would be left out, but too few nodes remain" in capsys.readouterr().err


@pytest.mark.usefixtures("slurm")
def test_a_node_of_another_cluster_is_not_this_ones(llmlaunch: CommandLine, tmp_path: Path) -> None:
    llmlaunch("collect", failed_on(tmp_path / "run", "n1", cluster="red").path)
    assert exclusion_options(job(tmp_path), notify) == ()
    assert llmlaunch.json("nodes", "--cluster", "red")["nodes"][0]["node"] == "n1"


def test_a_slurm_that_does_not_answer_keeps_nobody_from_submitting(
    llmlaunch: CommandLine, tmp_path: Path, slurm: Path, put_commands: Callable[..., Path]
) -> None:
    llmlaunch("collect", failed_on(tmp_path / "run", "n1").path)
    folder = put_commands(sinfo="exit 1")
    assert exclusion_options(job(tmp_path), notify) == ()
    (folder / "scontrol").unlink()
    assert exclusion_options(job(tmp_path), notify) == ()
