"""Commands of DeepSpeed and of Hugging Face's Trainer: which kind they are, what is told of them, and hostile files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmlaunch.command_lines.command import Reading, TrainerCommand, Unset
from llmlaunch.command_lines.launch import trainer_commands
from llmlaunch.command_lines.shell import read_script
from llmlaunch.command_lines.trainers import trainer_of
from llmlaunch.documents.yaml_strict import Document, parse_document
from llmlaunch.errors import NoVerdict, UserError
from llmlaunch.frameworks.deepspeed.backend import classed_arguments
from llmlaunch.frameworks.deepspeed.command_line import read_deepspeed, read_ds_config, read_training_args
from llmlaunch.frameworks.megatron.command_line import pinned_layout
from llmlaunch.recipe.load import load_recipe, recipe_from

ZERO_3 = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 2}
AUTO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
}
TRAINER = (
    "--model_name_or_path meta-llama/Llama-3.1-8B --per_device_train_batch_size 2 --max_steps 100 --block_size 2048"
)


def read(trainer: str, words: str, **about: Any) -> Reading:
    """Read a command on two nodes of eight devices; files are given as values."""
    files = {name: text if isinstance(text, str) else json.dumps(text) for name, text in about.pop("files", {}).items()}
    place: dict[str, Any] = {"nodes": 2, "devices_per_node": 8, "folder": Path("/nowhere")}
    arguments = tuple(words.split())
    family = trainer_of(trainer, arguments).name
    return read_deepspeed(TrainerCommand(trainer, arguments, files=files, family=family, **{**place, **about}))


def training(reading: Reading) -> dict[str, Any]:
    return dict(reading.document["training"])


def layout(reading: Reading) -> dict[str, Any]:
    return dict(reading.document["layout"])


def test_the_arguments_decide_the_kind() -> None:
    assert read("run_clm.py", TRAINER).kind == "hugging-face"
    assert read("train.py", "--deepspeed --deepspeed_config ds.json", files={"ds.json": ZERO_3}).kind == "deepspeed"
    stages = {**ZERO_3, "zero_optimization": {"stage": 1}, "pipeline": {"stages": 4}}
    pipeline = read("train.py", "--deepspeed_config ds.json", files={"ds.json": stages})
    assert pipeline.document["backend"]["script_kind"] == "pipeline"
    assert layout(pipeline)["pipeline"] == 4


def test_what_the_trainer_assumes_is_written_out() -> None:
    reading = read("run_clm.py", TRAINER + " --deepspeed ds.json --bf16", files={"ds.json": AUTO})
    assert training(reading) == {
        "sequence_length": 2048, "global_batch_size": 32, "steps": 100, "precision": "bf16", "learning_rate": 5.0e-5,
        "learning_rate_decay": "linear", "warmup_steps": 0, "weight_decay": 0.0, "adam_betas": [0.9, 0.999],
        "gradient_clipping": 1.0, "seed": 42, "log_interval": 500,
    }  # fmt: skip
    assert layout(reading)["recompute"] == "none"
    assert layout(reading)["zero_stage"] == 2


def test_trl_and_llama_factory_assume_otherwise() -> None:
    trl = read("sft.py", "--model_name_or_path gpt2 --max_steps 9 --output_dir out --packing")
    assert (training(trl)["learning_rate"], training(trl)["precision"]) == (2.0e-5, "bf16")
    assert layout(trl)["recompute"] == "full"
    factory = read("src/train.py", "--model_name_or_path gpt2 --stage sft --output_dir out --max_steps 9")
    assert training(factory)["adapters"] == {"rank": 8}
    for words, modules in (("q_proj,v_proj", ["q_proj", "v_proj"]), ("qkv_proj o_proj", ["linear_qkv", "o_proj"])):
        script = (
            f"run_clm.py --model_name_or_path gpt2 --max_steps 9 --use_peft --lora_r 4 --lora_target_modules {words}"
        )
        some = read(*script.split(" ", 1))
        assert training(some)["adapters"] == {"rank": 4, "target_modules": modules}
    assert (training(factory)["sequence_length"], layout(factory)["recompute"]) == (2048, "full")


def test_axolotls_file_is_read_and_cannot_be_rendered() -> None:
    values = {
        "base_model": "meta-llama/Llama-3.1-8B", "sequence_len": 4096, "micro_batch_size": 2,
        "gradient_accumulation_steps": 4, "num_epochs": 1, "adapter": "lora", "lora_r": 32, "lr_scheduler": "cosine",
        "learning_rate": 2.0e-4, "bf16": "auto", "gradient_checkpointing": True, "deepspeed": "zero3.json",
        "output_dir": "out", "datasets": [{"path": "a/b"}],
    }  # fmt: skip
    reading = read("axolotl", "train lora.yml", files={"lora.yml": values, "zero3.json": AUTO})
    assert (training(reading)["global_batch_size"], training(reading)["precision"]) == (128, "bf16")
    assert (training(reading)["adapters"], training(reading)["learning_rate_decay"]) == ({"rank": 32}, "cosine")
    assert layout(reading)["micro_batch_size"] == 2
    assert reading.not_rendered is not None
    assert "Axolotl" in reading.not_rendered


def test_a_share_of_steps_becomes_steps_where_their_number_is_known() -> None:
    assert training(read("run_clm.py", TRAINER + " --warmup_ratio 0.03"))["warmup_steps"] == 3
    epochs = read("run_clm.py", TRAINER.replace("--max_steps 100", "--num_train_epochs 2") + " --warmup_ratio 0.03")
    assert "warmup_steps" not in training(epochs)
    assert any(sentence.startswith("training.warmup_steps: ") for sentence in epochs.missing)
    assert any("--num_train_epochs 2" in sentence for sentence in epochs.missing)


def test_epochs_and_a_share_that_warms_up_have_stand_ins() -> None:
    reading = read("run_clm.py", TRAINER.replace("--max_steps 100", "--num_train_epochs 2 --warmup_ratio 0.03"))
    values = {key: stand_in.value for key, stand_in in reading.stand_ins.items()}
    assert values == {"training.steps": 1000, "training.warmup_steps": 30}
    assert values.keys() == {sentence.partition(":")[0] for sentence in reading.missing}


def test_where_file_and_arguments_differ_the_trainer_would_stop_and_the_person_is_told() -> None:
    config = {**AUTO, "gradient_clipping": 0.5, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    reading = read("run_clm.py", TRAINER + " --deepspeed ds.json", files={"ds.json": config})
    told = " ".join(reading.notes)
    assert "gradient_clipping 0.5" in told
    assert "optimizer.params.lr 0.1" in told


def test_a_variable_without_a_value_is_named_with_its_line() -> None:
    words = TRAINER + " --deepspeed ${CONFIG} --train_file ${DATA}"
    reading = read("run_clm.py", words, unset=(Unset("CONFIG", 3), Unset("DATA", 4)))
    assert any("CONFIG (line 3)" in sentence for sentence in reading.missing)
    assert any("DATA (line 4)" in sentence for sentence in reading.missing)
    assert not any("${" in word for word in reading.document["backend"]["script_args"])


def test_without_the_number_of_devices_the_batch_is_missing() -> None:
    reading = read("run_clm.py", TRAINER, nodes=None, devices_per_node=None)
    assert "global_batch_size" not in training(reading)
    assert any(sentence.startswith("training.global_batch_size: 2 x 1 ") for sentence in reading.missing)


def test_secrets_are_left_out() -> None:
    reading = read("run_clm.py", TRAINER + " --hub_token hf_" + "a1B2" * 9)
    assert "hf_" not in json.dumps(dict(reading.document))
    assert any(each.words == ("--hub_token",) for each in reading.unread)


def test_offload_to_nvme_and_settings_of_another_stage_are_told() -> None:
    config = {
        "zero_optimization": {
            "stage": 2,
            "stage3_prefetch_bucket_size": 1,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/local"},
        },
        "train_micro_batch_size_per_gpu": 1,
    }
    reading = read("train.py", "--deepspeed_config ds.json", files={"ds.json": config})
    assert layout(reading)["offload_optimizer"] == 1.0
    assert any("NVMe" in note for note in reading.notes)
    assert {"zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.offload_optimizer.nvme_path"} <= {
        word for each in reading.unread for word in each.words
    }


def test_two_of_the_three_sizes_of_a_batch_decide_the_third() -> None:
    config = {"train_batch_size": 64, "gradient_accumulation_steps": 1}
    reading = read("train.py", "--deepspeed_config ds.json", files={"ds.json": config})
    assert training(reading)["global_batch_size"] == 64
    assert layout(reading)["micro_batch_size"] == 4


def test_a_file_that_the_script_writes_is_found_though_its_name_is_not_known(tmp_path: Path) -> None:
    text = (
        'config="./ds.$SLURM_JOB_ID.json"\n'
        'cat <<EOT > $config\n{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4}\nEOT\n'
        'export CMD="train.py --deepspeed --deepspeed_config $config"\n'
        'srun bash -c "torchrun --nproc_per_node 8 $CMD"\n'
    )
    (command,) = trainer_commands(read_script(text, "job.sh", tmp_path))
    reading = read_deepspeed(command)
    assert layout(reading)["zero_stage"] == 2
    assert layout(reading)["micro_batch_size"] == 4
    assert not any("SLURM_JOB_ID" in sentence for sentence in reading.missing)


def test_a_bare_ds_config_says_what_it_can_and_names_the_rest(tmp_path: Path) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 2.0e-4, "betas": [0.9, 0.98], "weight_decay": 0.05}}
    reading = read_ds_config(json.dumps({**ZERO_3, "gradient_clipping": 1.0, "optimizer": optimizer}), "ds.json")
    missing = {sentence.partition(":")[0] for sentence in reading.missing}
    assert {"model", "nodes", "data", "training.steps", "training.sequence_length"} <= missing
    assert training(reading)["learning_rate"] == 2.0e-4
    place = tmp_path / "recipe.yaml"
    place.write_text(yaml.safe_dump(dict(reading.document), sort_keys=False), "utf-8")
    supplied = ["model=llama3.1-8b", "cluster=h100-80gb-x8", "nodes=1", "data={mock: true}"]
    lengths = ["training.steps=10", "training.sequence_length=2048", "training.global_batch_size=64"]
    recipe = load_recipe(place, [*supplied, *lengths])
    assert recipe.pins["zero_stage"] == 3


def test_a_file_of_arguments_says_what_it_can() -> None:
    values = {"model_name_or_path": "Qwen/Qwen2.5-7B", "max_steps": 10, "max_seq_length": 4096, "bf16": True}
    reading = read_training_args(yaml.safe_dump(values), "args.yaml")
    assert reading.document["model"] == "qwen2.5-7b"
    assert training(reading)["sequence_length"] == 4096
    assert any(sentence.startswith("backend.script: ") for sentence in reading.missing)


def test_accelerates_own_file_says_the_stage() -> None:
    values = {
        "distributed_type": "DEEPSPEED",
        "mixed_precision": "bf16",
        "deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "none"},
    }
    reading = read_training_args(yaml.safe_dump(values), "zero3.yaml")
    assert (layout(reading)["zero_stage"], layout(reading)["offload_optimizer"]) == (3, 1.0)
    assert training(reading)["precision"] == "bf16"


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system [id]", "a: &a [x]\nb: *a", "a: 1\na: 2", "- 1",
        "per_device_train_batch_size: 1.5\nmodel_name_or_path: gpt2", "learning_rate: nan\nmodel_name_or_path: gpt2",
        "max_steps: " + "9" * 100 + "\nmodel_name_or_path: gpt2",
    ],
)  # fmt: skip
def test_a_hostile_file_of_arguments_is_one_message(text: str) -> None:
    with pytest.raises(UserError) as caught:
        read_training_args(text, "args.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        "--deepspeed_config ds.json --zero_stage 9999999999999999999999999",
        "--deepspeed_config", "-- -- --", "--=3", TRAINER + " --lr_scheduler_kwargs {{{{",
        TRAINER + " --output_dir --save_steps 0", TRAINER + " --lora_r -1",
        TRAINER + " --config_overrides n_layer=9999999999999999999",
    ],
)  # fmt: skip
def test_odd_words_make_a_reading_whose_values_are_plain(words: str) -> None:
    reading = read("train.py", words, files={"ds.json": ZERO_3})
    text = yaml.safe_dump(dict(reading.document), sort_keys=False)
    assert parse_document(text, "recipe").value["backend"]["name"] == "deepspeed"


SWIFT = "sft --model Qwen/Qwen2.5-7B-Instruct --max_length 2048 --max_steps 10"


def test_ms_swift_assumes_adapters_recomputation_and_the_format_of_the_weights() -> None:
    reading = read("swift", f"{SWIFT} --deepspeed zero3 --model_name my-bot")
    assert reading.document["model"] == "Qwen/Qwen2.5-7B-Instruct"
    assert (training(reading)["adapters"], training(reading)["precision"]) == ({"rank": 8}, "bf16")
    assert (training(reading)["learning_rate"], training(reading)["weight_decay"]) == (1.0e-4, 0.1)
    assert training(reading)["global_batch_size"] == 16  # as many micro-batches as make 16 sequences
    assert (layout(reading)["zero_stage"], layout(reading)["recompute"]) == (3, "full")
    assert "zero3 is not here; it is taken as ms-swift brings it" in reading.notes


def test_settings_that_ms_swift_takes_as_arguments_go_into_the_file() -> None:
    words = f"{SWIFT} --tuner_type full --deepspeed zero3 --zero_hpz_partition_size 8"
    backend = read("swift", words).document["backend"]
    assert backend["ds_config"]["zero_optimization"]["zero_hpz_partition_size"] == 8
    assert "--zero_hpz_partition_size" not in backend["script_args"]
    tensor = read("swift", f"{SWIFT} --tuner_type full --deepspeed zero2 --deepspeed_autotp_size 4")
    assert layout(tensor)["tensor"] == 4


@pytest.mark.parametrize("name", ["tuner_type", "train_type", "sft_type"])
def test_each_version_of_ms_swift_names_its_tuning_otherwise(name: str) -> None:
    reading = read("swift", f"{SWIFT} --{name} full --torch_dtype float16")
    assert "adapters" not in training(reading)
    assert (training(reading)["precision"], training(reading)["learning_rate"]) == ("fp16", 1.0e-5)


@pytest.mark.parametrize("kind", ["llamapro", "adalora"])
def test_another_tuning_gets_no_verdict(kind: str) -> None:
    with pytest.raises(NoVerdict, match=f"{kind}: its memory is not known"):
        read("swift", f"{SWIFT} --tuner_type {kind}")


@pytest.mark.parametrize(
    ("trainer", "words", "stage"),
    [
        ("trl", "sft --accelerate_config zero2 " + TRAINER, 2),
        ("llamafactory-cli", "train " + TRAINER + " --stage sft --deepspeed examples/deepspeed/ds_z3_config.json", 3),
        ("swift", f"{SWIFT} --deepspeed zero2_offload", 2),
    ],
)
def test_a_configuration_that_a_trainer_brings_is_known(trainer: str, words: str, stage: int) -> None:
    assert layout(read(trainer, words))["zero_stage"] == stage


def test_a_configuration_of_a_persons_own_that_is_not_here_is_not_guessed() -> None:
    for words in (f"{SWIFT} --deepspeed mine.json", f"{SWIFT} --deepspeed zero4"):
        (open_key,) = read("swift", words).undecided
        assert open_key.key == "layout.zero_stage"


def test_a_file_of_arguments_that_is_not_here_gets_no_verdict() -> None:
    with pytest.raises(NoVerdict, match="holds the trainer's arguments"):
        read("axolotl", "train mine.yml")


def test_axolotls_preference_tuning_and_splits_are_not_priced() -> None:
    values = {"base_model": "meta-llama/Llama-3.1-8B", "micro_batch_size": 1, "sequence_len": 512, "max_steps": 5}
    values |= {"gradient_checkpointing": "offload", "rl": "dpo", "sequence_parallel_degree": 4}
    reading = read("axolotl", "train mine.yml", files={"mine.yml": values})
    assert layout(reading)["recompute"] == "full"
    recipe = recipe_from(Document("the recipe", "", {**reading.document, "cluster": "h100-80gb-x8"}, {}, {}))
    assert {each.flag for each in classed_arguments(recipe, pinned_layout(recipe)).deciding} == {
        "--rl",
        "--sequence_parallel_degree",
    }


def test_a_ds_config_is_read_as_deepspeed_reads_it() -> None:
    text = """{ # of mine
        "zero_optimization": {"stage": 3,}, // the third
        "train_micro_batch_size_per_gpu": 2, /* all
        lines */ "wandb": {"group": "a # b, }",},
    }"""
    words = "--deepspeed_config=ds.json --model meta-llama/Llama-3.1-8B --seq_length 2048 --steps 10"
    reading = read("train.py", words, files={"ds.json": text})
    assert (layout(reading)["zero_stage"], layout(reading)["micro_batch_size"]) == (3, 2)
    assert reading.document["backend"]["ds_config"]["wandb"] == {"group": "a # b, }"}


def test_open_instruct_trains_as_its_own_arguments_say() -> None:
    words = "--model_name_or_path meta-llama/Llama-3.1-8B --max_seq_length 4096 --max_train_steps 50 --with_tracking"
    reading = read("open_instruct/finetune.py", f"{words} --use_lora True --checkpointing_steps epoch")
    assert reading.kind == "hugging-face"
    assert (training(reading)["steps"], training(reading)["sequence_length"]) == (50, 4096)
    assert (training(reading)["adapters"], training(reading)["warmup_steps"]) == ({"rank": 64}, 2)
    assert (layout(reading)["micro_batch_size"], layout(reading)["recompute"]) == (8, "none")


def test_a_model_goes_before_a_name_that_is_none() -> None:
    words = "--model Qwen/Qwen2.5-7B-Instruct --model_name my-bot --output_dir out --max_length 512"
    assert read("train.py", words).document["model"] == "Qwen/Qwen2.5-7B-Instruct"


@pytest.mark.parametrize("kind", ["Lion", "OneBitAdam", "SGD"])
def test_another_optimizer_of_a_ds_config_gets_no_verdict(kind: str) -> None:
    settings = {**ZERO_3, "optimizer": {"type": kind, "params": {"lr": 1e-4}}}
    words = "--model meta-llama/Llama-3.1-8B --seq_length 2048 --steps 10 --deepspeed --deepspeed_config ds.json"
    reading = read("train.py", words, files={"ds.json": settings})
    recipe = recipe_from(Document("the recipe", "", {**reading.document, "cluster": "h100-80gb-x8"}, {}, {}))
    deciding = classed_arguments(recipe, pinned_layout(recipe)).deciding
    assert [each.flag for each in deciding] == ["backend.ds_config.optimizer.type"]
