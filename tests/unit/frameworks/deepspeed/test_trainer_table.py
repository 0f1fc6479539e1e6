"""Every row of the table of Hugging Face's arguments: what is written is read again, what a script says is read or
handed on, and the installed transformers has the field."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.command_lines.command import Reading, TrainerCommand
from llmlaunch.frameworks.argument import Word
from llmlaunch.frameworks.classed_arguments import flags_with_values
from llmlaunch.frameworks.deepspeed.backend import DeepSpeed
from llmlaunch.frameworks.deepspeed.command_line import read_deepspeed
from llmlaunch.frameworks.deepspeed.trainer_table import ARGUMENTS, DECAYS, SCHEDULES, TrainerArgument
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_NAMES, Layout
from llmlaunch.recipe.types import Recipe
from support.recipes import recipe_of

INSTALLED = version("transformers")
RENDERED = [row for row in ARGUMENTS if row.is_rendered]
OWN = "backend={name: deepspeed, script: train.py, script_kind: hugging-face}"
OVERRIDES = (
    *((f"training.precision={precision}",) for precision in ("bf16", "fp16", "fp32")),
    *((f"training.learning_rate_decay={decay}",) for decay in SCHEDULES if decay),
    (
        *("training.learning_rate_decay=cosine", "training.minimum_learning_rate=1.0e-6", "training.warmup_steps=7"),
        *("training.adam_betas=[0.8, 0.88]", "training.seed=7", "training.weight_decay=0.25"),
        *("training.gradient_clipping=0.5", "training.log_interval=3"),
    ),
    ("training.checkpoint_path=/checkpoints", "training.save_interval=5", "training.keep_checkpoints=2"),
    ("training.evaluation={interval: 5, iterations: 2}",),
    ("tracking={wandb: {project: ours}, tensorboard: /tb}",),
)
LAYOUTS = (
    Layout(data=16, micro_batch_size=2, zero_stage=3),
    Layout(data=16, zero_stage=1, recompute=RECOMPUTE_FULL),
)
EXAMPLES = {
    "gradient_checkpointing": "True",
    "bf16": "True",
    "fp16": "True",
    "lr_scheduler_kwargs": '{"min_lr": 1e-6}',
    "save_strategy": "steps",
}


@cache
def jobs() -> tuple[tuple[Recipe, Layout], ...]:
    return tuple(product((recipe_of("llama2-7b-deepspeed", OWN, *each) for each in OVERRIDES), LAYOUTS))


def words_of(recipe: Recipe, layout: Layout) -> list[str]:
    """The rendered arguments as words of a shell, with variables of the node as their names."""

    def text(word: Word) -> str:
        return word if isinstance(word, str) else f"/run/{word.name}{word.suffix}"

    return [text(word) for each in DeepSpeed().render(recipe, layout).arguments for word in each.words]


def read(words: list[str], files: Mapping[str, str] | None = None) -> Reading:
    model = ("--model_name_or_path", "meta-llama/Llama-2-7b-hf")
    command = TrainerCommand(
        *("train.py", (*model, *words)),
        nodes=2,
        devices_per_node=8,
        files=files or {},
        folder=Path("/nowhere"),
        place="command.txt:1",
    )
    return read_deepspeed(command)


def value_at(document: Mapping[str, Any], key: str) -> Any:
    section, _, name = key.partition(".")
    return document[section].get(name)


def stated(recipe: Recipe, layout: Layout, key: str) -> Any:
    """The value of a recipe key as a person would write it."""
    section, _, name = key.partition(".")
    if section == "layout":
        return RECOMPUTE_NAMES[layout.recompute] if name == "recompute" else getattr(layout, name)
    if name in ("precision", "global_batch_size"):
        return getattr(recipe.workload, name)
    value = getattr(recipe.training, name)
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("row", RENDERED, ids=lambda row: row.key)
def test_what_a_row_writes_is_read_into_the_same_recipe_key(row: TrainerArgument) -> None:
    written = [(recipe, layout) for recipe, layout in jobs() if row.rendered(recipe, layout)]
    assert written
    for recipe, layout in written:
        config = DeepSpeed().render(recipe, layout).files["ds_config.json"].decode()
        words = words_of(recipe, layout)
        reading = read(words, {words[words.index("--deepspeed") + 1]: config})
        handed_on = dict(flags_with_values(reading.document["backend"].get("script_args", ())))
        rendered = dict(flags_with_values(words))[f"--{row.key}"]
        assert handed_on.get(f"--{row.key}") == (rendered if row.handed_on else None)
        if row.reads and is_decided_by_the_recipe(row, recipe):
            assert value_at(reading.document, row.reads) == stated(recipe, layout, row.reads), row.reads


def is_decided_by_the_recipe(row: TrainerArgument, recipe: Recipe) -> bool:
    """Whether the value is the recipe's own: not the folder of a job that saves nothing, nor a default schedule."""
    if row.reads in ("training.checkpoint_path", "training.save_interval"):
        return recipe.training.checkpoint_path is not None
    if row.reads == "training.warmup_steps":
        return recipe.training.warmup_steps is not None
    return row.reads != "training.learning_rate_decay" or recipe.training.learning_rate_decay is not None


@pytest.mark.parametrize("row", ARGUMENTS, ids=lambda row: row.key)
def test_what_a_script_says_is_read_or_handed_on(row: TrainerArgument) -> None:
    value = EXAMPLES.get(row.key, next(iter(DECAYS)) if row.key == "lr_scheduler_type" else "3")
    others = ["--output_dir", "/out", "--max_steps", "10", "--max_length", "512"]
    reading = read([*(word for word in others if row.key != "output_dir"), f"--{row.key}", value])
    named = any(f"--{row.key}" in word for unread in reading.unread for word in unread.words)
    asked = any(row.reads and sentence.startswith(row.reads) for sentence in (*reading.missing, *reading.notes))
    handed_on = f"--{row.key}" in reading.document["backend"].get("script_args", ())
    said = bool(row.reads) and value_at(reading.document, row.reads) is not None
    assert handed_on == row.handed_on
    assert handed_on or said or named or asked or row.key == "deepspeed"


def test_the_schedule_that_is_rendered_is_read_as_the_same_decay() -> None:
    for decay, name in SCHEDULES.items():
        assert DECAYS[name] == (decay or "cosine")


@cache
def fields_of_training_arguments() -> frozenset[str]:
    """The fields of transformers' TrainingArguments, read without importing it, which would take seconds."""
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).with_name("training_args.py").read_text("utf-8"))
    (definition,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments")
    fields = (node.target for node in definition.body if isinstance(node, ast.AnnAssign))
    return frozenset(target.id for target in fields if isinstance(target, ast.Name))


@pytest.mark.parametrize("row", ARGUMENTS, ids=lambda row: row.key)
def test_the_installed_transformers_has_the_field(row: TrainerArgument) -> None:
    def number(text: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", text)[:3]]

    is_in = number(row.since) <= number(INSTALLED) and (row.until is None or number(INSTALLED) < number(row.until))
    assert (row.key in fields_of_training_arguments()) == is_in
    assert is_in or not row.is_rendered


@pytest.mark.parametrize("row", [row for row in ARGUMENTS if row.read is not None], ids=lambda row: row.key)
def test_the_default_is_that_of_the_class(row: TrainerArgument) -> None:
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).with_name("training_args.py").read_text("utf-8")
    stated_default = re.search(rf"^    {row.key}: [^\n]*field\(\s*default=([^,\n]+),", text, re.MULTILINE)
    assert stated_default is not None
    assert json.loads(stated_default[1]) == row.default
