"""Values of planned arguments that no recipe key can say, such as a library that llmlaunch does not know. They stay the
person's own arguments, as written, in place of the planned ones; their class is unknown, since what was priced is
another choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import get_args

from llmlaunch.frameworks.argument import flag_groups
from llmlaunch.frameworks.megatron.versions import core_parser, rendered_version
from llmlaunch.recipe.types import Recipe
from llmlaunch.techniques import GraphScope

__all__ = ["CHOICES", "COMPANIONS", "is_own_choice", "own_choices", "unknown_library"]

Values = Sequence[str]
DISPATCH_LIBRARY = "moe_flex_dispatcher_backend"
KNOWN_LIBRARIES = ("deepep", "hybridep")


def _unknown_scope(values: Values) -> bool:
    return not {*values} <= {*get_args(GraphScope)}


# By the parser's `dest`: whether no recipe key says these values (Megatron core 0.19, arguments.py and
# transformer_config.py).
CHOICES: Mapping[str, Callable[[Values], bool]] = {
    DISPATCH_LIBRARY: lambda values: not {*values} <= {*KNOWN_LIBRARIES},
    "cross_entropy_fusion_impl": lambda values: not {*values} <= {"native", "te"},
    "cuda_graph_impl": lambda values: "local" in values,
    "cuda_graph_modules": _unknown_scope,
    "fp8_recipe": lambda values: "custom" in values,
    "fp4_recipe": lambda values: not {*values} <= {"nvfp4"},
}


# What stays beside such a choice, without which it would mean nothing: what captures the parts, and the format.
COMPANIONS: Mapping[str, str] = {"cuda_graph_impl": "cuda_graph_modules", "fp8": "fp8_recipe"}


def is_own_choice(name: str, values: Values) -> bool:
    """Return whether no recipe key says these values of the flag that sets `name`."""
    return name in CHOICES and bool(values) and CHOICES[name](values)


def own_choices(recipe: Recipe) -> Mapping[str, tuple[str, ...]]:
    """Return the values that the person's own arguments choose and no recipe key says, by the parser's `dest`."""
    flags, chosen, stated = core_parser(rendered_version(recipe)).flags, {}, {}
    for group in flag_groups((*recipe.backend.script_args, *recipe.backend.extra_args)):
        first, *others = map(str, group)
        name, equals, value = first.partition("=")
        values = (value, *others) if equals else tuple(others)
        flag = flags.get(name)
        if flag is None:
            continue
        stated[flag.dest] = values
        if is_own_choice(flag.dest, values):
            chosen[flag.dest] = values
    companions = [name for name, choice in COMPANIONS.items() if choice in chosen and name in stated]
    return chosen | {name: stated[name] for name in companions}


def unknown_library(recipe: Recipe) -> bool:
    """Return whether tokens are sent by a library whose buffers and limits llmlaunch does not know."""
    return DISPATCH_LIBRARY in own_choices(recipe)
