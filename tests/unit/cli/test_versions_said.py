"""check, plan, render and submit say once which version of the framework they take the job to run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.command_line import CommandLine

RECIPE = """\
schema: 1
name: mine
model: llama3-8b
backend: megatron-lm
cluster: h100-80gb-x8
nodes: 4
training: {sequence_length: 8192, global_batch_size: 512, steps: 10}
data: {mock: true}
layout: {tensor: 1, pipeline: 1, context: 1, micro_batch_size: 1}
"""
MAIN = 'MAJOR = 0\nMINOR = 20\nPATCH = 0\nPRE_RELEASE = ""\n'
COMMANDS = (
    ("check",),
    ("plan",),
    ("render", "-o", "out"),
    ("submit", "--dry-run", "--local"),
    ("submit", "training.steps=10,20", "--dry-run", "--local"),
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "package_info.py").write_text(MAIN)
    monkeypatch.setenv("MEGATRON_LM_PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: " ".join(arguments[:2]))
def test_an_unknown_version_is_warned_of_once(llmlaunch: CommandLine, arguments: tuple[str, ...]) -> None:
    done = llmlaunch(arguments[0], "recipe.yaml", *arguments[1:])
    assert done.stderr.count("warning: Megatron core 0.20.0 is none of those llmlaunch knows (0.16, 0.19)") == 1
    assert "0.20.0 is none" not in done.stdout


def test_the_version_is_recorded_with_the_run(llmlaunch: CommandLine, folder: Path) -> None:
    llmlaunch("render", "recipe.yaml", "-o", "out")
    assert json.loads((folder / "out" / "run.json").read_text())["measurement"]["backend_version"] == "0.20.0"
    assert "Assumed: Megatron core 0.20.0, as" in llmlaunch("check", "recipe.yaml").stdout


def test_a_strange_flag_of_ones_own_is_noted_where_the_job_is_rendered(llmlaunch: CommandLine) -> None:
    own = "backend={name: megatron-lm, extra_args: [--of-my-fork]}"
    assert (
        llmlaunch("render", "recipe.yaml", own, "-o", "out").stderr.count(
            "note: backend.extra_args: --of-my-fork is no flag of Megatron core 0.19"
        )
        == 1
    )
