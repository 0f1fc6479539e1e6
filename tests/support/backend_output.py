"""What a backend makes of a recipe and a layout: words of its program, its configuration, the rules that refuse."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from llmlaunch.frameworks.argument import Argument, NodeVariable, flag_groups, flag_of
from llmlaunch.frameworks.base import Rendered
from llmlaunch.frameworks.framework import backend_for
from llmlaunch.frameworks.megatron.parser import core_parser
from llmlaunch.layout import Layout, LayoutColumns, Rule
from llmlaunch.planner.legality import situation
from llmlaunch.recipe.types import Recipe


def render(recipe: Recipe, layout: Layout) -> Rendered:
    return backend_for(recipe).render(recipe, layout)


def words_of(recipe: Recipe, layout: Layout) -> list[str]:
    """Return the words of the rendered program; what a node's variable gives begins with `$` and its name."""
    program = render(recipe, layout).program
    return [f"${word.name}{word.suffix}" if isinstance(word, NodeVariable) else word for word in program]


def value_of(words: Sequence[object], flag: str) -> object:
    """Return the word behind a flag, which stands there once."""
    assert words.count(flag) == 1
    return words[words.index(flag) + 1]


def check_flags(recipe: Recipe, layout: Layout, said: str, unsaid: str = "") -> None:
    """Check that llmlaunch chose each flag once, those of `said` with the values behind them, and none of `unsaid`."""
    arguments = render(recipe, layout).arguments
    flags = {each.flag: " ".join(map(str, each.values)) for each in arguments}
    assert len(flags) == len(arguments)
    expected = {flag_of(group): " ".join(map(str, group[1:])) for group in flag_groups(said.split())}
    assert expected.items() <= flags.items()
    assert not set(unsaid.split()) & flags.keys()


def ds_config(recipe: Recipe, layout: Layout) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(render(recipe, layout).files["ds_config.json"])
    return config


def refused_by(recipe: Recipe, layout: Layout, rules: Iterable[Rule] | None = None) -> set[str]:
    """Return the keys of those of `rules` that refuse the layout; without `rules`, of all that the recipe is under."""
    judged = situation(recipe, LayoutColumns.of([layout]))
    rules = backend_for(recipe).rules(recipe) if rules is None else rules
    return {rule.key for rule in rules if not np.all(rule.allows(judged))}


def check_with_parser(arguments: Iterable[Argument], version: str) -> None:
    """Check that Megatron core's own parser of that version takes every argument."""
    flags = core_parser(version).flags
    for each in arguments:
        flag = flags.get(each.flag)
        assert flag is not None, f"{each.flag} is no argument of Megatron core {version}"
        assert isinstance(flag.values, str) or len(each.values) == flag.values, each
        assert not flag.choices or set(map(str, each.values)) <= set(flag.choices), each
