"""`explain-args`, as a person types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmlaunch.assets import asset

SOURCES = Path(__file__).resolve().parents[3] / "wrapper"


def llmlaunch(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    argv = [sys.executable, "-m", "llmlaunch", *words]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs") / "run"
    made = llmlaunch("render", str(asset("recipes", "llama3-8b.yaml")), "-o", str(place))
    assert made.returncode == 0, made.stderr
    return place


def test_it_says_where_each_word_comes_from(run_dir: Path) -> None:
    said = llmlaunch("explain-args", str(run_dir))
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith("program: $MEGATRON_LM_PATH/pretrain_gpt.py\n")
    lines = said.stdout.splitlines()
    (length,) = [line for line in lines if line.startswith("  --seq-length 8192 ")]
    assert length.split("  ")[-1].strip() == "training.sequence_length: 8192 (recipe.yaml:9)"
    assert {"train.sh: arguments", "train.sh: variables", "job.sbatch: directives"} <= set(lines)


def test_one_word_alone_and_as_json(run_dir: Path) -> None:
    said = llmlaunch("explain-args", str(run_dir), "lr", "--json")
    (entry,) = json.loads(said.stdout)["entries"]
    assert entry["name"] == "--lr"
    assert entry["from"][0]["key"] == "training.learning_rate"


def test_mistakes_are_one_line(run_dir: Path, tmp_path: Path) -> None:
    for words, wrong in (
        ((str(run_dir), "no-such-flag"), "no-such-flag: nothing of that name is rendered"),
        ((str(tmp_path),), "holds no arguments.json"),
        ((str(run_dir), "--fallback", "3"), "fallback/3: holds no arguments.json"),
    ):
        said = llmlaunch("explain-args", *words)
        assert said.returncode == 2
        assert wrong in said.stderr
        assert "Traceback" not in said.stderr
