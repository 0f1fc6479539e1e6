"""Which reader reads a command, and the recipe that a reading becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from llmlaunch.cluster.load import profile_names
from llmlaunch.command_lines.command import Reading, TrainerCommand
from llmlaunch.documents.yaml_strict import parse_document
from llmlaunch.errors import UserError
from llmlaunch.recipe.load import load_written
from llmlaunch.recipe.types import Recipe

__all__ = ["read_command", "recipe_of"]

# One of these stands in every command line of a trainer of Megatron's kind, none in one of Hugging Face's.
MEGATRON = frozenset(
    {"num-layers", "micro-batch-size", "tensor-model-parallel-size", "use-checkpoint-args", "yaml-cfg"}
)
DEEPSPEED = frozenset({"deepspeed", "deepspeed-config"})


def read_command(command: TrainerCommand) -> Reading:
    """Return the recipe of a command, read by the reader of its kind.

    Raises:
        UserError: the command is no training that a recipe describes.
    """
    flags = {_flag(word) for word in command.arguments if word.startswith("--")}
    if flags & MEGATRON and not flags & DEEPSPEED:
        from llmlaunch.command_lines.megatron import read_megatron

        return read_megatron(command)
    from llmlaunch.command_lines.deepspeed import read_deepspeed

    return read_deepspeed(command)


def _flag(word: str) -> str:
    return word[2:].split("=", 1)[0].replace("_", "-")


def recipe_of(
    reading: Reading, place: str, folder: Path, cluster: str | None = None, overrides: Sequence[str] = ()
) -> Recipe:
    """Return the recipe of a reading on `cluster` (the reading's own unless given), with `overrides`. `place` says
    where the command stands; relative paths start in `folder`.

    Raises:
        UserError: the command does not tell all that a recipe needs; the message says what is missing and how to say
            it. Or what it tells is no valid recipe.
    """
    document: dict[str, Any] = dict(reading.document)
    document["cluster"] = cluster or document.get("cluster")
    words = [word.partition("=")[0] for word in overrides]
    if document["cluster"] is None and "cluster" not in words:
        raise UserError(
            f"{place}: does not tell the cluster; add --cluster NAME, a profile's name or path ("
            f"{', '.join(profile_names())})"
        )
    try:
        return load_written(parse_document(_text(document), f"the recipe read of {place}"), overrides, folder)
    except UserError as error:
        missing = [sentence for sentence in reading.missing if sentence.partition(":")[0] not in words]
        if not missing:
            raise
        raise UserError(f"{place}: {'; '.join(missing)}. As a recipe it says: {error}") from None


def _text(document: Mapping[str, Any]) -> str:
    return yaml.safe_dump({key: value for key, value in document.items() if value is not None}, sort_keys=False)
