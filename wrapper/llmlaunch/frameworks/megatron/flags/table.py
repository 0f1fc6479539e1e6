"""The whole table: all rows in the order of the command line, written by one loop and read by another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from llmlaunch.documents.keys import dotted_keys
from llmlaunch.documents.nested import put_at
from llmlaunch.frameworks.argument import Argument
from llmlaunch.frameworks.megatron.flags.attention import ATTENTION_FLAGS, DELTA_FLAGS
from llmlaunch.frameworks.megatron.flags.files import CHECKPOINT_FLAGS, DATA_FLAGS
from llmlaunch.frameworks.megatron.flags.layout import LAYOUT_FLAGS
from llmlaunch.frameworks.megatron.flags.model import (
    ACTIVATION_FLAGS,
    MIXER_FLAGS,
    PREDICTION_FLAGS,
    SIZE_FLAGS,
    SWITCH_FLAGS,
)
from llmlaunch.frameworks.megatron.flags.numbers import NUMBER_FLAGS
from llmlaunch.frameworks.megatron.flags.row import Field, Flag, PlannedJob, Space
from llmlaunch.frameworks.megatron.flags.techniques import TECHNIQUE_FLAGS
from llmlaunch.frameworks.megatron.flags.training import LOG_FLAGS, TRAINING_FLAGS
from llmlaunch.frameworks.megatron.model_rules import asks_for_mixture
from llmlaunch.recipe.types import recipe_form


def _on(subject: str, *rows: Flag) -> tuple[Flag, ...]:
    """Return rows with the subject of those that name none, and whose flags a person may pass on."""
    return tuple(row if row.subject or row.decides else replace(row, subject=subject) for row in rows)


@cache
def flags(mixtures: bool = True) -> tuple[Flag, ...]:
    """Return the rows in the order of the command line, those of mixtures only where they are asked for. A flag that
    several choices ask for has a row for each of them."""
    of_mixtures: tuple[Flag, ...] = ()
    if mixtures:
        from llmlaunch.frameworks.megatron.flags.mixture import MIXTURE_FLAGS

        of_mixtures = MIXTURE_FLAGS
    return (
        *_on("shape of the model", *SIZE_FLAGS, *ATTENTION_FLAGS),
        *_on("parts of the model that are not priced", *DELTA_FLAGS),
        *_on("shape of the model", *PREDICTION_FLAGS, *SWITCH_FLAGS, *ACTIVATION_FLAGS),
        *_on("parts of the model that are not priced", *MIXER_FLAGS),
        *_on("shape of the model", *of_mixtures),
        *LAYOUT_FLAGS,
        *TECHNIQUE_FLAGS,
        *_on("schedule of the learning rate", *TRAINING_FLAGS),
        *_on("logs and metrics", *LOG_FLAGS),
        *_on("narrow number formats", *NUMBER_FLAGS),
        *_on("data", *DATA_FLAGS),
        *_on("checkpoints of the recipe", *CHECKPOINT_FLAGS),
    )


def written_arguments(job: PlannedJob) -> tuple[Argument, ...]:
    """Return the arguments that the recipe and its plan decide, each with its reason."""
    return tuple(argument for row in flags(asks_for_mixture(job.recipe)) for argument in row.arguments(job))


def read_section(space: Space, section: str) -> dict[str, Any]:
    """Return a section of the recipe ("model", "training", "layout") as a namespace describes it, its keys in the order
    in which they are defined. What has its default there is left out."""
    prefix, values = f"{section}.", {}
    for row in flags():
        for key, read in row.reads.items():
            if key.startswith(prefix):
                value = read(space)
                if value is not None:
                    values[key.removeprefix(prefix)] = value
    document: dict[str, Any] = {}
    order = _order()
    for key in sorted(values, key=lambda name: order.get(prefix + name, len(order))):
        put_at(document, key, values[key])
    return document


@cache
def _order() -> Mapping[str, int]:
    """Return where each dotted key comes among those of a recipe."""
    return {key: index for index, key in enumerate(dotted_keys(recipe_form()))}


@cache
def column(name: str) -> Mapping[str, Any]:
    """Return one column by the parser's `dest`: "key", "added", "unread", "decides", "unsaid", "companion",
    "only_helps" or "subject". Rows without a value are left out."""
    values: dict[str, Any] = {}
    for row in flags():
        for dest in sorted(row.dests):
            if getattr(row, name):
                values.setdefault(dest, getattr(row, name))
    return values


@cache
def bridge_fields() -> Mapping[str, tuple[Field, ...]]:
    """Return the fields of Bridge that each flag sets."""
    return {row.name: row.fields for row in reversed(flags()) if row.fields is not None}
