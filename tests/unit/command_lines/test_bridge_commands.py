"""Commands that start recipes of Megatron-Bridge: by their names, or from a Python script."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.command_lines.command import Reading, TrainerCommand
from llmlaunch.documents.yaml_strict import Document
from llmlaunch.errors import NoVerdict, UserError
from llmlaunch.frameworks.bridge.command_line import read_bridge
from llmlaunch.frameworks.bridge.recipe_fields import UNREAD, FieldsReader, PythonModule, flat
from llmlaunch.frameworks.bridge.settings import settings_of
from llmlaunch.frameworks.megatron.command_line import pinned_layout, with_stand_ins
from llmlaunch.recipe.load import recipe_from

RUNNER = "/bridge/scripts/training/run_recipe.py"


def read(words: str, trainer: str = RUNNER, nodes: int = 2, **about: Any) -> Reading:
    return read_bridge(TrainerCommand(trainer, tuple(shlex.split(words)), nodes=nodes, devices_per_node=8, **about))


def test_a_recipe_by_its_name_has_bridges_values() -> None:
    document = read("--recipe llama3_8b_pretrain_config").document
    assert document["model"] == {"base": "llama3-8b", "vocab_size": 32000}  # made-up tokens of Bridge's own
    assert document["backend"] == {"name": "megatron-bridge"}
    training, layout = document["training"], document["layout"]
    assert (training["sequence_length"], training["global_batch_size"], training["steps"]) == (8192, 512, 1168251)
    assert (training["precision"], training["learning_rate"]) == ("bf16", 3.0e-4)
    assert (layout["tensor"], layout["context"], layout["micro_batch_size"], layout["loss"]) == (1, 2, 1, "te")


def test_overrides_and_options_go_over_the_recipe() -> None:
    words = (
        "--model llama3_70b --mode sft -tp 8 -gb 64 model.pipeline_model_parallel_size=4 -pp 2 dataset.seq_length=4096"
    )
    document = read(words, nodes=4).document
    assert (document["layout"]["tensor"], document["layout"]["pipeline"]) == (8, 4)
    assert (document["training"]["global_batch_size"], document["training"]["sequence_length"]) == (64, 4096)


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("model.recompute_granularity=full model.recompute_num_layers=1", "layout", "recompute", "full"),
        ("mixed_precision=bf16_with_fp8_current_scaling_mixed", "training", "fp8", "tensorwise"),
        ("dist.use_megatron_fsdp=1 ddp.data_parallel_sharding_strategy=optim_grads_params", "layout", "zero_stage", 3),
        ("comm_overlap.overlap_grad_reduce=false model.sequence_parallel=true", "layout", "sequence_parallel", False),
        ("optimizer.optimizer_cpu_offload=true", "layout", "offload_optimizer", 1.0),
        ("+model.cross_entropy_fusion_impl=native", "layout", "loss", "native"),
        ("checkpoint.save=/ckpt checkpoint.save_interval=100", "training", "checkpoint_path", "/ckpt"),
        ("logger.wandb_project=mine", "tracking", "wandb", {"project": "mine"}),
    ],
)
def test_an_override_is_read_as_the_table_of_flags_has_it(override: str, section: str, key: str, value: object) -> None:
    assert read(f"--recipe llama3_8b_pretrain_config {override}").document[section][key] == value


def test_what_no_key_says_is_passed_on_as_bridge_has_it() -> None:
    reading = read(
        "--recipe llama3_8b_pretrain_config model.of_nobody=3 model.deallocate_pipeline_outputs=false dataset.nobody=1"
    )
    extra = reading.document["backend"]["extra_args"]
    assert extra == ["model.of_nobody=3", "model.deallocate_pipeline_outputs=false"]
    assert [each.words for each in reading.unread] == [("dataset.nobody=1",)]


def test_what_is_read_is_rendered_with_the_same_fields() -> None:
    words = "model.tensor_model_parallel_size=4 model.sequence_parallel=true model.pipeline_model_parallel_size=2"
    reading = read(f"--recipe llama3_70b_pretrain_config {words} train.micro_batch_size=2")
    recipe = recipe_from(Document("the recipe", "", with_stand_ins(reading, 16), {}, {}))
    settings = {name: value for name, (value, _) in settings_of(recipe, pinned_layout(recipe)).items()}
    for word in (*words.split(), "train.micro_batch_size=2"):
        name, _, value = word.partition("=")
        assert str(settings[name]).lower() == value, name


def test_adapters_of_bridge_are_read() -> None:
    training = read("--recipe llama3_8b_peft_config peft.dim=8").document["training"]
    assert training["adapters"] == {"rank": 8}


def test_a_performance_recipe_keeps_the_samples_of_a_rank() -> None:
    one, two = (
        read("--recipe llama3_8b_pretrain_8gpu_h100_bf16_config", nodes=nodes).document["training"] for nodes in (1, 2)
    )
    assert (one["global_batch_size"], two["global_batch_size"]) == (128, 256)
    assert "optimizer" in one  # the narrow optimizer


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--recipe lama3_8b_pretrain_config", "lama3_8b_pretrain_config is not known; the nearest that are known"),
        ("--recipe llama3_8b_peft_config peft.class=dora", "dora is not priced"),
        ("--recipe llama3_8b_pretrain_config mixed_precision=nonsense", "'nonsense' is none that is known"),
        ("--recipe llama3_8b_pretrain_config model=mine", "replaces a whole section"),
        ("--recipe llama3_8b_pretrain_config model.freeze_language_model=true", "its memory is not known"),
    ],
)
def test_what_is_not_known_gets_no_verdict(words: str, said: str) -> None:
    with pytest.raises(NoVerdict, match=said):
        read(words)


def test_data_of_a_persons_own_and_its_weights_are_read() -> None:
    data = read("--recipe llama3_8b_pretrain_config dataset.blend=[[/a,/b],[1,3]]").document["data"]
    assert data["blend"] == [{"path": "/a", "weight": 1.0}, {"path": "/b", "weight": 3.0}]
    assert read("--recipe llama3_8b_pretrain_config dataset.data_path=/d").document["data"]["path"] == "/d"


def test_adapters_and_overlap_can_be_switched_off_whole() -> None:
    document = read("--recipe llama3_8b_peft_config peft=null").document
    assert "adapters" not in document["training"]
    words = "--recipe gpt3_175b_pretrain_config"
    assert read(words, nodes=16).document["layout"]["tp_comm_overlap"] is True
    assert "tp_comm_overlap" not in read(f"{words} comm_overlap=null", nodes=16).document["layout"]


@pytest.mark.parametrize("field", ["model.tensor_model_parallel_size", "peft.dim", "optimizer.lr", "dataset.blend"])
def test_an_odd_value_is_one_message_or_a_plain_reading(field: str) -> None:
    for value in ("abc", "1e999", "[[1]]", "-3", "999999999999999999999", "''", "true"):
        with contextlib.suppress(UserError):
            read(f"--recipe llama3_8b_peft_1gpu_h100_bf16_config {field}={value}")


def test_an_override_without_a_value_is_asked_for() -> None:
    with pytest.raises(UserError, match=r"TP.* has no value in the script"):
        read("--recipe llama3_8b_pretrain_config model.tensor_model_parallel_size=${TP}")


SCRIPT = """
from megatron.bridge.recipes.llama import llama3_8b_pretrain_config
from megatron.bridge.training.pretrain import pretrain
LENGTH = 4096

def main() -> None:
    cfg = llama3_8b_pretrain_config()
    cfg.model.tensor_model_parallel_size = 4
    cfg.model.seq_length = cfg.dataset.seq_length = LENGTH * 2
    cfg.train.global_batch_size = 64
    pretrain(cfg, forward_step)

if __name__ == "__main__":
    main()
"""


def test_a_script_that_calls_a_recipe_is_read_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("LENGTH = 4096", "LENGTH = 2048"), "utf-8")
    document = read("train.train_iters=10", "train.py", folder=tmp_path).document
    training = document["training"]
    assert (training["sequence_length"], training["global_batch_size"], training["steps"]) == (4096, 64, 10)
    assert document["layout"]["tensor"] == 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SCRIPT.replace("= 4\n", "= args.tensor\n"), "model.tensor_model_parallel_size: the value is no literal"),
        ("from megatron.bridge import x\nprint(x)", "fills no ConfigContainer"),
        ("def broken(:", "is no Python that can be read"),
        ("x = " + "(" * 5000, "is no Python that can be read"),
    ],
)
def test_a_script_that_cannot_be_read_gets_no_verdict(text: str, said: str) -> None:
    with pytest.raises(NoVerdict, match=said):
        read("", "train.py", files={"train.py": text})


def test_a_script_that_calls_itself_ends() -> None:
    source = PythonModule.of("def f():\n    g()\n    return f()\ndef g():\n    f(); f(); f()\n    return f()")
    assert FieldsReader().call(source, "f") == UNREAD


def test_a_recipe_of_its_own_is_followed_through_its_functions() -> None:
    text = (
        "def base(tp: int = 2):\n    cfg = ConfigContainer(train=TrainingConfig(micro_batch_size=3))\n"
        "    cfg.model.tensor_model_parallel_size = tp\n    return cfg\n"
        "def mine():\n    cfg = base(tp=4 * 2)\n    if cfg.train is not None:\n"
        "        cfg.train.global_batch_size = 32\n    return cfg\n"
    )
    fields = flat(FieldsReader().call(PythonModule.of(text), "mine"))
    assert fields["model.tensor_model_parallel_size"] == 8
    assert (fields["train.micro_batch_size"], fields["train.global_batch_size"]) == (3, 32)
