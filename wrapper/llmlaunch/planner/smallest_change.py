"""The smallest change of a recipe that makes a layout safe, for recipes where none is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from llmlaunch.errors import UserError
from llmlaunch.layout import AMOUNTS, Layout
from llmlaunch.planner.candidate import Candidate, Change
from llmlaunch.planner.headroom import search_with_headroom
from llmlaunch.planner.pricing_budget import BudgetSpent, PricingBudget
from llmlaunch.planner.relaxed_pins import RelaxedSearch, as_pin, pin_distance, relax_pins, search_relaxed
from llmlaunch.planner.search import search
from llmlaunch.planner.search_space import as_ints, divisors, searched_values
from llmlaunch.planner.setting import Setting
from llmlaunch.planner.sizing import DEFAULT_MOST_NODES, fewest_safe, most_nodes
from llmlaunch.progress import counting
from llmlaunch.recipe.layout_keys import belonging
from llmlaunch.recipe.types import NO_BUDGET, Recipe
from llmlaunch.recipe.written import written_pin
from llmlaunch.techniques import NO_TECHNIQUES

__all__ = [
    "BELONGS",
    "Advice",
    "find_advice",
    "fixed_value",
    "smallest_change",
    "stated_value",
    "unfixed",
]


SHORTER = (2, 4, 8, 16, 32)
BELONGS = {name: kind for name, (owner, kind) in belonging().items() if owner == "recompute"}  # to a kind of recompute
NOTHING: Mapping[str, Any] = {}


# What each part of the search may look at (`pricing_budget`): some seconds on one core, all parts together.
PIN_CANDIDATES, TECHNIQUE_CANDIDATES, NODE_CANDIDATES, LEAP_CANDIDATES = 30_000, 150_000, 40_000, 80_000


@dataclass(frozen=True)
class Advice:
    """The change that makes a recipe safe, None where none is known. It is the smallest where the search was
    `complete`: no part of it used up its budget."""

    change: Change | None
    complete: bool = True

    def sentence(self) -> str:
        """Return the advice for a person."""
        if self.change is not None:
            which = "Smallest change that is safe" if self.complete else f"A change that is safe ({CUT_SHORT})"
            return f"{which}: {self.change.sentence()} ({self.change.layout.describe()})."
        if not self.complete:
            return f"No change that is safe is known ({CUT_SHORT})."
        return (
            f"Neither other pins, nor a technique added, nor more nodes, up to {DEFAULT_MOST_NODES}, nor a "
            f"{SHORTER[-1]} times shorter sequence would be safe."
        )


LEAP = 4
CUT_SHORT = "the search for a smaller one ended at its budget of layouts"


def smallest_change(setting: Setting) -> Change | None:
    """Return the change that `find_advice` finds."""
    return find_advice(setting).change


def find_advice(setting: Setting) -> Advice:
    """Return the first of these changes that yields a safe layout:

    one pin of the layout set to another value; all of the host's memory; even stages; one technique set otherwise;
    more pins; techniques kept out of the search; more nodes; a shorter sequence. Of several pins the fewest,
    then the least far, then the fastest.

    Each part has a budget of candidates. Where one is used up, what it would have said is not known, and the next part
    is searched.
    """
    recipe, complete = setting.recipe, True
    parts: list[tuple[int, Callable[[], Change | None]]] = [
        (PIN_CANDIDATES, lambda: _one_pin(setting)),
        (TECHNIQUE_CANDIDATES, lambda: next(_safe(setting, _relaxed_requests(recipe)), None)),
        (TECHNIQUE_CANDIDATES, lambda: _by_techniques(setting)),
        (PIN_CANDIDATES, lambda: _several_pins(setting)),
        (TECHNIQUE_CANDIDATES, lambda: next(_safe(setting, _lifted_limit(recipe)), None)),
        (NODE_CANDIDATES, lambda: _more_nodes(setting)),
        (LEAP_CANDIDATES, lambda: None if complete else _many_more_nodes(setting)),
        (NODE_CANDIDATES, lambda: next(_shorter_sequences(setting), None)),
    ]
    for candidates, part in counting("kinds of changes", parts):
        change, finished = _within(candidates, part)
        complete &= finished
        if change is not None:
            return Advice(change, complete)
    return Advice(None, complete)


def _within(candidates: int, part: Callable[[], Change | None]) -> tuple[Change | None, bool]:
    """Return what a part of the search finds within its budget, and whether it was not cut short."""
    try:
        with PricingBudget(candidates).limiting():
            return part(), True
    except BudgetSpent:
        return None, False


def _one_pin(setting: Setting) -> Change | None:
    """Return the nearest value of one pin that leaves a safe layout, the fastest of equally near ones."""
    changes = sorted(_pin_changes(setting), key=itemgetter(0))
    for _, near in groupby(changes, key=itemgetter(0)):
        best: tuple[float, Change] | None = None
        for _, change in near:
            try:
                result = search(setting.with_recipe(change.recipe), exact=1, safe_alone=True)
            except UserError:
                continue
            seconds = float(result.preferred_seconds[result.first[0]]) if np.any(result.safe) else np.inf
            if np.any(result.safe) and (best is None or seconds < best[0]):
                best = seconds, change
        if best is not None:
            return _with_planned_layout(setting, best[1])
    return None


def _pin_changes(setting: Setting) -> Iterator[tuple[float, Change]]:
    """Yield each other value of each pin, with its distance from the pinned ones."""
    recipe = setting.recipe
    space = setting.backend.space(recipe)
    for name, pin in recipe.pins.items():
        values = divisors(recipe.world_size, recipe.world_size)
        values = values if name == "data" else searched_values(recipe, space, name)
        others = np.array(sorted(set(values) - set(as_ints(name, pin))), dtype=np.int64)
        for value, far in zip(others.tolist(), pin_distance(name, as_ints(name, pin), others).tolist(), strict=True):
            yield round(far, 9), _with_pins(recipe, {name: value})


def _several_pins(setting: Setting) -> Change | None:
    """Return the fewest pins set otherwise that leave a safe layout, then the least far, then the fastest."""
    return _by_pins(search_relaxed(setting)) if len(setting.recipe.pins) > 1 else None


def _by_pins(
    relaxed: RelaxedSearch, settings: Mapping[str, Any] = NOTHING, before: Mapping[str, Any] = NOTHING
) -> Change | None:
    """Return the pins of the nearest safe layout, with the `settings` under which it was searched."""
    row = relaxed.nearest_safe()
    if row is None:
        return None
    change = _with_pins(relaxed.setting.recipe, relaxed.changes(row), settings, before)
    return _with_planned_layout(relaxed.setting, change)


def _with_pins(
    recipe: Recipe,
    values: Mapping[str, int],
    settings: Mapping[str, Any] = NOTHING,
    before: Mapping[str, Any] = NOTHING,
) -> Change:
    """Return the change of pins to the values, beside other `settings`. Its layout is not known yet."""
    new: dict[str, Any] = {name: as_pin(name, value) for name, value in values.items()}
    changed = {**settings}
    for name, value in new.items():
        pin = written_pin(recipe, name)
        changed[pin.key] = None if value is None else pin.value(value)
        before = {**before, pin.key: pin.value(recipe.pins[name])}
    pins = {name: pin for name, pin in {**recipe.pins, **new}.items() if pin is not None}
    change = Change(changed, replace(recipe, pins=pins), Layout(), before)
    return _tidied(change) if "recompute" in new else change


def _with_planned_layout(setting: Setting, change: Change) -> Change | None:
    """Return the change with the layout that is planned once it is applied; None where that is not safe."""
    result = search_with_headroom(setting.with_recipe(change.recipe))
    if not np.any(result.safe):
        return None
    return replace(change, layout=result.candidate(change.recipe, 0).layout)


def _tidied(change: Change) -> Change:
    """Remove settings that belong to another kind of recompute than the pinned one: the changed recipe would contradict
    itself."""
    recipe, now = change.recipe, change.recipe.pins["recompute"]
    away = [name for name, kind in BELONGS.items() if kind != now and stated_value(recipe, name) is not None]
    for name in away:
        recipe = _without(recipe, name)
    return replace(change, settings={**change.settings, **{f"layout.{name}": None for name in away}}, recipe=recipe)


def _safe(setting: Setting, changes: Iterator[Change]) -> Iterator[Change]:
    """Yield the changes that leave a safe layout, with it; what the backend cannot do is left out."""
    for change in changes:
        try:
            safe = _with_planned_layout(setting, change)
        except UserError:
            continue
        if safe is not None:
            yield safe


def _relaxed_requests(recipe: Recipe) -> Iterator[Change]:
    """Yield the changes that ask for less: all of the node's memory, even stages."""
    if recipe.slurm.get("mem") not in (None, False, 0, "0"):
        changed = replace(recipe, slurm={**recipe.slurm, "mem": 0})
        yield Change({"slurm.mem": 0}, changed, Layout(), {"slurm.mem": recipe.slurm["mem"]})
    if recipe.layers_by_stage:
        yield Change({"layout.layers_by_stage": None}, replace(recipe, layers_by_stage=None), Layout())


def _by_techniques(setting: Setting) -> Change | None:
    """Free one technique after the other that the recipe sets itself, amounts of layers among them, and return the one
    that allows the fastest safe layout, with what is then chosen for it. The format of gradients is never freed: it
    changes the numbers a model learns from."""
    recipe = setting.recipe
    names = [name for name in recipe.fixed if name != "gradient_dtype"] + [n for n in recipe.pins if n in AMOUNTS]
    best: tuple[float, Change] | None = None
    for name in names:
        free = _without(recipe, name) if name in AMOUNTS else unfixed(recipe, name)
        result = search_with_headroom(setting.with_recipe(free))
        if np.any(result.safe):
            chosen = result.candidate(free, 0)
            if best is None or chosen.step_seconds < best[0]:
                best = (chosen.step_seconds, _technique_change(recipe, name, chosen))
    return None if best is None else best[1]


def _technique_change(recipe: Recipe, name: str, chosen: Candidate) -> Change:
    """Return the change that writes what was chosen for the technique; a technique switched off is removed."""
    key, amount = f"layout.{name}", name in AMOUNTS
    before = recipe.pins[name] if amount else getattr(recipe.techniques, name)
    value = getattr(chosen.layout if amount else chosen.techniques, name)
    value = list(value) if isinstance(value, tuple) else value
    if not value:
        return Change({key: None}, _without(recipe, name), chosen.layout, {key: before})
    return Change({key: value}, _with_technique(_without(recipe, name), name, value), chosen.layout, {key: before})


def _lifted_limit(recipe: Recipe) -> Iterator[Change]:
    """Yield the removal of `layout.techniques`, which leaves every technique to the search."""
    limit = recipe.technique_limit
    if limit is not None:
        key = "layout.techniques"
        yield Change({key: None}, replace(recipe, technique_limit=None), Layout(), {key: limit})


def _without_budget(setting: Setting) -> Setting:
    """Return the setting without pins and without a budget, in which nothing tight is accepted."""
    safe_alone = replace(setting.recipe.memory, accept=None)
    return setting.with_recipe(replace(relax_pins(setting), budget=NO_BUDGET, memory=safe_alone))


def _more_nodes(setting: Setting) -> Change | None:
    """Return the fewest nodes with a safe layout, with as few of the pins changed as do."""
    recipe, relaxed = setting.recipe, _without_budget(setting)
    trial = fewest_safe(relaxed, recipe.nodes + 1, most_nodes(relaxed.recipe))
    return None if trial is None or trial.layout is None else _on_nodes(setting, trial.nodes, trial.layout)


def _many_more_nodes(setting: Setting) -> Change | None:
    """Return the first of four times, 16 times and so on as many nodes that has a safe layout: a count for where those
    between cannot all be searched."""
    relaxed, nodes = _without_budget(setting), LEAP * setting.recipe.nodes
    while nodes <= most_nodes(relaxed.recipe):
        sized, layout = relaxed.with_recipe(replace(relaxed.recipe, nodes=nodes)), None
        try:
            result = search(sized, exact=1, safe_alone=True)
            if np.any(result.safe):
                layout = result.candidate(sized.recipe, 0).layout
        except BudgetSpent as spent:
            if spent.safe_layout is None:
                raise
            layout = spent.safe_layout
        if layout is not None:
            larger = replace(setting.recipe, nodes=nodes)
            return _allowing(larger, layout, *_node_settings(setting.recipe, nodes))
        nodes *= LEAP
    return None


def _allowing(recipe: Recipe, layout: Layout, settings: Mapping[str, Any], before: Mapping[str, Any]) -> Change:
    """Return the `settings` of the recipe together with those of its pins that a safe `layout` breaks."""
    broken = {
        name: int(getattr(layout, name))
        for name, pin in recipe.pins.items()
        if int(getattr(layout, name)) not in as_ints(name, pin)
    }
    return replace(_with_pins(recipe, broken, settings, before), layout=layout)


def _on_nodes(setting: Setting, nodes: int, layout: Layout) -> Change | None:
    """Return the change to so many nodes, on which a search of any pins found the fastest safe `layout`."""
    larger = setting.with_recipe(replace(setting.recipe, nodes=nodes))
    return next(_with_other_pins(larger, *_node_settings(setting.recipe, nodes), layout), None)


def _shorter_sequences(setting: Setting) -> Iterator[Change]:
    """Yield shorter sequences with a safe layout, each with as few of the pins changed as do."""
    recipe = setting.recipe
    for factor in SHORTER:
        length = recipe.training.sequence_length // factor
        if length < 1:
            return
        training = replace(recipe.training, sequence_length=length)
        key = "training.sequence_length"
        shorter = setting.with_recipe(replace(recipe, training=training))
        yield from _with_other_pins(shorter, {key: length}, {key: recipe.workload.sequence_length})


def _with_other_pins(
    setting: Setting, settings: Mapping[str, Any], before: Mapping[str, Any], layout: Layout | None = None
) -> Iterator[Change]:
    """Yield the `settings` under which a setting is searched, with as few of its pins changed as leave a safe layout;
    nothing where none does. `layout` is the fastest safe one where a search of any pins found it: its pins are changed
    where the search for fewer is cut short."""
    recipe = setting.recipe
    if not recipe.pins and layout is not None:
        change: Change | None = Change(settings, recipe, layout, before)
    else:
        change = _with_planned_layout(setting, Change(settings, recipe, Layout(), before))
    if change is None and recipe.pins:
        change, finished = _within(PIN_CANDIDATES, lambda: _by_pins(search_relaxed(setting), settings, before))
        if layout is not None and not finished:
            change = _with_planned_layout(setting, _allowing(recipe, layout, settings, before))
    if change is not None:
        yield change


def _node_settings(recipe: Recipe, nodes: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return what to write for this number of nodes, and what stands there now."""
    most = recipe.budget.max_nodes
    if most is None or nodes <= most:
        return {"nodes": nodes}, {"nodes": recipe.nodes}
    return {"nodes": nodes, "budget.max_nodes": nodes}, {"nodes": recipe.nodes, "budget.max_nodes": most}


def unfixed(recipe: Recipe, name: str) -> Recipe:
    """Return the recipe with this technique left for the planner to choose."""
    return replace(recipe, fixed=tuple(other for other in recipe.fixed if other != name))


def fixed_value(recipe: Recipe, name: str) -> Any:
    """Return the value of a technique that the recipe fixes; the format of gradients is one of the training."""
    return recipe.training.gradient_dtype if name == "gradient_dtype" else getattr(recipe.techniques, name)


def stated_value(recipe: Recipe, name: str) -> Any:
    """Return what `layout:` states for a pin or technique; None where it states nothing."""
    if name in recipe.pins:
        return recipe.pins[name]
    value = getattr(recipe.techniques, name, None)
    return None if value == getattr(NO_TECHNIQUES, name, None) else value


def _without(recipe: Recipe, name: str) -> Recipe:
    """Return the recipe without a pin or a technique."""
    if name in recipe.pins:
        return replace(recipe, pins={other: pin for other, pin in recipe.pins.items() if other != name})
    none: dict[str, Any] = {name: getattr(NO_TECHNIQUES, name)}
    return replace(unfixed(recipe, name), techniques=replace(recipe.techniques, **none))


def _with_technique(recipe: Recipe, name: str, value: Any) -> Recipe:
    """Return the recipe with a number of layers pinned, or a technique set."""
    if name in AMOUNTS:
        return replace(recipe, pins={**recipe.pins, name: value})
    setting: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value}
    fixed = tuple(dict.fromkeys((*recipe.fixed, name)))
    return replace(recipe, techniques=replace(recipe.techniques, **setting), fixed=fixed)
