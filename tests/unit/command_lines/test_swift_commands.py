"""Commands of Megatron-SWIFT become the recipe of the same job."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from llmlaunch.command_lines.command import Reading, TrainerCommand
from llmlaunch.errors import NoVerdict
from llmlaunch.frameworks.deepspeed.command_line import read_deepspeed
from llmlaunch.frameworks.megatron.swift import read_megatron_swift

DENSE = (
    "sft --model Qwen/Qwen2.5-7B --dataset rows.jsonl#500 --tensor_model_parallel_size 2 --sequence_parallel true "
    "--micro_batch_size 4 --global_batch_size 16 --max_length 2048 --train_iters 100 --save_safetensors true"
)


def read(words: str, nodes: int = 1) -> Reading:
    return read_megatron_swift(TrainerCommand("megatron", tuple(shlex.split(words)), nodes=nodes, devices_per_node=8))


def test_sizes_come_from_the_model_and_the_rest_from_the_arguments() -> None:
    reading = read(DENSE)
    document = reading.document
    assert document["model"] == "qwen2.5-7b"
    training, layout = document["training"], document["layout"]
    assert (training["sequence_length"], training["global_batch_size"], training["steps"]) == (2048, 16, 100)
    assert (layout["tensor"], layout["sequence_parallel"], layout["micro_batch_size"]) == (2, True, 4)
    assert reading.not_rendered is not None
    assert [sentence.partition(":")[0] for sentence in reading.missing] == ["data"]


def test_what_swift_assumes_is_not_what_megatron_assumes() -> None:
    document = read(DENSE).document
    assert document["training"]["precision"] == "bf16"
    assert document["training"]["learning_rate"] == 1.0e-5
    layout = document["layout"]
    assert (layout["zero_stage"], layout["recompute"], layout["loss"]) == (1, "selective", "native")
    assert "extra_args" not in document["backend"]


@pytest.mark.parametrize(
    ("words", "section", "key", "value"),
    [
        ("--recompute_granularity full --recompute_method uniform", "layout", "recompute", "full"),
        ("--recompute_granularity none", "layout", "recompute", "none"),
        ("--use_distributed_optimizer false", "layout", "zero_stage", 0),
        ("--optimizer_cpu_offload true --use_precision_aware_optimizer true", "layout", "offload_optimizer", 1.0),
        ("--torch_dtype float16", "training", "precision", "fp16"),
        ("--pipeline_model_parallel_size 2 --virtual_pipeline_model_parallel_size 2", "layout", "virtual_pipeline", 2),
        ("--packing true --packing_length 8192", "training", "sequence_length", 8192),
        ("--fp8_format hybrid --fp8_recipe tensorwise", "training", "fp8", "tensorwise"),
        ("--save out --save_interval 7", "training", "save_interval", 7),
        ("--output_dir out --save_steps 9", "training", "checkpoint_path", "out"),
        ("--cross_entropy_loss_fusion false", "layout", "loss", None),
    ],
)
def test_each_argument_is_read_as_megatrons(words: str, section: str, key: str, value: object) -> None:
    assert read(f"{DENSE} {words}").document[section].get(key) == value


def test_a_mixture_is_split_over_its_experts() -> None:
    words = DENSE.replace("Qwen/Qwen2.5-7B", "Qwen/Qwen3-30B-A3B") + " --expert_model_parallel_size 4"
    document = read(f"{words} --moe_shared_expert_overlap true --loss_scale ignore_empty_think").document
    assert (document["layout"]["expert"], document["layout"]["expert_tensor"]) == (4, 1)
    assert "expert" not in read(f"{DENSE} --expert_model_parallel_size 1").document["layout"]


def test_adapters_are_trained_by_the_backend_that_has_them() -> None:
    document = read(f"{DENSE} --tuner_type lora --lora_rank 16").document
    assert document["backend"] == "megatron-bridge"
    assert document["training"]["adapters"] == {"rank": 16}
    assert read(f"{DENSE} --train_type lora").document["training"]["adapters"] == {"rank": 8}


def test_an_argument_whose_memory_is_not_known_is_never_dropped() -> None:
    backend = read(f"{DENSE} --freeze_parameters_ratio 0.5 --of_nobody 1 --template qwen --model_name my-bot").document[
        "backend"
    ]
    assert backend["extra_args"] == ["--freeze-parameters-ratio", "0.5", "--of-nobody", "1"]


@pytest.mark.parametrize("words", ["--tuner_type lora_llm", "--task_type embedding"])
def test_what_no_recipe_describes_gets_no_verdict(words: str) -> None:
    with pytest.raises(NoVerdict):
        read(f"{DENSE} {words}")


def test_epochs_have_a_stand_in_and_the_length_is_asked_for() -> None:
    words = DENSE.replace("--train_iters 100", "--num_train_epochs 3").replace("--max_length 2048 ", "")
    reading = read(words)
    assert set(reading.stand_ins) == {"training.steps", "data"}
    assert any(sentence.startswith("training.sequence_length: without --max_length") for sentence in reading.missing)


def test_llama_factory_trains_by_megatron_where_its_environment_says_so() -> None:
    words = (
        "train --model_name_or_path Qwen/Qwen3-30B-A3B --finetuning_type full --cutoff_len 4096 --max_steps 10 "
        "--per_device_train_batch_size 1 --gradient_accumulation_steps 8 --pipeline_model_parallel_size 4 "
        "--expert_model_parallel_size 2 --recompute_granularity full --bf16 --learning_rate 1e-5"
    )
    command = TrainerCommand("llamafactory-cli", tuple(words.split()), nodes=1, devices_per_node=8)
    by_megatron = replace(command, family="LLaMA-Factory", environment={"USE_MCA": "1"})
    document = read_deepspeed(by_megatron).document
    assert (document["backend"], document["model"]) == ("megatron-lm", "qwen3-30b-a3b")
    training, layout = document["training"], document["layout"]
    assert (training["sequence_length"], training["global_batch_size"], training["steps"]) == (4096, 16, 10)
    assert (layout["pipeline"], layout["expert"], layout["recompute"]) == (4, 2, "full")
    assert read_deepspeed(replace(by_megatron, environment={})).kind == "hugging-face"
