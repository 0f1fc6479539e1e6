"""Where nothing is safe: the smallest change of the recipe that makes it so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from llmlaunch.errors import UserError
from llmlaunch.layout import Layout
from llmlaunch.planner.pins import AMOUNTS, Widened, as_pin, freed, widened
from llmlaunch.planner.plan import Candidate
from llmlaunch.planner.search import search
from llmlaunch.planner.setting import Setting
from llmlaunch.planner.sizing import DEFAULT_MOST_NODES, most_nodes, smallest_cluster
from llmlaunch.recipe.places import written_pin
from llmlaunch.recipe.types import NO_BUDGET, Recipe
from llmlaunch.techniques import NO_TECHNIQUES

__all__ = ["Change", "advice", "smallest_change", "stated_value", "unfixed", "with_technique", "without", "yaml_text"]


@dataclass(frozen=True)
class Change:
    """`settings` are what to write, by dotted key; None takes the key away. `recipe` is the recipe so changed and
    `layout` the fastest safe one of it. `before` holds what was there of the keys that change."""

    settings: Mapping[str, Any]
    recipe: Recipe
    layout: Layout
    before: Mapping[str, Any] = field(default_factory=dict)

    def sentence(self) -> str:
        """`set layout.tensor: 8 (from 4) and layout.data: 4 (from 8)`, as one clause."""
        words = [self._clause(key, value) for key, value in self.settings.items()]
        runs = (f"{verb} {' and '.join(what for _, what in run)}" for verb, run in groupby(words, key=itemgetter(0)))
        return " and ".join(runs)

    def _clause(self, key: str, value: Any) -> tuple[str, str]:
        if value is None:
            return "remove", key
        if key not in self.before:
            return "add", f"{key}: {yaml_text(value)}"
        return "set", f"{key}: {yaml_text(value)} (from {yaml_text(self.before[key])})"


def yaml_text(value: Any) -> str:
    """A value as YAML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"[{', '.join(map(yaml_text, value))}]" if isinstance(value, (list, tuple)) else str(value)


def unfixed(recipe: Recipe, name: str) -> Recipe:
    """The recipe with this word left for the planner to choose."""
    return replace(recipe, fixed=tuple(word for word in recipe.fixed if word != name))


def stated_value(recipe: Recipe, name: str) -> Any:
    """What `layout:` says of a pin or technique; None where it says nothing."""
    if name in recipe.pins:
        return recipe.pins[name]
    value = getattr(recipe.techniques, name, None)
    return None if value == getattr(NO_TECHNIQUES, name, None) else value


def without(recipe: Recipe, name: str) -> Recipe:
    """A pin or a technique taken away."""
    if name in recipe.pins:
        return replace(recipe, pins={other: pin for other, pin in recipe.pins.items() if other != name})
    none: dict[str, Any] = {name: getattr(NO_TECHNIQUES, name)}
    return replace(unfixed(recipe, name), techniques=replace(recipe.techniques, **none))


def with_technique(recipe: Recipe, name: str, value: Any) -> Recipe:
    """A number of layers pinned, or a technique said."""
    if name in AMOUNTS:
        return replace(recipe, pins={**recipe.pins, name: value})
    held: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value}
    fixed = tuple(dict.fromkeys((*recipe.fixed, name)))
    return replace(recipe, techniques=replace(recipe.techniques, **held), fixed=fixed)


SHORTER = (2, 4, 8, 16, 32)
# What a recipe may add that no search chooses, the cheapest first.
ADDED: tuple[tuple[str, Any], ...] = (("loss", "native"), ("loss", "tiled"), ("mlp_chunks", 4))
BELONGS = {
    "recompute_modules": "selective",
    "recompute_method": "full",
    "recompute_layers": "full",
    "offload_checkpoints": "full",
}
NOTHING: Mapping[str, Any] = {}


def advice(change: Change | None) -> str:
    """One sentence for a person."""
    if change is None:
        return (
            f"Neither other pins, nor a technique added, nor more nodes, up to {DEFAULT_MOST_NODES}, nor a "
            f"{SHORTER[-1]} times shorter sequence would fit."
        )
    return f"Smallest change that fits: {change.sentence()} ({change.layout.describe()})."


def smallest_change(setting: Setting) -> Change | None:
    """The first of these that holds a safe layout; None where none does:

    one pin of the layout set to another value; all of the host's memory; even stages; one word of techniques set
    otherwise; more pins; a technique added that no search chooses; more nodes; a shorter sequence. Of several pins the
    fewest, then the least far, then the fastest.
    """
    pinned = _by_pins(widened(setting)) if setting.recipe.pins else None
    if pinned is not None and len(pinned.settings) == 1:
        return pinned
    told = next(_safe(setting, _let_go(setting.recipe)), None) or _by_words(setting)
    if told is not None or pinned is not None:
        return told or pinned
    return next(_safe(setting, _added(setting.recipe)), None) or next(_larger(setting), None)


def _by_pins(
    wide: Widened, settings: Mapping[str, Any] = NOTHING, before: Mapping[str, Any] = NOTHING
) -> Change | None:
    """The nearest safe layout's pins, with the `settings` under which it was searched."""
    row = wide.nearest_safe()
    if row is None:
        return None
    recipe = wide.setting.recipe
    new: dict[str, Any] = {name: as_pin(name, value) for name, value in wide.changes(row).items()}
    old = {name: recipe.pins[name] for name in new}
    changed = {**settings}
    for name, value in new.items():
        pin = written_pin(recipe, name)
        changed[pin.key] = None if value is None else pin.value(value)
        before = {**before, pin.key: pin.value(old[name])}
    kept = {name: pin for name, pin in {**recipe.pins, **new}.items() if pin is not None}
    change = Change(changed, replace(recipe, pins=kept), wide.found.points.layout(row), before)
    return _fastest(wide.setting, _tidied(change) if "recompute" in new else change)


def _fastest(setting: Setting, change: Change) -> Change | None:
    """The change with the layout that is planned once it is applied."""
    found = search(setting.with_recipe(change.recipe))
    return replace(change, layout=found.candidate(change.recipe, 0).layout) if np.any(found.safe) else None


def _tidied(change: Change) -> Change:
    """What belongs to the recompute that was pinned goes with it, or the changed recipe would contradict itself."""
    recipe, now = change.recipe, change.recipe.pins["recompute"]
    away = [name for name, kind in BELONGS.items() if kind != now and stated_value(recipe, name) is not None]
    for name in away:
        recipe = without(recipe, name)
    return replace(change, settings={**change.settings, **{f"layout.{name}": None for name in away}}, recipe=recipe)


def _safe(setting: Setting, changes: Iterator[Change]) -> Iterator[Change]:
    """Those that leave a safe layout, with it. What the backend cannot do is none."""
    for change in changes:
        try:
            found = _fastest(setting, change)
        except UserError:
            continue
        if found is not None:
            yield found


def _let_go(recipe: Recipe) -> Iterator[Change]:
    """All of the node's memory; even stages."""
    if recipe.slurm.get("mem") not in (None, False, 0, "0"):
        changed = replace(recipe, slurm={**recipe.slurm, "mem": 0})
        yield Change({"slurm.mem": 0}, changed, Layout(), {"slurm.mem": recipe.slurm["mem"]})
    if recipe.layers_by_stage:
        yield Change({"layout.layers_by_stage": None}, replace(recipe, layers_by_stage=None), Layout())


def _by_words(setting: Setting) -> Change | None:
    """Of the words the recipe chooses itself, amounts of layers among them, the one that makes the fastest safe layout
    possible where it is free, with what is then chosen for it. Never the format of gradients: it changes the numbers a
    model learns from."""
    recipe = setting.recipe
    names = [name for name in recipe.fixed if name != "gradient_dtype"] + [n for n in recipe.pins if n in AMOUNTS]
    best: tuple[float, Change] | None = None
    for name in names:
        free = without(recipe, name) if name in AMOUNTS else unfixed(recipe, name)
        found = search(setting.with_recipe(free))
        if np.any(found.safe):
            chosen = found.candidate(free, 0)
            if best is None or chosen.step_seconds < best[0]:
                best = (chosen.step_seconds, _worded(recipe, name, chosen))
    return None if best is None else best[1]


def _worded(recipe: Recipe, name: str, chosen: Candidate) -> Change:
    """The recipe that says what was chosen for the word; where that is nothing, says nothing of it."""
    key, amount = f"layout.{name}", name in AMOUNTS
    before = recipe.pins[name] if amount else getattr(recipe.techniques, name)
    value = getattr(chosen.layout if amount else chosen.techniques, name)
    value = list(value) if isinstance(value, tuple) else value
    if not value:
        return Change({key: None}, without(recipe, name), chosen.layout, {key: before})
    return Change({key: value}, with_technique(without(recipe, name), name, value), chosen.layout, {key: before})


def _added(recipe: Recipe) -> Iterator[Change]:
    """Each technique the recipe says nothing of."""
    for name, value in ADDED:
        if stated_value(recipe, name) is None:
            yield Change({f"layout.{name}": value}, with_technique(recipe, name, value), Layout())


def _larger(setting: Setting) -> Iterator[Change]:
    """More nodes, then a shorter sequence, each with as few of the pins changed as do."""
    recipe = setting.recipe
    unhurried = setting.with_recipe(replace(freed(setting), budget=NO_BUDGET))
    nodes = smallest_cluster(unhurried, recipe.nodes + 1, most_nodes(unhurried.recipe)).nodes
    if nodes is not None:
        wide = widened(setting.with_recipe(replace(recipe, nodes=nodes)))
        found = _by_pins(wide, *_nodes_set(recipe, nodes))
        if found is not None:
            yield found
    for factor in SHORTER:
        length = recipe.workload.sequence_length // factor
        if length >= 1:
            training = replace(recipe.training, sequence_length=length)
            key = "training.sequence_length"
            wide = widened(setting.with_recipe(replace(recipe, training=training)))
            found = _by_pins(wide, {key: length}, {key: recipe.workload.sequence_length})
            if found is not None:
                yield found


def _nodes_set(recipe: Recipe, nodes: int) -> tuple[dict[str, int], dict[str, int]]:
    """What to write for so many nodes, and what stands there now."""
    most = recipe.budget.max_nodes
    if most is None or nodes <= most:
        return {"nodes": nodes}, {"nodes": recipe.nodes}
    return {"nodes": nodes, "budget.max_nodes": nodes}, {"nodes": recipe.nodes, "budget.max_nodes": most}
