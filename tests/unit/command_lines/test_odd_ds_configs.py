"""A ds_config whose keys have any form: it is read, or one message names the key; nothing else is raised."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from llmlaunch.command_lines.command import Reading, TrainerCommand
from llmlaunch.errors import UserError
from llmlaunch.frameworks.deepspeed.backend import DeepSpeed
from llmlaunch.frameworks.deepspeed.command_line import read_deepspeed, read_ds_config, read_training_args
from llmlaunch.frameworks.deepspeed.settings import FORMS, SETTINGS
from llmlaunch.layout import Layout
from support.recipes import recipe_of

CONFIG: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "sequence_parallel_size": 1,
    "bf16": {"enabled": True},
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bfloat16": {"enabled": False},
    "data_types": {"grad_accum_dtype": "fp32"},
    "tensor_parallel": {"autotp_size": 1},
    "pipeline": {"stages": 1},
    "activation_checkpointing": {"cpu_checkpointing": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1, "betas": [0.9, 0.95]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 1e-4, "total_num_steps": 99}},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 5e8,
        "stage3_max_live_parameters": 1e9,
        "prefetch_bucket_size": 1e7,
        "overlap_comm": True,
        "cpu_offload": False,
        "cpu_offload_params": False,
        "offload_optimizer": {"device": "cpu", "ratio": 0.5, "pin_memory": True},
        "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 4},
    },
}
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([10**25, 2**63, -(10**18), 1e300, -0.5, 0.5, 1e18, "auto", "half", "²", "cpu", "", "9" * 400]),
    st.text(max_size=5),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["enabled", "stage", "x"]), inner),
    max_leaves=5,
)


def paths(tree: Any, within: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the path of every key of a tree."""
    if not isinstance(tree, dict):
        return []
    return [path for name, value in tree.items() for path in ((*within, name), *paths(value, (*within, name)))]


def with_value(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(tree)
    within: Any = changed
    for name in path[:-1]:
        within = within.get(name) if isinstance(within, dict) else None
    if isinstance(within, dict):
        within[path[-1]] = value
    return changed


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """CONFIG with up to three keys of any form."""
    config = copy.deepcopy(CONFIG)
    for _ in range(draw(st.integers(1, 3))):
        config = with_value(config, draw(st.sampled_from(PATHS)), draw(VALUES))
    return config


PATHS = [*paths(CONFIG), *(tuple(key.split(".")) for key in FORMS)]
SCRIPTS = {
    "deepspeed": ["--deepspeed_config", "ds.json", "--max_steps", "10", "--max_seq_length", "4096"],
    "trainer": [
        *("--deepspeed", "ds.json", "--output_dir", "/out", "--max_steps", "10", "--bf16", "true"),
        *("--per_device_train_batch_size", "1", "--model_name_or_path", "meta-llama/Llama-2-7b-hf"),
    ],
    "megatron": [
        *("--deepspeed", "--deepspeed_config", "ds.json", "--num-layers", "4", "--hidden-size", "256", "--seq-length"),
        *("512", "--num-attention-heads", "4", "--micro-batch-size", "1", "--global-batch-size", "8", "--train-iters"),
        *("10", "--max-position-embeddings", "512", "--bf16", "--tensor-model-parallel-size", "1"),
    ],
}


def message_of(read: Callable[[], object]) -> str:
    """Return the one message of a reading that is refused, empty where it is not; any other exception is raised."""
    try:
        read()
    except UserError as mistake:
        return str(mistake)
    return ""


def read_script(kind: str, text: str) -> Reading:
    trainer = "pretrain_gpt.py" if kind == "megatron" else "train.py"
    command = TrainerCommand(trainer, tuple(SCRIPTS[kind]), nodes=1, devices_per_node=8, files={"ds.json": text})
    return read_deepspeed(command)


@settings(max_examples=60)
@given(configs())
def test_a_ds_config_alone_is_read_or_one_message_says_why_not(config: dict[str, Any]) -> None:
    assert message_of(lambda: read_ds_config(json.dumps(config)))[:14] in ("", "ds_config.json")


@settings(max_examples=40)
@given(configs(), st.sampled_from(sorted(SCRIPTS)))
def test_a_script_with_it_is_read_or_one_message_says_why_not(config: dict[str, Any], kind: str) -> None:
    message_of(lambda: read_script(kind, json.dumps(config)))


@pytest.mark.parametrize("kind", sorted(SCRIPTS))
def test_the_ordinary_ds_config_is_read(kind: str) -> None:
    assert read_script(kind, json.dumps(CONFIG)).document["layout"]["zero_stage"] == 3


@pytest.mark.parametrize("key", sorted(FORMS))
def test_the_message_names_the_key(key: str) -> None:
    config = with_value(CONFIG, tuple(key.split(".")), ["x", {"y": 1}, 3])
    with pytest.raises(UserError, match=rf"^ds_config\.json: {key}: must be .*; correct it$"):
        read_ds_config(json.dumps(config))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("zero_optimization.offload_optimizer", 1),
        ("zero_optimization.offload_param.device", "gpu"),
        ("zero_optimization.stage", 4), ("zero_optimization.stage", "3"), ("optimizer.params.lr", True),
        ("optimizer.params.betas", [0.9, "x"]), ("train_batch_size", 0), ("train_batch_size", 10**25),
    ],
)  # fmt: skip
def test_a_value_of_another_form_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"^ds_config\.json: {key}: must be "):
        read_ds_config(json.dumps(with_value(CONFIG, tuple(key.split(".")), value)))


@pytest.mark.parametrize(("written", "stage"), [(True, 1), (False, 0), (None, 0)])
def test_zero_as_a_switch_is_what_deepspeed_makes_of_it(written: bool | None, stage: int) -> None:
    read = read_ds_config(json.dumps({**CONFIG, "zero_optimization": written}))
    assert read.document["layout"]["zero_stage"] == stage


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[1, 2]", '{"a": ' * 5000, '{"a": ' + "9" * 5000 + "}", '{"zero_optimization": {"stage": NaN}}'),
        '{"train_batch_size": 1, "train_batch_size": 2}',
    ],
)
def test_what_no_program_writes_is_one_message(text: str) -> None:
    with pytest.raises(UserError, match=r"^ds_config\.json[^\n]{1,400}$"):
        read_ds_config(text)


ACCELERATE: dict[str, Any] = {
    "distributed_type": "DEEPSPEED",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 8,
    "machine_rank": 0,
    "main_process_ip": "a",
    "deepspeed_config": {
        "zero_stage": 3,
        "offload_optimizer_device": "cpu",
        "offload_param_device": "none",
        "gradient_accumulation_steps": 1,
        "zero3_save_16bit_model": True,
        "deepspeed_config_file": "ds.json",
    },
    "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"},
}


@settings(max_examples=40)
@given(st.data())
def test_a_configuration_of_accelerate_is_read_or_one_message_says_why_not(data: st.DataObject) -> None:
    config = copy.deepcopy(ACCELERATE)
    if data.draw(st.booleans()):
        del config["deepspeed_config"]["deepspeed_config_file"]
    for _ in range(data.draw(st.integers(1, 3))):
        config = with_value(config, data.draw(st.sampled_from(paths(ACCELERATE))), data.draw(VALUES))
    files = {"ds.json": json.dumps(CONFIG)}
    message_of(lambda: read_training_args(yaml.safe_dump(config), "zero3.yaml", files=files))


@settings(max_examples=30)
@given(st.data())
def test_arguments_of_the_trainer_in_a_file_are_read_or_one_message_says_why_not(data: st.DataObject) -> None:
    names = (
        *("max_steps", "per_device_train_batch_size", "bf16", "learning_rate", "lr_scheduler_kwargs", "deepspeed"),
        *("model_name_or_path", "cutoff_len", "lora_rank", "warmup_ratio", "save_steps", "num_train_epochs", "fsdp"),
        *("finetuning_type", "lora_target", "gradient_checkpointing", "max_grad_norm", "adam_beta1", "seed"),
    )
    values = data.draw(st.dictionaries(st.sampled_from(names), VALUES))
    message_of(lambda: read_training_args(yaml.safe_dump(values), "args.yaml"))


CHOSEN = sorted(row.key for row in SETTINGS if row.is_rendered and not row.planned)
CHOSEN_PATHS = [tuple(key.split(".")) for key in CHOSEN] + [("zero_optimization",), ("fp16",), ("x", "y")]


@settings(max_examples=40)
@given(st.dictionaries(st.sampled_from(CHOSEN_PATHS), VALUES, min_size=1, max_size=3))
def test_settings_of_a_recipe_are_read_or_one_message_says_why_not(values: dict[tuple[str, ...], Any]) -> None:
    config: dict[str, Any] = {"zero_optimization": {"offload_optimizer": {}, "offload_param": {}}, "fp16": {}, "x": {}}
    for path, value in values.items():
        config = with_value(config, path, value)
    backend = json.dumps({"name": "deepspeed", "ds_config": config})

    def answers() -> None:
        recipe = recipe_of("llama2-7b-deepspeed", f"backend={backend}")
        DeepSpeed().rules(recipe)
        DeepSpeed().facts(recipe)
        DeepSpeed().render(recipe, Layout(data=16, micro_batch_size=1, zero_stage=3))

    message_of(answers)
