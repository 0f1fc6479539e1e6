"""SLURM where there is one, this machine otherwise, and a sentence that says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmlaunch.errors import UserError
from llmlaunch.launchers.base import Submission
from llmlaunch.launchers.choose import choose, launcher_of


def put_sbatch_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "sbatch").write_text("#!/bin/sh\n")
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_slurm_where_there_is_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_sbatch_on_path(tmp_path, monkeypatch)
    choice = choose(local=False)
    assert choice.launcher.name == "slurm"
    assert str(tmp_path / "sbatch") in choice.why


def test_this_machine_without_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    choice = choose(local=False)
    assert choice.launcher.name == "local"
    assert "no sbatch" in choice.why


def test_this_machine_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_sbatch_on_path(tmp_path, monkeypatch)
    choice = choose(local=True)
    assert choice.launcher.name == "local"
    assert "--local" in choice.why


def test_a_submission_finds_its_launcher_again(tmp_path: Path) -> None:
    for name in ("slurm", "local"):
        assert launcher_of(Submission(name, "12", tmp_path, 0.0)).name == name
    with pytest.raises(UserError, match="launcher is 'kubernetes'; one of slurm, local"):
        launcher_of(Submission("kubernetes", "12", tmp_path, 0.0))
