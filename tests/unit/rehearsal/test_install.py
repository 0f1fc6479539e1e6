"""Installing what traces a rank: one message for what is missing, and half of it never counts as all."""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from llmlaunch.errors import UserError
from llmlaunch.rehearsal import install as installing
from llmlaunch.rehearsal.install import is_installed, python_of, user_folder, versions_in
from llmlaunch.tracing import FAKE_CUDA, REQUIREMENTS, REQUIREMENTS_NO_DEPS


class Steps:
    """Runs nothing, but makes the folder as venv does. Fails at the step named."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.fails_at, self.commands = folder, "", list[Sequence[str]]()

    def __call__(self, what: str, command: Sequence[str]) -> None:
        self.commands.append(command)
        if what == self.fails_at:
            raise UserError(f"installing {what} failed")
        python_of(self.folder).parent.mkdir(parents=True, exist_ok=True)
        python_of(self.folder).touch()
        (self.folder / "pyvenv.cfg").touch()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "data" / "frameworks"


@pytest.fixture
def steps(place: Path, monkeypatch: pytest.MonkeyPatch) -> Steps:
    steps = Steps(place)
    monkeypatch.setattr(installing, "_run", steps)
    monkeypatch.setattr(installing, "_python", lambda: sys.executable)
    return steps


def install(place: Path, *, mark: bool = True) -> None:
    installing.install(place, lambda line: None, mark=mark)


def test_torch_comes_first_then_the_frameworks_without_what_they_ask_for(
    place: Path, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(installing.TORCH_VARIABLE, "--index-url https://example.org/cpu torch==9")
    install(place)
    venv, torch, beside, frameworks, stand_in = steps.commands
    assert list(venv) == [sys.executable, "-m", "venv", "--clear", str(place)]
    assert torch[-3:] == ["--index-url", "https://example.org/cpu", "torch==9"]
    assert beside[-2:] == ["-r", str(REQUIREMENTS)]
    assert frameworks[-4:] == ["--no-deps", "--ignore-requires-python", "-r", str(REQUIREMENTS_NO_DEPS)]
    assert list(stand_in) == [str(python_of(place)), str(FAKE_CUDA)]
    assert is_installed(place)
    monkeypatch.delenv(installing.TORCH_VARIABLE)
    install(place)
    assert "https://download.pytorch.org/whl/cpu" in steps.commands[6], "a build for the CPU unless told otherwise"


@pytest.mark.parametrize(
    "step", ["torch", "what the frameworks import", "Megatron core and TransformerEngine", "the stand-in for CUDA"]
)
def test_half_of_it_does_not_count_and_the_same_call_begins_again(place: Path, steps: Steps, step: str) -> None:
    install(place)
    steps.fails_at = step
    with pytest.raises(UserError):
        install(place)
    assert not is_installed(place)  # though it was before, and its Python still runs
    steps.fails_at = ""
    install(place)
    assert is_installed(place)


def test_a_folder_that_is_no_environment_is_left_alone_and_two_installations_do_not_mix(
    place: Path, steps: Steps
) -> None:
    place.mkdir(parents=True)
    (place / "thesis.tex").touch()
    with pytest.raises(UserError, match="something else"):
        install(place)
    (place / "thesis.tex").unlink()
    with (place.parent / ".frameworks.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another installation"):
            install(place)
    assert steps.commands == []
    install(place, mark=False)
    assert steps.commands
    assert not is_installed(place), "a caller with more to add marks it itself"


def test_without_a_compiler_one_message_before_anything_is_downloaded(
    place: Path, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match=r"C\+\+ compiler.*apt-get install g\+\+"):
        install(place)
    assert not place.exists()
    assert steps.commands == []


def test_a_python_too_old_says_which_one_is_wanted(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 12, "final", 0))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match=r"Python 3\.11 or newer.*under 3\.10"):
        install(place)


def test_a_step_that_fails_shows_its_last_lines_and_where_torch_may_come_from(place: Path) -> None:
    program = "print('a line'); raise SystemExit('no such package')"
    with pytest.raises(UserError, match=r"(?s)a line.*no such package|no such package.*a line") as failure:
        installing._run("torch", [sys.executable, "-c", program])
    assert installing.TORCH_VARIABLE in str(failure.value)


def test_the_folder_is_one_of_the_users_data() -> None:
    assert user_folder({"HOME": "/home/me"}) == Path("/home/me/.local/share/llmlaunch/frameworks")
    assert user_folder({"HOME": "/home/me", "XDG_DATA_HOME": "/data"}) == Path("/data/llmlaunch/frameworks")
    assert user_folder({"HOME": "/home/me", "XDG_DATA_HOME": "data"}).is_relative_to("/home/me")
    with pytest.raises(UserError, match="HOME"):
        user_folder({})


def test_versions_are_read_without_starting_anything(tmp_path: Path) -> None:
    for name, version in (("torch", "2.13.0+cpu"), ("megatron_core", "0.19.2"), ("numpy", "2.4.6")):
        metadata = tmp_path / "lib" / "python3.11" / "site-packages" / f"{name}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    assert versions_in(tmp_path) == {"torch": "2.13.0+cpu", "megatron-core": "0.19.2"}
    assert versions_in(tmp_path / "nothing") == {}
