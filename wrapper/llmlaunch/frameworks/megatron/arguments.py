"""The command line of Megatron-LM's `pretrain_gpt.py`, written from the table of its arguments (flags/).

Unknown flags are fatal to Megatron's parser, abbreviations too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import Argument, flag_groups
from llmlaunch.frameworks.megatron.flags.row import PlannedJob
from llmlaunch.frameworks.megatron.flags.table import column, written_arguments
from llmlaunch.frameworks.megatron.parser import core_parser, dest_of, rendered_version
from llmlaunch.layout import Layout
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


def planned_arguments(recipe: Recipe, layout: Layout) -> tuple[Argument, ...]:
    """Return the arguments of the script without `backend.extra_args`, each with the recipe keys that decide it. Where
    those choose what no key says, the choice takes the place of the planned argument.

    Raises:
        UserError: `backend.extra_args` repeats or contradicts a planned argument.
    """
    if recipe.data.python_source:
        raise UserError(
            f"{recipe.path}: data.python_source: is for the DeepSpeed trainer; Megatron-LM reads indexed datasets "
            "(data.path, data.blend) or made-up data (data.mock: true)"
        )
    version = rendered_version(recipe)
    planned = written_arguments(PlannedJob(recipe, layout, version))
    own = own_choices(recipe)
    planned = tuple(each for each in planned if dest_of(each.flag, version) not in own)
    _refuse_contradictions(recipe, planned)
    return planned


def _refuse_contradictions(recipe: Recipe, planned: Iterable[Argument]) -> None:
    """Raise UserError for a flag of the person's own (`backend.extra_args`, `backend.script_args`) that repeats or
    contradicts a planned argument.

    The parser keeps one value under each name (`dest`), whichever flag sets it: of two flags with one `dest` the later
    would win silently. So flags are compared by `dest`, as the parser of the recipe's version has it (parser.py).
    """
    if not recipe.backend.has_own_arguments:
        return
    name, decided = partial(dest_of, version=rendered_version(recipe)), decided_names(recipe)
    mine = {name(each.flag): each for each in planned}
    extra = [("extra_args", word) for word in recipe.backend.extra_args]
    for key, word in [*extra, *(("script_args", word) for word in recipe.backend.script_args)]:
        flag = word.split("=", 1)[0]
        if not flag.startswith("--"):
            continue
        if name(flag) in mine:
            raise UserError(f"{recipe.path}: backend.{key}: {_again(flag, mine[name(flag)])}")
        if name(flag) in decided:
            raise UserError(
                f"{recipe.path}: backend.{key}: {flag} would change what is planned; say it as "
                f"{decided[name(flag)]} and remove it there"
            )


def decided_names(recipe: Recipe) -> dict[str, str]:
    """Return the names (`dest`) of flags that no recipe may pass on by itself, each with the recipe key to use."""
    own = own_choices(recipe)
    return {name: key for name, key in column("decides").items() if name not in own}


def _again(flag: str, each: Argument) -> str:
    same = "" if flag == each.flag else f" says what {each.flag} does, and that"
    by = f" (by {', '.join(each.reason.keys)})" if each.reason.keys else ""
    return f"{flag}{same} is planned by llmlaunch already{by}; say it in the recipe and remove it there"
