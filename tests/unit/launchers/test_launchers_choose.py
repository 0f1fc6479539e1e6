"""SLURM where there is one, this machine otherwise, and a sentence that says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmlaunch.errors import UserError
from llmlaunch.launchers.base import Submission
from llmlaunch.launchers.choose import choose, launcher_of


@pytest.mark.parametrize(
    ("sbatch", "local", "name", "why"),
    [(True, False, "slurm", "{}/sbatch"), (False, False, "local", "no sbatch"), (True, True, "local", "--local")],
)
def test_slurm_where_there_is_sbatch_and_this_machine_without_or_when_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sbatch: bool, local: bool, name: str, why: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if sbatch:
        (tmp_path / "sbatch").write_text("#!/bin/sh\n")
        (tmp_path / "sbatch").chmod(0o755)
    choice = choose(local=local)
    assert choice.launcher.name == name
    assert why.format(tmp_path) in choice.why


def test_a_submission_finds_its_launcher_again(tmp_path: Path) -> None:
    for name in ("slurm", "local"):
        assert launcher_of(Submission(name, "12", tmp_path, 0.0)).name == name
    with pytest.raises(UserError, match="launcher is 'kubernetes'; one of slurm, local"):
        launcher_of(Submission("kubernetes", "12", tmp_path, 0.0))
