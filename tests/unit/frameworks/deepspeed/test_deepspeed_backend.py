"""What is rendered for DeepSpeed says what the plan says, leaves nothing to chance, and refuses what cannot run."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from llmlaunch.errors import UserError
from llmlaunch.frameworks.base import Rendered
from llmlaunch.frameworks.deepspeed.backend import DeepSpeed
from llmlaunch.frameworks.deepspeed.rules import RULES
from llmlaunch.layout import RECOMPUTE_FULL, Layout
from llmlaunch.trainers import TRAINER, TRAINER_MODULES
from support.backend_output import ds_config, refused_by, render, value_of, words_of
from support.recipes import recipe_of

GPU_RECIPE, CPU_RECIPE = "llama2-7b-deepspeed", "quickstart"
GPU_LAYOUT = Layout(data=16, micro_batch_size=2, zero_stage=3)
CPU_LAYOUT = Layout(data=2, micro_batch_size=2, zero_stage=1)
SAVING = ("training.save_interval=10", "training.checkpoint_path=/ckpt")


def on_gpus(*overrides: str) -> Rendered:
    return render(recipe_of(GPU_RECIPE, *overrides), GPU_LAYOUT)


def on_cpus(*overrides: str) -> Rendered:
    return render(recipe_of(CPU_RECIPE, *overrides), CPU_LAYOUT)


def cpu_words(*overrides: str) -> list[str]:
    return words_of(recipe_of(CPU_RECIPE, *overrides), CPU_LAYOUT)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_buckets_are_never_larger_than_the_model_and_the_estimate_counts_them(stage: int) -> None:
    recipe = recipe_of(CPU_RECIPE)
    small = ds_config(recipe, replace(CPU_LAYOUT, zero_stage=stage))["zero_optimization"]
    assert small["stage"] == stage
    assert 1_000_000 <= small["reduce_bucket_size"] <= 8_600_000
    facts = DeepSpeed().facts(recipe)
    assert facts.zero.bucket_bytes >= small["reduce_bucket_size"] * facts.states.parameter_bytes


def test_gradients_of_bf16_that_accumulate_in_fp32_are_counted() -> None:
    wide = recipe_of(GPU_RECIPE, "training.gradient_dtype=fp32")
    gradient_life = DeepSpeed().facts(wide).zero.gradient_life
    assert gradient_life is not None
    assert gradient_life.lasting_sharded[3] == 4.0  # ZeRO 3, bytes per parameter
    assert "gradients-fp32-zero" in {rule.key for rule in DeepSpeed().rules(wide)}


def test_the_script_is_started_from_the_run_directory_with_the_plan() -> None:
    words = words_of(recipe_of(CPU_RECIPE), replace(CPU_LAYOUT, recompute=RECOMPUTE_FULL))
    assert words[0] == "$LLMLAUNCH_RUN_DIR/trainer/train.py"
    assert value_of(words, "--data") == "python-source"
    assert value_of(words, "--steps") == "20"
    assert value_of(words, "--sequence-length") == "128"
    assert "--gradient-checkpointing" in words
    assert words[-3:] == ["--deepspeed", "--deepspeed_config", "$LLMLAUNCH_RUN_DIR/ds_config.json"]
    assert "--gradient-checkpointing" not in cpu_words()


def test_the_trainer_travels_with_the_run_and_knows_every_word_it_is_given() -> None:
    result = on_cpus(*SAVING)
    assert result.files["trainer/train.py"] == TRAINER.read_bytes()
    shipped = {f"trainer/{path.name}": path.read_bytes() for path in TRAINER_MODULES}
    assert {name: content for name, content in result.files.items() if name.endswith(".py")} == shipped
    rows = "data={path: /r, format: chat, tokenizer: /t, packed: true, chat_template: /c, validation: /v}"
    kept = "training.evaluation={interval: 20, iterations: 3, patience: 4, keep_best: true}"
    adapted = ("training.adapters={rank: 4, base: nf4}", "training.start_from=/w")
    words = cpu_words(*SAVING, rows, kept, *adapted, "training.learning_rate=1.0e-4")
    flags = [word for word in (*cpu_words(*SAVING), *words) if word.startswith("--")]
    script = b"".join(shipped.values())
    assert all(f'"{flag}"'.encode() in script for flag in flags), flags


def test_the_trainer_imports_nothing_of_llmlaunch_and_runs_on_python_3_9() -> None:
    trees = [ast.parse(path.read_text("utf-8"), feature_version=(3, 9)) for path in TRAINER_MODULES]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    roots = {name.split(".")[0] for name in names} - {path.stem for path in TRAINER_MODULES}
    training = {
        "torch",
        "deepspeed",
        "transformers",
        "peft",
        "safetensors",
        "numpy",
        "datasets",
        "jinja2",
        "bitsandbytes",
    }
    assert roots - set(sys.stdlib_module_names) == training


def test_checkpoints_are_written_and_weights_read_only_where_asked() -> None:
    words = cpu_words(*SAVING)
    assert (value_of(words, "--save"), value_of(words, "--save-interval")) == ("/ckpt", "10")
    assert value_of(cpu_words("training.start_from=/weights/llama"), "--weights") == "/weights/llama"
    assert not {"--save", "--weights"} & set(cpu_words())


def test_an_evaluation_reads_a_share_or_data_of_its_own() -> None:
    evaluation = "training.evaluation={interval: 20, iterations: 3}"
    share = cpu_words(evaluation, "data={path: /text}")
    assert value_of(share, "--split") == "99,1,0"
    assert (value_of(share, "--evaluation-interval"), value_of(share, "--evaluation-iterations")) == ("20", "3")
    other = cpu_words(evaluation, "data={path: /text, validation: /other}")
    assert value_of(other, "--validation-data") == "/other"
    assert not {"--split", "--evaluation-interval"} & set(cpu_words("data={path: /text}"))
    assert "--split" not in other


def test_rows_are_named_with_their_format_and_how_they_are_laid_out() -> None:
    plain = cpu_words("data={path: org/answers, format: chat, tokenizer: /t}")
    assert (value_of(plain, "--data"), value_of(plain, "--format")) == ("org/answers", "chat")
    assert not {"--packed", "--chat-template", "--split"} & set(plain)
    laid_out = "data={path: /rows, format: chat, tokenizer: /t, packed: true, chat_template: /c, validation: org/other}"
    words = cpu_words(laid_out, "training.evaluation={interval: 20, iterations: 3}")
    assert "--packed" in words
    assert (value_of(words, "--chat-template"), value_of(words, "--validation-data")) == ("/c", "org/other")


def test_rows_of_a_file_are_split_and_those_of_a_folder_may_have_a_part_for_validation() -> None:
    evaluation = "training.evaluation={interval: 20, iterations: 3}"
    file, folder, hub = (
        cpu_words(evaluation, f"data={{path: {path}, format: chat, tokenizer: /t}}")
        for path in ("/rows.jsonl", "/rows", "org/rows")
    )
    assert value_of(file, "--split") == "99,1,0"
    assert not {"--split", "--validation-data"} & {*folder, *hub}


def test_what_becomes_of_the_trained_model_is_said() -> None:
    rows = ("data={path: /rows, format: chat, tokenizer: /t}", "training.learning_rate=1.0e-5")
    kept = "training.evaluation={interval: 20, iterations: 3, patience: 4, keep_best: true}"
    words = cpu_words(*rows, *SAVING, kept, "training.export=/models/tuned")
    assert [value_of(words, flag) for flag in ("--patience", "--export", "--samples", "--sample-tokens")] == [
        *("4", "/models/tuned", "3", "128")
    ]
    assert "--keep-best" in words
    assert "--keep-adapters-apart" not in words
    apart = cpu_words(*rows, "training.adapters={rank: 4}", "training.export={path: /e, merge_adapters: false}")
    assert "--keep-adapters-apart" in apart
    none = {*cpu_words(*rows, "training.samples=0"), *cpu_words()}
    assert not {"--samples", "--export", "--patience", "--keep-best"} & none


def test_an_export_is_announced_and_may_take_its_time() -> None:
    exporting = on_cpus("training.export=/e").progress.slow_patterns
    assert any(re.search(pattern, "exporting step 20") for pattern in exporting)
    assert exporting[:-1] == on_cpus().progress.slow_patterns


def test_a_script_of_ones_own_gets_the_config_and_nothing_else() -> None:
    own = "backend={name: deepspeed, script: /home/me/train.py, script_args: [--epochs, '3']}"
    recipe = recipe_of(GPU_RECIPE, own, "model=gpt3-175b", "training.sequence_length=2048")
    config = ["--deepspeed", "--deepspeed_config", "$LLMLAUNCH_RUN_DIR/ds_config.json"]
    assert words_of(recipe, GPU_LAYOUT) == ["/home/me/train.py", "--epochs", "3", *config]
    assert set(render(recipe, GPU_LAYOUT).files) == {"ds_config.json"}


def test_extra_arguments_pass_through_unless_they_are_planned() -> None:
    passed = on_gpus("backend={name: deepspeed, extra_args: [--mine, '1']}")
    assert passed.program[-2:] == ("--mine", "1")
    with pytest.raises(UserError, match="--seed is planned"):
        on_gpus("backend={name: deepspeed, extra_args: [--seed=7]}")


def test_on_a_cpu_the_environment_makes_resident_memory_faithful() -> None:
    environment = on_cpus().environment
    assert environment["DS_ACCELERATOR"] == "cpu"
    assert int(environment["MALLOC_MMAP_THRESHOLD_"]) <= 131072
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment
    assert on_gpus().environment["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


def test_the_recipes_environment_wins_unless_it_contradicts() -> None:
    assert on_cpus("environment.OMP_NUM_THREADS='4'").environment["OMP_NUM_THREADS"] == "4"
    with pytest.raises(UserError, match=r"environment\.DS_ACCELERATOR: is 'cuda'.*'cpu'"):
        on_cpus("environment.DS_ACCELERATOR=cuda")


def test_on_a_cpu_nothing_of_a_gpu_is_counted() -> None:
    facts = DeepSpeed().facts(recipe_of(CPU_RECIPE))
    assert (facts.allocator.workspace_bytes, facts.exchange.communicator_bytes) == (0.0, 0.0)
    assert facts.allocator.context_bytes > 300e6  # the idle trainer


def test_fp16_is_for_gpus() -> None:
    fp16 = "training.precision=fp16"
    assert refused_by(recipe_of(CPU_RECIPE, fp16), CPU_LAYOUT, RULES) == {"fp16-needs-gpu"}
    assert refused_by(recipe_of(GPU_RECIPE, fp16), GPU_LAYOUT, RULES) == set()


def test_the_same_inputs_give_the_same_bytes_and_rendering_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert on_gpus() == on_gpus()
    assert list(tmp_path.iterdir()) == []
