"""What is named as next fits the state of a run, and is a command that exists."""

from __future__ import annotations

import io
import json
import shlex
import sys
from pathlib import Path

import pytest

from llmlaunch.cli.main import COMMANDS
from llmlaunch.cli.next_steps import Step, run_path, while_it_is
from llmlaunch.cli.output import say_next, say_next_of_table
from llmlaunch.launchers.base import PHASES, JobState
from support.command_line import CommandLine


def commands(steps: list[Step]) -> list[str]:
    return [shlex.split(command)[1] for command, _ in steps]


@pytest.mark.parametrize("phase", PHASES)
def test_each_state_has_a_next_command_that_exists(tmp_path: Path, phase: str) -> None:
    steps = while_it_is(tmp_path, JobState(phase), {})
    assert steps
    assert set(commands(steps)) <= set(COMMANDS)


def test_a_failed_run_shows_the_logs_of_the_node_at_fault_and_goes_on(tmp_path: Path) -> None:
    cause = {"kind": "ecc", "node": "n7", "sick": True}
    logs, *others = while_it_is(tmp_path, JobState("failed"), cause)
    assert shlex.split(logs[0])[1:] == ["logs", str(tmp_path), "--node", "n7", "--tail", "50"]
    assert commands(others) == ["nodes", "resume", "report"]
    assert others[1][1] == "start it again"
    (tmp_path / "run.json").write_text(json.dumps({"checkpoint": {"path": "/ckpt"}}))
    assert while_it_is(tmp_path, JobState("failed"), cause)[2][1] == "go on from the last checkpoint"


def test_a_run_that_goes_on_is_watched_and_one_that_succeeded_has_a_page(tmp_path: Path) -> None:
    assert while_it_is(tmp_path, JobState("running"), {})[0][0].endswith(f"status --watch {tmp_path}")
    assert commands(while_it_is(tmp_path, JobState("succeeded"), {}))[0] == "report"


def test_a_run_below_the_current_folder_is_named_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_path(tmp_path / "runs" / "a") == Path("runs/a")
    assert run_path(tmp_path / "a") == tmp_path / "a"  # a bare name might be another run's
    assert run_path(tmp_path.parent / "b") == tmp_path.parent / "b"


def test_a_screen_names_it_on_stdout_and_a_table_beside_itself_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    say_next(("llmlaunch runs", "all"), ("llmlaunch status", ""))
    assert capsys.readouterr() == ("Next: llmlaunch runs  # all\n      llmlaunch status\n", "")
    say_next_of_table(("llmlaunch runs", ""))
    assert capsys.readouterr() == ("", "")
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", terminal)
    say_next_of_table(("llmlaunch runs", ""))
    assert terminal.getvalue() == ""
    assert capsys.readouterr().err == "Next: llmlaunch runs\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("accuracy",), "llmlaunch submit "),
        (("calibrate",), "llmlaunch submit "),
    ],
    ids=" ".join,
)
def test_an_empty_store_says_what_to_run(llmlaunch: CommandLine, arguments: tuple[str, ...], said: str) -> None:
    out = llmlaunch(*arguments).stdout
    assert "Next: llmlaunch " in out
    assert said in out
    assert "Next:" not in llmlaunch(*arguments, "--json").stdout
