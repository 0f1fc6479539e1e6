"""`llmlaunch nodes` and what `submit` makes of it, over a SLURM that answers as told."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.app.excluded_nodes import exclusion_options
from llmlaunch.cli.main import main
from llmlaunch.cli.output import notify
from support.store_run_dirs import RunDir

SINFO = "n0|train*|idle\nn1|train*|idle\nn2|train*|idle\n"
Said = Callable[..., tuple[str, str]]


@pytest.fixture
def llmlaunch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Said:
    def run(*words: str | Path, code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["llmlaunch", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert ended.value.code == code, err
        return out, err

    return run


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for scontrol and sinfo; what sinfo says is in the file that is returned."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (tmp_path / "sinfo").write_text(SINFO)
    scripts = {"scontrol": "echo 'ClusterName             = blue'", "sinfo": f"cat {tmp_path / 'sinfo'}"}
    for name, script in scripts.items():
        (commands / name).write_text(f"#!/bin/sh\n{script}\n")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")
    return tmp_path / "sinfo"


def failed_on(directory: Path, node: str, cluster: str = "blue") -> RunDir:
    run = RunDir(directory, nodes=2, run_id=f"run-{node}")
    run.write("attempts/77.0/attempt.json", {"schema": 1, "nodes": ["n0", "n1"], "cluster": cluster})
    run.ranks(exit_code=1)
    run.status(state="failed", exit_code=1)
    told: dict[str, Any] = {"schema": 1, "kind": "ecc", "node": node, "rank": None, "line": "uncorrectable ECC error"}
    run.write(f"attempts/77.0/causes/{node}.json", {**told, "numbers": {}, "sick": True, "at": time.time() - 60})
    return run


def job(tmp_path: Path, directives: str = "#SBATCH --nodes=2\n") -> Path:
    directory = tmp_path / "next"
    directory.mkdir(exist_ok=True)
    (directory / "job.sbatch").write_text(f"#!/bin/bash\n{directives}")
    return directory


@pytest.mark.usefixtures("own_home")
def test_nothing_failed_and_nothing_is_asked_of_slurm(llmlaunch: Said, tmp_path: Path) -> None:
    assert json.loads(llmlaunch("nodes", "--json")[0]) == {"nodes": []}
    assert "no node is left out" in llmlaunch("nodes")[1]
    assert "no run has failed on it" in llmlaunch("nodes", "--forgive", "n1", code=2)[1]
    assert exclusion_options(job(tmp_path), notify) == ()


@pytest.mark.usefixtures("own_home", "slurm")
def test_listed_left_out_and_forgiven(
    llmlaunch: Said, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    llmlaunch("collect", failed_on(tmp_path / "run", "n1").path)
    out, _ = llmlaunch("nodes")
    assert "n1" in out
    assert "uncorrectable ECC error" in out
    assert exclusion_options(job(tmp_path), notify) == ("--exclude=n1",)
    said = capsys.readouterr().err
    assert "n1 left out until" in said
    assert "uncorrectable ECC error (ecc," in said
    assert "run run-n1)" in said
    assert "1 failure forgiven" in llmlaunch("nodes", "--forgive", "n1")[1]
    assert exclusion_options(job(tmp_path), notify) == ()
    assert "not forgiven yet" in llmlaunch("nodes", "--forgive", "n1", code=2)[1]


@pytest.mark.usefixtures("own_home")
def test_not_so_many_that_the_job_could_not_start(
    llmlaunch: Said, tmp_path: Path, slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llmlaunch("collect", failed_on(tmp_path / "run", "n1").path)
    slurm.write_text("n0|train*|idle\nn1|train*|idle\n")
    assert exclusion_options(job(tmp_path), notify) == ()
    assert "n1 would be left out, but too few nodes remain" in capsys.readouterr().err


@pytest.mark.usefixtures("own_home", "slurm")
def test_a_node_of_another_cluster_is_not_this_ones(llmlaunch: Said, tmp_path: Path) -> None:
    llmlaunch("collect", failed_on(tmp_path / "run", "n1", cluster="red").path)
    assert exclusion_options(job(tmp_path), notify) == ()
    assert json.loads(llmlaunch("nodes", "--cluster", "red", "--json")[0])["nodes"][0]["node"] == "n1"


@pytest.mark.usefixtures("own_home")
def test_a_slurm_that_does_not_answer_keeps_nobody_from_submitting(
    llmlaunch: Said, tmp_path: Path, slurm: Path
) -> None:  # fmt: skip
    llmlaunch("collect", failed_on(tmp_path / "run", "n1").path)
    (slurm.parent / "bin" / "sinfo").write_text("#!/bin/sh\nexit 1\n")
    assert exclusion_options(job(tmp_path), notify) == ()
    (slurm.parent / "bin" / "scontrol").unlink()
    assert exclusion_options(job(tmp_path), notify) == ()
