"""Values of planned arguments that no recipe key can say, such as a library that llmlaunch does not know. They stay the
person's own arguments, as written, in place of the planned ones; their class is unknown, since what was priced is
another choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmlaunch.frameworks.argument import flag_groups
from llmlaunch.frameworks.megatron.flags.table import column
from llmlaunch.frameworks.megatron.parser import core_parser, rendered_version
from llmlaunch.recipe.types import Recipe

Values = Sequence[str]


def is_own_choice(name: str, values: Values) -> bool:
    """Return whether no recipe key says these values of the flag that sets `name`."""
    return name in column("unsaid") and bool(values) and bool(column("unsaid")[name](values))


def own_choices(recipe: Recipe) -> Mapping[str, tuple[str, ...]]:
    """Return the values that the person's own arguments choose and no recipe key says, by the parser's `dest`."""
    if not recipe.backend.has_own_arguments:
        return {}
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
    companions = [name for name, choice in column("companion").items() if choice in chosen and name in stated]
    return chosen | {name: stated[name] for name in companions}


def unknown_library(recipe: Recipe) -> bool:
    """Return whether tokens are sent by a library whose buffers and limits llmlaunch does not know."""
    chosen = own_choices(recipe)
    if not chosen:
        return False
    from llmlaunch.frameworks.megatron.flags.mixture import DISPATCH_LIBRARY

    return DISPATCH_LIBRARY in chosen
