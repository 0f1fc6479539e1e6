"""`llmlaunch doctor --rehearsal`: where ranks are traced and in which versions, or how to get there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from llmlaunch.cli.doctor import doctor_command
from llmlaunch.errors import UserError
from llmlaunch.rehearsal import place


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(doctor_command, ["--rehearsal", *arguments], standalone_mode=False)


@pytest.fixture
def nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Neither a checkout's environment nor the person's own."""
    monkeypatch.setattr(place, "CHECKOUT", tmp_path / "checkout")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv(place.VARIABLE, raising=False)
    return tmp_path / "llmlaunch" / "frameworks"


@pytest.fixture
def installed(nothing: Path) -> Path:
    metadata = nothing / "lib" / "python3.11" / "site-packages" / "megatron_core-0.19.2.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.19.2\n")
    (nothing / "bin").mkdir()
    (nothing / "bin" / "python").touch()
    (nothing / ".installed").touch()
    return nothing


def test_where_there_is_nothing_it_says_how_to_get_it(nothing: Path) -> None:
    assert "--install-frameworks" in doctor().output
    assert json.loads(doctor("--json").output) == {"folder": None, "versions": {}}


def test_half_an_installation_is_nothing(installed: Path) -> None:
    (installed / ".installed").unlink()
    assert "nothing to trace ranks with" in doctor().output


def test_it_says_where_and_in_which_versions(installed: Path) -> None:
    assert f"{installed}: megatron-core 0.19.2" in doctor().output
    assert json.loads(doctor("--json").output) == {"folder": str(installed), "versions": {"megatron-core": "0.19.2"}}


def test_it_looks_at_one_thing_at_a_time() -> None:
    answer = doctor("--network")
    assert isinstance(answer.exception, UserError)
    assert "--rehearsal" in str(answer.exception)
