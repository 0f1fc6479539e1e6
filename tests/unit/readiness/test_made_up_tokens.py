"""That a recipe trains on made-up tokens is said once, in yellow on a terminal and plainly elsewhere."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from job_files import checkout

from support.command_line import CommandLine
from support.recipes import recipe_text
from support.soak import in_soak

SAID = "recipe.yaml:8: data.mock: trains on made-up tokens"
YELLOW = "\x1b[33m"
FEW = "{context: 1, micro_batch_size: 1, layers_by_stage: even, techniques: asked}"
CLEARED = "\x1b[K"  # a line that said how far the work is, where it took more than a second


@pytest.fixture(autouse=True)
def megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_LM_PATH", str(checkout(tmp_path / "Megatron-LM")))


def written(folder: Path, **values: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(recipe_text(**values, layout=FEW))
    return path


def on_a_terminal(*arguments: object, **environment: str) -> str:
    """Return what a command writes where its outputs are a terminal."""
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "llmlaunch", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env={**os.environ, **environment})
    os.close(theirs)
    text = b""
    with contextlib.suppress(OSError):  # the terminal's other end is closed
        while part := os.read(ours, 65536):
            text += part
    os.close(ours)
    assert process.wait(timeout=60) == 0
    return text.decode()


def test_check_and_submit_say_it_once_and_name_the_key_to_write(tmp_path: Path, llmlaunch: CommandLine) -> None:
    recipe = written(tmp_path)
    checked, submitted = llmlaunch("check", "-v", recipe), llmlaunch("submit", recipe, "--dry-run")
    for text in (checked.stdout, submitted.stderr):
        assert text.count(SAID) == 1
        assert "write data: {path: ...}" in text
        assert "\x1b" not in text
    assert "made-up" not in checked.stderr
    (row,) = [line for line in llmlaunch("check", recipe).stdout.splitlines() if line.startswith("Data ")]
    assert "made-up tokens (data.mock: true)" in row
    assert "made-up" not in llmlaunch("check", written(tmp_path, data="{path: text}")).stdout


def test_a_script_that_reads_data_of_its_own_is_not_warned_of(tmp_path: Path, llmlaunch: CommandLine) -> None:
    (tmp_path / "train.py").touch()
    recipe = written(tmp_path, backend="{name: deepspeed, script: train.py}")
    result = llmlaunch("check", recipe)
    assert result.stdout
    assert "made-up" not in result.stdout + result.stderr


def test_several_runs_say_it_once(tmp_path: Path, llmlaunch: CommandLine) -> None:
    recipe = written(tmp_path)
    assert llmlaunch("submit", recipe, "training.steps=10,20", "--dry-run").stderr.count(SAID) == 1


def test_a_terminal_shows_it_in_yellow_unless_no_colour_is_wanted(tmp_path: Path) -> None:
    recipe = written(tmp_path)
    for colour in ("", *in_soak("1")):
        text = on_a_terminal("submit", recipe, "--dry-run", NO_COLOR=colour)
        (line,) = [line for line in text.splitlines() if SAID in line]
        assert line.removeprefix(CLEARED).startswith(YELLOW) == (not colour)
