"""Scripts that people publish, typed as they are, get the figure of the same job written by hand, or one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.public_scripts import PublicScript, outcome_of, public_scripts, written_bytes

NOT_YET: dict[str, str] = {
    "alps-llama3-8b": "--main-grads-dtype and --async-save are not read",
    "aws-megatron-deepspeed": "Megatron-DeepSpeed is not recognised by its arguments",
    "axolotl-llama3.1-8b-8bit": "no default number of nodes of its launcher",
    "bridge-llama3-8b-preset": "the table of trainers names a reader that does not exist yet",
    "bridge-llama3-8b-sft": "the table of trainers names a reader that does not exist yet",
    "bridge-llama3.2-1b-pretrain": "the table of trainers names a reader that does not exist yet",
    "bridge-qwen3-8b-sft": "the table of trainers names a reader that does not exist yet",
    "deepspeed-offload-heredoc": "the ds_config.json that the script writes is not found",
    "dschat-sft-zero3": "no default number of nodes of its launcher",
    "finetune-32k-two-heredocs": "a ds_config.json is HJSON, where a comma may end a list",
    "handbook-launch-gemma-7b": "no default number of nodes of its launcher",
    "juwels-7b": "--train-samples 732_421_875 is a whole number for Python's int()",
    "krafton-gpt-124m": "no default number of nodes of its launcher",
    "llamafactory-megatron-qwen3-30b": "LLaMA-Factory's Megatron adapter is read as its Trainer",
    "llamafactory-qlora": "quantization_bit is not read: weights of 4 bits are priced as 16",
    "llamafactory-qwen3-4b-lora": "CUDA_VISIBLE_DEVICES=0 leaves one of two GPUs, and two are priced",
    "lumi-1.7b": "its training is not found",
    "megatron-hybrid-800m": "no default number of nodes of its launcher",
    "swift-deepspeed-hostfile": "zero2 is a configuration that ms-swift brings",
    "swift-full-32b-zero3-liger": "no default number of nodes of its launcher",
    "swift-full-7b-without-deepspeed": "no default number of nodes of its launcher",
    "swift-full-math-1.5b-zero2": "no default number of nodes of its launcher",
    "swift-liger-7b-zero3": "no default number of nodes of its launcher",
    "swift-lora-7b-ddp": "no default number of nodes of its launcher",
    "swift-lora-7b-one-gpu": "no default number of nodes of its launcher",
    "swift-lora-7b-zero2": "no default number of nodes of its launcher",
    "swift-lora-7b-zero3": "no default number of nodes of its launcher",
    "swift-megatron-long-text": "the table of trainers names a reader that does not exist yet",
    "swift-megatron-moonlight-pp2-ep4": "the table of trainers names a reader that does not exist yet",
    "swift-megatron-qwen1.5-moe-pp2-ep4": "the table of trainers names a reader that does not exist yet",
    "swift-megatron-qwen2.5-14b-tp4": "the table of trainers names a reader that does not exist yet",
    "swift-megatron-qwen2.5-72b-offload": "the table of trainers names a reader that does not exist yet",
    "swift-megatron-qwen2.5-7b-lora": "the table of trainers names a reader that does not exist yet",
    "swift-megatron-qwen2.5-7b-pretrain": "the table of trainers names a reader that does not exist yet",
    "swift-megatron-qwen2.5-7b-tp2": "the table of trainers names a reader that does not exist yet",
    "swift-megatron-qwen3-14b-moments": "the table of trainers names a reader that does not exist yet",
    "swift-megatron-qwen3-30b-offload": "the table of trainers names a reader that does not exist yet",
    "swift-megatron-qwen3-30b-two-nodes": "the table of trainers names a reader that does not exist yet",
    "swift-megatron-qwen3-32b-tp8": "the table of trainers names a reader that does not exist yet",
    "swift-megatron-two-nodes": "the table of trainers names a reader that does not exist yet",
    "swift-pretrain-7b-zero3": "no default number of nodes of its launcher",
    "swift-qlora-bnb": "no default number of nodes of its launcher",
    "swift-torchrun-two-nodes-by-hand": "zero2 is a configuration that ms-swift brings",
    "transformers-run-clm-zero3": "no default number of nodes of its launcher",
}
"""Scripts that are not answered right, with the reason. Each must still be wrong, so that the list shrinks."""

MISREAD: frozenset[str] = frozenset(
    {"llamafactory-megatron-qwen3-30b", "llamafactory-qlora", "llamafactory-qwen3-4b-lora"}
)
"""Those of them that get a wrong figure and no word of doubt."""


@pytest.mark.parametrize("script", public_scripts(), ids=lambda script: script.name)
def test_a_public_script_has_its_right_answer(
    script: PublicScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    outcome = outcome_of(script, tmp_path)
    if script.name in NOT_YET:
        assert not outcome.right, f"{script.name} is answered right: take it out of NOT_YET"
    else:
        assert outcome.right, outcome
    assert outcome.misread == (script.name in MISREAD), outcome


def test_the_lists_of_what_is_wrong_name_scripts_that_exist() -> None:
    assert set(NOT_YET) <= {script.name for script in public_scripts()}
    assert set(NOT_YET) >= MISREAD


@pytest.mark.parametrize("script", public_scripts(), ids=lambda script: script.name)
def test_an_answer_names_its_source_and_is_a_refusal_or_a_recipe_with_a_figure(
    script: PublicScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    source = script.answer["source"]
    assert all(source[key] for key in ("repository", "path", "read")), source
    assert ("recipe" in script.answer) != ("refused" in script.answer)
    if "recipe" in script.answer:
        assert written_bytes(script, tmp_path) > 0
