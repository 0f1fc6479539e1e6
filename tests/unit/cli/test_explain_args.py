"""`explain-args`, as a person types it."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmlaunch.assets import asset
from support.command_line import CommandLine, data_folders, run_llmlaunch


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    run_llmlaunch(folder, "render", asset("recipes", "llama3-8b.yaml"), "-o", "run", code=0, **data_folders(folder))
    return folder / "run"


def test_it_says_where_each_word_comes_from(llmlaunch: CommandLine, run_dir: Path) -> None:
    stdout = llmlaunch("explain-args", run_dir).stdout
    assert stdout.startswith("program: $MEGATRON_LM_PATH/pretrain_gpt.py\n")
    lines = stdout.splitlines()
    (length,) = [line for line in lines if line.startswith("  --seq-length 8192 ")]
    assert length.split("  ")[-1].strip() == "training.sequence_length: 8192 (recipe.yaml:9)"
    assert {"train.sh: arguments", "train.sh: variables", "job.sbatch: directives"} <= set(lines)


def test_one_word_alone_and_as_json(llmlaunch: CommandLine, run_dir: Path) -> None:
    (entry,) = llmlaunch.json("explain-args", run_dir, "lr")["entries"]
    assert entry["name"] == "--lr"
    assert entry["from"][0]["key"] == "training.learning_rate"


def test_mistakes_are_one_line(llmlaunch: CommandLine, run_dir: Path, tmp_path: Path) -> None:
    for arguments, wrong in (
        ((run_dir, "no-such-flag"), "no-such-flag: nothing of that name is rendered"),
        ((tmp_path,), "holds no arguments.json"),
        ((run_dir, "--fallback", "3"), "fallback/3: holds no arguments.json"),
    ):
        assert wrong in llmlaunch("explain-args", *arguments, code=2).stderr
