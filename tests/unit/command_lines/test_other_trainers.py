"""Commands of trainers that are not read are refused by the trainer's name, with what can be done instead."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.command_lines.command import TrainerCommand
from llmlaunch.command_lines.other_trainers import MEGATRON_DEEPSPEED, other_trainer
from llmlaunch.errors import NoVerdict
from llmlaunch.imports.command import read_command

FACTS = Path(__file__).resolve().parents[2] / "data" / "command_lines" / "megatron_deepspeed"
FORKS = sorted(path.stem for path in FACTS.glob("*.json"))
MODEL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1"


def words_of(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words that the facts of a command line stand for: flag = value, values, or true."""
    for flag, value in arguments.items():
        yield flag
        if value is not True:
            yield from value if isinstance(value, list) else [value]


@pytest.mark.parametrize("name", FORKS)
def test_a_public_command_of_megatron_deepspeed_gets_no_verdict_by_name(name: str) -> None:
    facts = json.loads((FACTS / f"{name}.json").read_text("utf-8"))
    files = {path: json.dumps(values) for path, values in facts.get("files", {}).items()}
    words = tuple(words_of(facts["arguments"]))
    command = TrainerCommand(facts["trainer"], words, launcher=facts["launcher"], files=files, place="train.sh:1")
    with pytest.raises(NoVerdict) as caught:
        read_command(command)
    assert caught.value.exit_code == 5
    assert caught.value.recipe == "train.sh:1"
    assert caught.value.reason == "Megatron-DeepSpeed is not read; `llmlaunch observe --` measures it"


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("pretrain_gpt.py", f"{MODEL} --deepspeed --zero-stage 1"),
        ("pretrain_gpt.py", f"{MODEL} --deepspeed_config=ds.json"),
        ("examples/train.py", f"{MODEL} --deepspeed-activation-checkpointing"),
        ("pretrain_gpt.py", f"{MODEL} --ds-sequence-parallel-size 2"),
        ("/home/me/Megatron-DeepSpeed/pretrain_gpt.py", MODEL),
        ("Megatron-DeepSpeed/pretrain_llama.py", "--yaml-cfg gpt.yaml"),
    ],
)
def test_the_fork_is_known_by_arguments_of_both_frameworks_or_by_its_checkout(program: str, words: str) -> None:
    assert other_trainer(program, words.split()) == MEGATRON_DEEPSPEED


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("pretrain_gpt.py", MODEL),
        ("/home/me/Megatron-LM/pretrain_gpt.py", f"{MODEL} --use-distributed-optimizer"),
        ("train.py", "--deepspeed --deepspeed_config ds.json"),
        ("run_clm.py", "--model_name_or_path m --output_dir o --deepspeed ds.json"),
    ],
)
def test_megatron_lm_and_deepspeed_alone_are_not_taken_for_the_fork(program: str, words: str) -> None:
    assert other_trainer(program, words.split()) is None
