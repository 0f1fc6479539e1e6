"""`llmlaunch init --from`: a script that somebody has becomes a recipe that `check` takes; nothing of it is run."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import sys
from pathlib import Path

import pytest

from llmlaunch.documents.yaml_strict import read_document
from support.command_line import CommandLine

SCRIPT = """#!/bin/bash
#SBATCH --job-name=pretrain
#SBATCH --nodes=2
#SBATCH --gres=gpu:h100:8
#SBATCH --partition=gpu
touch canary
ARGS=(--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
  --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope
  --rotary-base 500000 --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
  --attention-dropout 0 --hidden-dropout 0
  --micro-batch-size 1 --global-batch-size ${GBS:-512} --train-iters $STEPS --lr 3e-4 --bf16 --mock-data
  --tokenizer-type NullTokenizer --vocab-size 128256 --tensor-model-parallel-size 2 --use-distributed-optimizer)
R="--rdzv_backend c10d --rdzv_endpoint n1:29500"
srun bash -c "torchrun --nnodes $SLURM_NNODES --nproc_per_node 8 $R pretrain_gpt.py ${ARGS[*]}" | tee "$(touch canary)"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.sbatch").write_text(SCRIPT)
    return tmp_path


def test_an_sbatch_file_becomes_a_recipe_that_check_takes(llmlaunch: CommandLine, folder: Path) -> None:
    answer = llmlaunch("init", "--from", "job.sbatch", "--set", "STEPS=1000")
    assert answer.stdout == "Next: llmlaunch check pretrain.yaml  # will it fit?\n"
    assert "cluster: h100-80gb-x8 is guessed from h100 of sbatch" in answer.stderr
    assert answer.stderr.endswith("wrote pretrain.yaml, and llmlaunch.schema.json for your editor\n")
    assert sorted(path.name for path in folder.iterdir()) == ["job.sbatch", "llmlaunch.schema.json", "pretrain.yaml"]
    recipe = read_document(Path("pretrain.yaml")).value
    assert (recipe["model"], recipe["nodes"], recipe["cluster"]) == ("llama3-8b", 2, "h100-80gb-x8")
    assert recipe["training"]["steps"] == 1000
    assert recipe["training"]["global_batch_size"] == 512
    assert recipe["layout"]["tensor"] == 2
    assert recipe["slurm"]["partition"] == "gpu"
    for_editors, read_from = Path("pretrain.yaml").read_text().splitlines()[:2]
    assert for_editors == "# yaml-language-server: $schema=llmlaunch.schema.json"
    assert read_from.startswith("# Read from job.sbatch:14 (torchrun pretrain_gpt.py)")
    plan = json.loads(llmlaunch("check", "pretrain.yaml", "--json").stdout)
    assert plan["layout"]["tensor"] == 2


def test_what_the_script_leaves_open_is_named_with_what_to_type(llmlaunch: CommandLine, folder: Path) -> None:
    answer = llmlaunch("init", "--from", "job.sbatch", code=2)
    assert "does not say all that a recipe needs" in answer.stderr
    assert "training.steps" in answer.stderr
    llmlaunch("init", "--from", "job.sbatch", "--set", "training.steps=7", "-o", "mine.yaml")
    assert read_document(Path("mine.yaml")).value["training"]["steps"] == 7


def test_a_missing_cluster_is_named_with_those_there_are(llmlaunch: CommandLine, folder: Path) -> None:
    (folder / "job.sbatch").write_text(SCRIPT.replace("h100:8", "8"))
    answer = llmlaunch("init", "--from", "job.sbatch", "--set", "STEPS=1", code=2)
    assert "--cluster NAME" in answer.stderr
    assert "a100-80gb-x8" in answer.stderr
    llmlaunch("init", "--from", "job.sbatch", "--set", "STEPS=1", "--cluster", "a100-80gb-x8")
    assert read_document(Path("pretrain.yaml")).value["cluster"] == "a100-80gb-x8"


def test_nodes_with_other_devices_than_the_profile_keep_theirs(llmlaunch: CommandLine, folder: Path) -> None:
    text = SCRIPT.replace("h100:8", "h100:4").replace("nproc_per_node 8", "nproc_per_node 4")
    (folder / "job.sbatch").write_text(text)
    llmlaunch("init", "--from", "job.sbatch", "--set", "STEPS=1")
    expected = {"base": "h100-80gb-x8", "devices_per_node": 4}
    assert read_document(Path("pretrain.yaml")).value["cluster"] == expected


def test_arguments_of_the_script_follow_it(llmlaunch: CommandLine, folder: Path) -> None:
    (folder / "job.sbatch").write_text(SCRIPT.replace("$STEPS", "$1"))
    llmlaunch("init", "--from", "job.sbatch", "123")
    assert read_document(Path("pretrain.yaml")).value["training"]["steps"] == 123


def test_settings_files_become_recipes_too(llmlaunch: CommandLine, folder: Path) -> None:
    (folder / "ds_config.json").write_text(
        '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true}, '
        '"zero_optimization": {"stage": 3}}'
    )
    keys = ["model=llama3-8b", "nodes=1", "training.sequence_length=4096", "training.steps=10", "data={mock: true}"]
    settings = [word for key in keys for word in ("--set", key)]
    llmlaunch("init", "--from", "ds_config.json", "--cluster", "h100-80gb-x8", *settings, "-o", "ds.yaml")
    recipe = read_document(Path("ds.yaml")).value
    assert recipe["layout"]["zero_stage"] == 3
    assert recipe["training"]["global_batch_size"] == 64


def test_hostile_text_of_a_script_stays_text_in_the_recipe(llmlaunch: CommandLine, folder: Path) -> None:
    hostile = "!!python/object:os.system {{7*7}}"
    (folder / "job.sbatch").write_text(SCRIPT.replace("--mock-data", f"--mock-data --new-flag '{hostile}'"))
    llmlaunch("init", "--from", "job.sbatch", "--set", "STEPS=1")
    recipe = read_document(Path("pretrain.yaml")).value
    assert recipe["backend"]["extra_args"][-3:] == ["--new-flag", *hostile.split()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cluster", "x"], "--cluster belongs to --from"),
        (["a", "b"], "one NAME"),
        (["--from", "gone.sh"], "gone.sh"),
        (["--from", "empty.sh"], "starts no training"),
        (["--from", "job.sbatch", "--set", "STEPS"], "is not NAME=VALUE"),
    ],
)
def test_a_mistake_is_one_message(llmlaunch: CommandLine, folder: Path, arguments: list[str], message: str) -> None:
    (folder / "empty.sh").write_text("echo hello\n")
    assert message in llmlaunch("init", *arguments, code=2).stderr


def test_a_terminal_is_asked_for_what_has_no_value(folder: Path) -> None:
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-m", "llmlaunch", "init", "--from", "job.sbatch"])
    shown, answered = b"", False
    with contextlib.suppress(OSError):  # the terminal's end
        while piece := os.read(terminal, 4096):
            shown += piece
            if b"$STEPS has no value here" in shown and not answered:
                answered = True
                os.write(terminal, b"77\n")
    assert os.waitpid(child, 0)[1] == 0, shown
    assert read_document(Path("pretrain.yaml")).value["training"]["steps"] == 77
