"""The smallest change to a recipe that makes a layout safe, for recipes without a safe layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from operator import itemgetter

import numpy as np

from llmlaunch.frozen import frozen
from llmlaunch.layout import AMOUNTS, Layout
from llmlaunch.planner.changes import (
    nearest_pins,
    pin_distance,
    planned,
    relax_pins,
    resized,
    safe_changes,
    unchanged,
    unfixed,
    with_chosen_technique,
    with_pins,
    without,
)
from llmlaunch.planner.search_space import MOST_CONTEXT, Candidate, Change, as_ints, divisors, searched_values
from llmlaunch.planner.setting import BudgetSpent, Setting, within_budget
from llmlaunch.planner.sizing import DEFAULT_MOST_NODES, fewest_safe, most_nodes
from llmlaunch.progress import counting
from llmlaunch.recipe.types import NO_BUDGET, Recipe

SHORTER = (2, 4, 8, 16, 32)
CUT_SHORT = "the search for a smaller one ended at its budget of layouts"

# Candidates that each part of the search may price (`PricingBudget`). All parts together take some seconds on one
# core.
PIN_CANDIDATES, TECHNIQUE_CANDIDATES, NODE_CANDIDATES = 30_000, 150_000, 110_000


@frozen
class Advice:
    """A sentence for the user whose recipe has no safe layout, and the change that it names. The change is None if none
    is known."""

    sentence: str
    change: Change | None = None


def find_advice(setting: Setting) -> Advice:
    """Return the first change in this list that leads to a safe layout.

    The list is: another value for one pin of the layout; all of the host's memory; even stages; another setting for one
    technique; other values for several pins; the techniques excluded from the search; more nodes; a shorter sequence.
    Among sets of pins, the one with the fewest pins wins, then the one nearest to the pinned values, then the fastest.

    Each part has a budget of candidates. If a budget runs out, the result of that part is unknown, and the search
    continues with the next part.
    """
    recipe, complete = setting.recipe, True
    parts: list[tuple[int, Iterator[Change]]] = [
        (PIN_CANDIDATES, safe_changes(setting, _other_pins(setting))),
        (TECHNIQUE_CANDIDATES, safe_changes(setting, enumerate(_relaxed_requests(recipe)))),
        (TECHNIQUE_CANDIDATES, _other_technique(setting)),
        (PIN_CANDIDATES, _several_pins(setting)),
        (TECHNIQUE_CANDIDATES, safe_changes(setting, enumerate(_lifted_limit(recipe)))),
        (NODE_CANDIDATES, _more_nodes(setting)),
        (NODE_CANDIDATES, _shorter_sequence(setting)),
    ]
    for candidates, part in counting("kinds of changes", parts):
        changes, finished = within_budget(candidates, islice(part, 1))
        complete &= finished
        for change in changes:
            return _advice_of(replace(change, smallest=complete and change.smallest))
    if not complete:
        return Advice(f"No change that is safe is known ({CUT_SHORT}).")
    return Advice(
        f"Neither other pins, nor a technique added, nor more nodes, up to {DEFAULT_MOST_NODES}, nor a "
        f"{SHORTER[-1]} times shorter sequence would be safe."
    )


def _advice_of(change: Change) -> Advice:
    which = "Smallest change that is safe" if change.smallest else f"A change that is safe ({CUT_SHORT})"
    return Advice(f"{which}: {change.sentence()} ({change.layout.describe()}).", change)


def _other_pins(setting: Setting) -> list[tuple[float, Change]]:
    """Return a change for each other value of each pin, with its distance from the pinned values, nearest first."""
    recipe, same = setting.recipe, unchanged(setting.recipe)
    space = setting.backend.space(recipe)
    changes: list[tuple[float, Change]] = []
    for name, pin in recipe.pins.items():
        values = divisors(recipe.world_size, recipe.world_size)
        values = values if name == "data" else searched_values(recipe, space, name)
        others = np.array(sorted(set(values) - set(as_ints(name, pin))), dtype=np.int64)
        far = np.round(pin_distance(name, as_ints(name, pin), others), 9)
        away = zip(far.tolist(), others.tolist(), strict=True)
        changes += [(distance, with_pins(same, {name: value})) for distance, value in away]
    return sorted(changes, key=itemgetter(0))


def _relaxed_requests(recipe: Recipe) -> Iterator[Change]:
    """Yield the changes that relax a request: use all of the node's memory, or even stages."""
    if recipe.slurm.get("mem") not in (None, False, 0, "0"):
        changed = replace(recipe, slurm={**recipe.slurm, "mem": 0})
        yield Change({"slurm.mem": 0}, changed, Layout(), {"slurm.mem": recipe.slurm["mem"]})
    if recipe.layers_by_stage:
        yield Change({"layout.layers_by_stage": None}, replace(recipe, layers_by_stage=None), Layout())


def _other_technique(setting: Setting) -> Iterator[Change]:
    """Yield the best change of a single technique.

    Each technique that the recipe sets, amounts of layers included, is left to the search in turn. The one that allows
    the fastest safe layout is yielded with the value chosen for it. The gradient format is never changed, because it
    changes the numbers a model learns from.
    """
    recipe = setting.recipe
    free = {name: unfixed(recipe, name) for name in recipe.fixed if name != "gradient_dtype"}
    free |= {name: without(recipe, name) for name in recipe.pins if name in AMOUNTS}
    safe = {name: chosen for name in free if (chosen := planned(setting, free[name])) is not None}
    if safe:
        fastest = min(safe, key=lambda name: safe[name].step_seconds)
        yield with_chosen_technique(recipe, fastest, safe[fastest])


def _several_pins(setting: Setting) -> Iterator[Change]:
    """Yield the smallest set of changed pins that leaves a safe layout."""
    if len(setting.recipe.pins) > 1:
        yield from _with_nearest_pins(setting, unchanged(setting.recipe))


def _lifted_limit(recipe: Recipe) -> Iterator[Change]:
    """Yield the removal of `layout.techniques`, which leaves every technique to the search."""
    if recipe.technique_limit is not None:
        key, lifted = "layout.techniques", replace(recipe, technique_limit=None)
        yield Change({key: None}, lifted, Layout(), {key: recipe.technique_limit})


def _more_nodes(setting: Setting) -> Iterator[Change]:
    """Yield the smallest number of nodes with a safe layout, with as few changed pins as possible. If the search cannot
    cover every number, yield a doubled number. Raises BudgetSpent if fewer nodes might have a safe layout."""
    relaxed = _without_budget(setting)
    safe = fewest_safe(relaxed, setting.recipe.nodes, most_nodes(relaxed.recipe), NODE_CANDIDATES)
    if safe is None:
        return
    change = replace(resized(setting.recipe, "nodes", safe.nodes), layout=safe.layout, smallest=safe.fewest)
    within_pins, finished = within_budget(NODE_CANDIDATES, islice(_with_few_pins(setting, change), 1))
    yield from within_pins if finished else [replace(_allowing(change), smallest=False)]
    if not safe.fewest:
        raise BudgetSpent


def _shorter_sequence(setting: Setting) -> Iterator[Change]:
    """Yield the longest of a few shorter sequences that has a safe layout, with as few changed pins as possible.

    A shorter sequence that as many ranks can share needs no more memory than a longer one. So if the shortest has no
    safe layout, no other is searched.
    """
    recipe, relaxed, key = setting.recipe, _without_budget(setting), "training.sequence_length"
    lengths = [length for factor in SHORTER if (length := recipe.training.sequence_length // factor) >= 1]

    def fastest(length: int) -> Candidate | None:
        return planned(relaxed, resized(relaxed.recipe, key, length).recipe)

    if not lengths or (lengths[-1] % MOST_CONTEXT == 0 and fastest(lengths[-1]) is None):
        return
    for length in lengths:
        chosen = fastest(length)
        if chosen is not None:
            yield from _with_few_pins(setting, replace(resized(recipe, key, length), layout=chosen.layout))


def _without_budget(setting: Setting) -> Setting:
    """Return the setting without pins, without a budget, and without tight layouts."""
    safe_alone = replace(setting.recipe.memory, accept=None)
    return setting.with_recipe(replace(relax_pins(setting), budget=NO_BUDGET, memory=safe_alone))


def _with_few_pins(setting: Setting, change: Change) -> Iterator[Change]:
    """Yield the change together with as few changed pins as leave a safe layout. The layout of the change is the
    fastest safe one regardless of pins. If the search for few pins is cut short, the pins are changed to match it."""
    if not change.recipe.pins:
        yield change
        return
    yield from safe_changes(setting, [(0.0, change)])
    nearest, finished = within_budget(PIN_CANDIDATES, islice(_with_nearest_pins(setting, change), 1))
    yield from nearest if finished else safe_changes(setting, [(0.0, _allowing(change))])


def _with_nearest_pins(setting: Setting, change: Change) -> Iterator[Change]:
    """Yield the change together with the nearest pins that leave a safe layout."""
    pins = nearest_pins(setting.with_recipe(change.recipe))
    if pins is not None:
        yield from safe_changes(setting, [(0.0, with_pins(change, pins))])


def _allowing(change: Change) -> Change:
    """Return the change together with new values for the pins that its layout violates."""
    values = {name: int(getattr(change.layout, name)) for name in change.recipe.pins}
    return with_pins(change, {n: v for n, v in values.items() if v not in as_ints(n, change.recipe.pins[n])})
