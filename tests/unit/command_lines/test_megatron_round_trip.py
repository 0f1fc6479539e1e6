"""Public Megatron-LM command lines become recipes that load and render to the same arguments."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmlaunch.command_lines.command import Reading, TrainerCommand
from llmlaunch.frameworks.argument import NodeVariable, command_words
from llmlaunch.frameworks.megatron.arguments import planned_arguments
from llmlaunch.frameworks.megatron.command_line import VOCABULARY, equal, pinned_layout, read_megatron
from llmlaunch.frameworks.megatron.flags.table import column
from llmlaunch.frameworks.megatron.namespace import Namespace, namespace_of
from llmlaunch.frameworks.megatron.parser import NEWEST
from llmlaunch.frameworks.megatron.versions import rendered_arguments
from llmlaunch.frameworks.megatron.words import read_words
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.types import Recipe

FACTS = Path(__file__).resolve().parents[2] / "data" / "command_lines" / "megatron"
LINES = sorted(path.stem for path in FACTS.glob("*.json"))


def facts_of(name: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((FACTS / f"{name}.json").read_text("utf-8"))
    return facts


def words_of(arguments: dict[str, Any]) -> Iterator[str]:
    """Yield the words that facts of a command line stand for: flag = value, values, or true."""
    for flag, value in arguments.items():
        yield flag
        if value is not True:
            yield from value if isinstance(value, list) else [value]


def command_of(facts: dict[str, Any]) -> TrainerCommand:
    return TrainerCommand(
        facts["trainer"],
        tuple(words_of(facts["arguments"])),
        launcher="torchrun",
        nodes=facts["nodes"],
        devices_per_node=facts["devices_per_node"],
        environment=facts.get("environment", {}),
        slurm=facts.get("slurm", {}),
        place="train.sh:1",
    )


def recipe_of_reading(reading: Reading, facts: dict[str, Any], folder: Path) -> Recipe:
    """Load a reading's recipe on the cluster of the facts, with what the script leaves open supplied."""
    cluster = {"base": facts["cluster"], "devices_per_node": facts["devices_per_node"]}
    document = {**reading.document, "cluster": cluster}
    place = folder / "recipe.yaml"
    place.write_text(yaml.safe_dump(document, sort_keys=False), "utf-8")
    return load_recipe(place, [f"{key}={value}" for key, value in facts.get("supplied", {}).items()])


def rendered(recipe: Recipe) -> Namespace:
    arguments, _ = rendered_arguments(recipe, planned_arguments(recipe, pinned_layout(recipe)))
    words = [
        f"${{{word.name}}}" if isinstance(word, NodeVariable) else word
        for word in (*command_words(arguments), *recipe.backend.extra_args)
    ]
    return namespace_of(read_words(words).values, NEWEST, recipe.world_size)


@pytest.mark.parametrize("name", LINES)
def test_a_public_command_line_round_trips(name: str, tmp_path: Path) -> None:
    facts = facts_of(name)
    command = command_of(facts)
    reading = read_megatron(command)
    recipe = recipe_of_reading(reading, facts, tmp_path)
    original = namespace_of(read_words(command.arguments).values, NEWEST, facts["nodes"] * facts["devices_per_node"])
    again = rendered(recipe)
    unread = {word for each in reading.unread for word in each.words if word.startswith("--")}
    dropped = {dest for dest, words in read_words(command.arguments).words.items() if words[0] in unread}
    paths = {
        "save", "load", "tensorboard_dir", "data_path", "data_cache_path", "pretrained_checkpoint", "tokenizer_model",
        "wandb_exp_name", "wandb_save_dir",
    }  # fmt: skip
    differences = {
        dest: (original.get(dest), again.get(dest))
        for dest in original.keys() | again.keys()
        if not equal(original.get(dest), again.get(dest))
        and dest not in dropped
        and dest not in VOCABULARY
        and dest not in paths
        and not (dest in column("added") and dest not in original.explicit)
    }
    assert differences == {}
