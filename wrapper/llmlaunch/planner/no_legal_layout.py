"""No layout is legal at all: the tightest constraint, the pins that contradict it or one another, and what would do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmlaunch.errors import UserError
from llmlaunch.layout import Rule
from llmlaunch.planner.judge import rules_failed
from llmlaunch.planner.pins import Widened, as_pin, freed, widened
from llmlaunch.planner.search_space import enumerate_splits, technique_layouts, technique_space
from llmlaunch.planner.setting import Setting
from llmlaunch.planner.smallest_change import advice, smallest_change, unfixed
from llmlaunch.recipe.places import place_of, written_pin
from llmlaunch.recipe.types import Recipe
from llmlaunch.rundir.messages import counted

__all__ = ["Tightest", "no_layout", "tightest", "tightest_for_splits"]


@dataclass(frozen=True)
class Tightest:
    """The rule that stands in the way most: the one without which the most of `searched` layouts would be legal
    (`alone` of them fail it and no other), else the one that refuses the most. None: the devices cannot be split."""

    rule: Rule | None
    alone: int
    searched: int


def no_layout(setting: Setting) -> UserError:
    """The error for a space that holds no legal layout."""
    wide = widened(setting)
    pins = wide.conflict()
    if not pins:
        return UserError(_nothing_legal(setting))
    why = tightest(setting.with_recipe(freed(setting, pins)))
    clash = _contradiction(setting.recipe, pins, _words_that_clash(setting, pins))
    return UserError(f"{clash}: {_because(setting, why)}. {_ways_out(wide, pins)}")


def tightest(setting: Setting) -> Tightest:
    """Of a setting that holds no legal layout."""
    rules = setting.backend.rules(setting.recipe)
    return _tightest(rules, _failed(setting, rules))


def tightest_for_splits(setting: Setting) -> Tightest:
    """The same of the rules that look at sizes alone; no rule where they let some split pass, whatever the words."""
    recipe = setting.recipe
    rules = [rule for rule in setting.backend.rules(recipe) if not rule.of_techniques]
    failed = rules_failed(recipe, enumerate_splits(recipe, setting.backend.space(recipe)), rules)
    return _tightest(rules, [failed]) if failed.any(axis=0).all() else Tightest(None, 0, failed.shape[1])


def _tightest(rules: Sequence[Rule], failures: Iterable[NDArray[np.bool_]]) -> Tightest:
    alone, refusing, searched = np.zeros(len(rules)), np.zeros(len(rules)), 0
    for failed in failures:
        alone += np.count_nonzero(failed[:, np.equal(failed.sum(axis=0), 1)], axis=1)
        refusing += failed.sum(axis=1)
        searched += failed.shape[1]
    if not searched:
        return Tightest(None, 0, 0)
    index = int(np.argmax(alone if alone.any() else refusing))
    return Tightest(rules[index], int(alone[index]), searched)


def _failed(setting: Setting, rules: Sequence[Rule]) -> Iterator[NDArray[np.bool_]]:
    """Which rule (row) refuses which split (column), for every set of words tried with the splits."""
    recipe, words = setting.recipe, np.array([rule.of_techniques for rule in rules])
    splits = enumerate_splits(recipe, setting.backend.space(recipe))
    failed = rules_failed(recipe, splits, rules)
    for said, layouts in technique_layouts(recipe, technique_space(recipe, setting.backend), splits):
        failed[words] = rules_failed(said, layouts, [rule for rule in rules if rule.of_techniques])
        yield failed


def _because(setting: Setting, why: Tightest) -> str:
    if why.rule is None:
        recipe = setting.recipe
        return f"they leave no split of {counted(recipe.world_size, 'device')} ({counted(recipe.nodes, 'node')} x " \
               f"{recipe.cluster.devices_per_node})"  # fmt: skip
    return f"{why.rule.sentence} [{why.rule.key}; {why.rule.where}]"


def _words_that_clash(setting: Setting, pins: Sequence[str]) -> list[str]:
    """Words of techniques that the recipe says itself, each of which, let go, would leave these pins a legal layout."""
    kept = freed(setting, pins)
    return [word for word in kept.fixed if _any_legal(setting, unfixed(kept, word))]


def _contradiction(recipe: Recipe, names: Sequence[str], words: Sequence[str]) -> str:
    """The first by its place, the others with theirs where that is another."""
    pins = [written_pin(recipe, name) for name in names]
    keys = [*(pin.key for pin in pins), *(f"layout.{word}" for word in words)]
    places = [*(pin.place for pin in pins), *(place_of(recipe, ("layout", word)) for word in words)]
    values = [*(recipe.pins[name] for name in names), *(getattr(recipe.techniques, word) for word in words)]
    said = [f"{key}: {_listed(_values(value))}" for key, value in zip(keys, values, strict=True)]
    first = places[0]
    if len(said) == 1:
        return f"{first}: {said[0]} leaves no legal layout"
    shown = [text + ("" if place == first else f" ({place})") for text, place in zip(said, places, strict=True)]
    if len(shown) == 2:
        return f"{first}: {shown[0]} contradicts {shown[1]}"
    return f"{first}: {', '.join(shown[:-1])} and {shown[-1]} contradict one another"


def _ways_out(wide: Widened, names: Sequence[str]) -> str:
    """What each of the pins might be instead, the others kept; where none alone helps, the smallest change that is also
    safe."""
    recipe = wide.setting.recipe
    ways = [f"{written_pin(recipe, name).key}: {_listed([as_pin(name, v) for v in values])}"
            for name in names if (values := wide.legal_values(name))]  # fmt: skip
    change = smallest_change(wide.setting)
    legal = f"Legal would be {', or '.join(ways)}. " if ways else ""
    return legal + advice(change)


def _nothing_legal(setting: Setting) -> str:
    """Nobody's pins are to blame: what of batch, nodes and sequence would do."""
    recipe = setting.recipe
    why = tightest(setting.with_recipe(freed(setting)))
    does = [f"{key}: {value} (from {before})" for key, value, before in _legal_sizes(setting)]
    way = f"Legal would be {', or '.join(does)}" if does else "Change the model, the batch or the nodes accordingly"
    place = place_of(recipe, ("layout",))
    return f"{place}: layout: none of {why.searched:,} layouts is legal: {_because(setting, why)}. {way}"


def _legal_sizes(setting: Setting) -> Iterator[tuple[str, int, int]]:
    """The nearest batch, number of nodes and sequence length that hold a legal layout, each changed alone."""
    recipe = setting.recipe
    work, nodes = recipe.workload, recipe.nodes
    batches = sorted({_round(work.global_batch_size, part) for part in _parts(recipe.world_size)})
    lengths = sorted({_round(work.sequence_length, 1 << power) for power in range(12)})
    sizes = {
        "training.global_batch_size": (work.global_batch_size, batches),
        "nodes": (nodes, range(1, 2 * nodes + 1)),
        "training.sequence_length": (work.sequence_length, lengths),
    }
    for key, (now, values) in sizes.items():
        for value in sorted((v for v in values if v != now), key=lambda v: (abs(np.log2(v / now)), v)):
            if _any_legal(setting, _resized(recipe, key, value)):
                yield key, value, now
                break


def _round(size: int, part: int) -> int:
    """The multiple of `part` nearest to `size`."""
    return max(part * round(size / part), part)


def _parts(whole: int) -> list[int]:
    return [part for part in range(1, whole + 1) if whole % part == 0]


def _resized(recipe: Recipe, key: str, value: int) -> Recipe:
    if key == "nodes":
        return replace(recipe, nodes=value)
    size: dict[str, Any] = {key.partition(".")[2]: value}
    return replace(recipe, training=replace(recipe.training, **size))


def _any_legal(setting: Setting, recipe: Recipe) -> bool:
    changed = setting.with_recipe(recipe)
    rules = setting.backend.rules(recipe)
    return any(not failed.any(axis=0).all() for failed in _failed(changed, rules))


def _values(pin: object) -> list[object]:
    return list(pin) if isinstance(pin, tuple) else [pin]


def _listed(values: Sequence[object]) -> str:
    shown = ["true" if v is True else "false" if v is False else str(v) for v in values]
    return ", ".join(shown[:8]) + (", ..." if len(shown) > 8 else "")
