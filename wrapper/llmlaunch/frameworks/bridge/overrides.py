"""Fields of Bridge's ConfigContainer that a person sets beside the recipe: `backend.extra_args`, a FIELD=VALUE each.

What a field means, and whether there is one of that name, Bridge's own classes say on the node, before the first step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from llmlaunch.documents.yaml_strict import parse_value
from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import Reason
from llmlaunch.frameworks.classed_arguments import (
    BY_WORD,
    NEUTRAL,
    NO_FLAG,
    PRICED,
    UNKNOWN,
    ClassedArgument,
    ClassedArguments,
    FlagClass,
)
from llmlaunch.frameworks.megatron.extra_arguments import megatron_flag_class
from llmlaunch.frameworks.megatron.parser import NEWEST, core_parser
from llmlaunch.recipe.types import Recipe

Settings = dict[str, tuple[Any, Reason]]

NEUTRAL_SECTIONS = {
    "checkpoint": "what is written and read between steps",
    "logger": "what is written to logs",
    "rerun_state_machine": "what is looked at again where a result is doubted",
    "scheduler": "the sizes of steps",
    "tokenizer": "how the host makes tokens",
    "validation": "what is evaluated, and how often",
}
PRICED_ELSEWHERE = FlagClass(UNKNOWN, "llmlaunch prices it as an argument of megatron-lm alone")


def overrides(recipe: Recipe, sections: Collection[str], decided: Collection[str]) -> Settings:
    """Return the fields with their values and the class of each as the reason.

    Raises:
        UserError: one is no field of `sections`, or is `decided` by keys of the recipe.
    """
    classes = {each.flag: each.sentence for each in classed_overrides(recipe).arguments}
    stated: Settings = {}
    for name, value in _fields(recipe):
        place = f"{recipe.path}: backend.extra_args: {name}"
        if name.partition(".")[0] not in sections:
            raise UserError(f"{place}: is of no section that is rendered; there are {', '.join(sections)}")
        if name in decided:
            raise UserError(f"{place}: is for the recipe to decide (model, layout, training, data); remove it here")
        if name in stated:
            raise UserError(f"{place}: is there twice; remove one of the two")
        stated[name] = (value, Reason(("backend.extra_args",), classes[name]))
    return stated


def _fields(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    for word in recipe.backend.extra_args:
        name, _, text = word.partition("=")
        yield name, parse_value(text, f"{recipe.path}: backend.extra_args: {name}").value


def classed_overrides(recipe: Recipe) -> ClassedArguments:
    """Return what is known of the memory of each; a field that Megatron-LM has a flag for is of that flag's class."""
    assignments = (word.partition("=")[::2] for word in recipe.backend.extra_args)
    return ClassedArguments(
        tuple(ClassedArgument(name, (text,), _class_of(recipe, name, text)) for name, text in assignments)
    )


def _class_of(recipe: Recipe, name: str, text: str) -> FlagClass:
    if name in recipe.backend.neutral_args:
        return BY_WORD
    section, _, field = name.partition(".")
    if section in NEUTRAL_SECTIONS:
        return FlagClass(NEUTRAL, NEUTRAL_SECTIONS[section])
    flags = (flag for flag in core_parser(NEWEST).flags.values() if flag.dest == field)
    known = megatron_flag_class(next(flags, None), (text,))
    if known == NO_FLAG:
        return FlagClass(UNKNOWN, "a field of Bridge that llmlaunch does not know")
    return PRICED_ELSEWHERE if known.kind == PRICED else known
