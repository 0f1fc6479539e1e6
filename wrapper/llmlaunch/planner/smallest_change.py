"""The smallest change of a recipe that makes a layout safe, for recipes where none is; and pins against the whole
space: which layouts keep which pins, and how far the others are from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations, groupby
from operator import itemgetter
from typing import Any

import numpy as np

from llmlaunch.columns import FloatColumn, IntColumn
from llmlaunch.errors import UserError
from llmlaunch.layout import RECOMPUTE_NAMES, Layout
from llmlaunch.planner.headroom import search_with_headroom
from llmlaunch.planner.least_nodes import LeastDevices
from llmlaunch.planner.plan import Candidate
from llmlaunch.planner.search import SearchResult, search
from llmlaunch.planner.search_space import MOST_CONTEXT, as_ints, offered_values
from llmlaunch.planner.setting import Setting
from llmlaunch.planner.sizing import DEFAULT_MOST_NODES, fewest_safe, most_nodes
from llmlaunch.recipe.overrides import written_pin
from llmlaunch.recipe.types import NO_BUDGET, Recipe
from llmlaunch.techniques import NO_TECHNIQUES

__all__ = [
    "BELONGS",
    "Change",
    "RelaxedSearch",
    "advice",
    "as_pin",
    "relax_pins",
    "search_relaxed",
    "smallest_change",
    "stated_value",
    "unfixed",
    "yaml_text",
]


KINDS = frozenset({"sequence_parallel", "zero_stage", "recompute"})
AMOUNTS = frozenset({"recompute_layers", "offload_layers"})  # 0 means none


@dataclass(frozen=True)
class RelaxedSearch:
    """The legal layouts of a search in which every pin may also take other values. Bit j of `kept_pins` says whether a
    layout keeps pin j, and `distance` how far it is from the pins it breaks: in powers of two for a size, in steps for
    a kind."""

    setting: Setting
    result: SearchResult
    names: tuple[str, ...]
    kept_pins: IntColumn
    distance: FloatColumn

    def nearest_safe(self) -> int | None:
        """Return the safe layout that changes the fewest pins, then the least, then the fastest."""
        safe = np.flatnonzero(self.result.safe)
        if not len(safe):
            return None
        bit_counts = np.array([bin(bits).count("1") for bits in range(1 << len(self.names))])
        count = bit_counts[self.kept_pins[safe]]
        safe = safe[count == count.max()]
        far = np.round(self.distance[safe], 9)
        safe = safe[far == far.min()]
        return int(safe[np.argmin(self.result.preferred_seconds[safe])])

    def conflict(self) -> tuple[str, ...] | None:
        """Return the smallest set of pins that no legal layout keeps together; None where all can be kept, and an empty
        set where no layout is legal whatever the pins."""
        combinations_kept = np.unique(self.kept_pins)
        for size in range(len(self.names) + 1):
            for some in combinations(range(len(self.names)), size):
                bits = sum(1 << j for j in some)
                if not np.any((combinations_kept & bits) == bits):
                    return tuple(self.names[j] for j in some)
        return None

    def legal_values(self, name: str) -> list[int]:
        """Return the values of pin `name` in legal layouts that keep all other pins."""
        others = (1 << len(self.names)) - 1 - (1 << self.names.index(name))
        return sorted(set(self.result.points.column(name)[(self.kept_pins & others) == others].tolist()))

    def changes(self, row: int) -> dict[str, int]:
        """Return the pins that layout `row` breaks, with its values, in the order of the recipe."""
        broken = [name for j, name in enumerate(self.names) if not self.kept_pins[row] >> j & 1]
        return {name: int(self.result.points.column(name)[row]) for name in broken}


def search_relaxed(setting: Setting) -> RelaxedSearch:
    """Search as if there were no pins; the values they name are searched beside what the backend offers."""
    result = search(setting.with_recipe(relax_pins(setting)), whole=True)
    pins = setting.recipe.pins
    kept, distance = np.zeros(len(result.points), dtype=np.int64), np.zeros(len(result.points))
    for j, (name, pin) in enumerate(pins.items()):
        off = _distance(name, as_ints(name, pin), result.points.column(name))
        kept |= np.equal(off, 0.0).astype(np.int64) << j
        distance += off
    return RelaxedSearch(setting, result, tuple(pins), kept, distance)


def relax_pins(setting: Setting, keep: Iterable[str] = ()) -> Recipe:
    """Return the recipe with every pin but those of `keep` replaced by all that pin and backend offer together."""
    recipe = setting.recipe
    space = setting.backend.space(recipe)
    pins: dict[str, Any] = {name: pin for name, pin in recipe.pins.items() if name in keep}
    for name in recipe.pins.keys() - pins.keys() - {"data"}:  # data follows from the others
        values = dict.fromkeys((*as_ints(name, recipe.pins[name]), *offered_values(recipe, space, name)))
        pins[name] = tuple(RECOMPUTE_NAMES[value] if name == "recompute" else value for value in values)
    return replace(recipe, pins=pins)


def as_pin(name: str, value: int) -> int | bool | str | None:
    """Return a number of a layout as a recipe writes it; None where the recipe writes nothing."""
    if name == "recompute":
        return RECOMPUTE_NAMES[value]
    if name == "recompute_layers" and not value:
        return None
    return bool(value) if name == "sequence_parallel" else value


def _distance(name: str, pinned: tuple[int, ...], column: IntColumn) -> FloatColumn:
    """Return how far each value is from the nearest pinned one. Values are small: each is measured once."""
    values = np.arange(column.max(initial=0) + 1, dtype=np.float64)[:, None]
    targets = np.array(pinned, dtype=np.float64)
    if name in KINDS:
        away = np.abs(values - targets)
    else:
        none = 1.0 if name in AMOUNTS else 0.0
        away = np.abs(np.log2(np.maximum(values, 1.0 - none) + none) - np.log2(targets + none))
    nearest: FloatColumn = away.min(axis=1)[column]
    return nearest


SHORTER = (2, 4, 8, 16, 32)
BELONGS = {
    "recompute_modules": "selective",
    "recompute_method": "full",
    "recompute_layers": "full",
    "offload_checkpoints": "full",
}
NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Change:
    """A change of a recipe. `settings` maps dotted keys to what to write there, None to remove the key; `before` holds
    the present values of those keys. `recipe` is the changed recipe and `layout` its fastest safe layout."""

    settings: Mapping[str, Any]
    recipe: Recipe
    layout: Layout
    before: Mapping[str, Any] = field(default_factory=dict)

    def sentence(self) -> str:
        """Return the change as one clause: `set layout.tensor: 8 (from 4) and layout.data: 4 (from 8)`."""
        clauses = [self._clause(key, value) for key, value in self.settings.items()]
        runs = (f"{verb} {' and '.join(what for _, what in run)}" for verb, run in groupby(clauses, key=itemgetter(0)))
        return " and ".join(runs)

    def _clause(self, key: str, value: Any) -> tuple[str, str]:
        if value is None:
            return "remove", key
        if key not in self.before:
            return "add", f"{key}: {yaml_text(value)}"
        return "set", f"{key}: {yaml_text(value)} (from {yaml_text(self.before[key])})"


def yaml_text(value: Any) -> str:
    """Return a value as YAML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"[{', '.join(map(yaml_text, value))}]" if isinstance(value, (list, tuple)) else str(value)


def advice(change: Change | None) -> str:
    """Return the change as one sentence for a person."""
    if change is None:
        return (
            f"Neither other pins, nor a technique added, nor more nodes, up to {DEFAULT_MOST_NODES}, nor a "
            f"{SHORTER[-1]} times shorter sequence would be safe."
        )
    return f"Smallest change that is safe: {change.sentence()} ({change.layout.describe()})."


def smallest_change(setting: Setting) -> Change | None:
    """Return the first of these changes that yields a safe layout, or None:

    one pin of the layout set to another value; all of the host's memory; even stages; one technique set otherwise;
    more pins; techniques kept out of the search; more nodes; a shorter sequence. Of several pins the fewest,
    then the least far, then the fastest.
    """
    by_pins = _by_pins(search_relaxed(setting)) if setting.recipe.pins else None
    if by_pins is not None and len(by_pins.settings) == 1:
        return by_pins
    change = next(_safe(setting, _relaxed_requests(setting.recipe)), None) or _by_techniques(setting)
    if change is not None or by_pins is not None:
        return change or by_pins
    return next(_safe(setting, _lifted_limit(setting.recipe)), None) or next(_larger(setting), None)


def _by_pins(
    relaxed: RelaxedSearch, settings: Mapping[str, Any] = NOTHING, before: Mapping[str, Any] = NOTHING
) -> Change | None:
    """Return the pins of the nearest safe layout, with the `settings` under which it was searched."""
    row = relaxed.nearest_safe()
    if row is None:
        return None
    recipe = relaxed.setting.recipe
    new: dict[str, Any] = {name: as_pin(name, value) for name, value in relaxed.changes(row).items()}
    changed = {**settings}
    for name, value in new.items():
        pin = written_pin(recipe, name)
        changed[pin.key] = None if value is None else pin.value(value)
        before = {**before, pin.key: pin.value(recipe.pins[name])}
    pins = {name: pin for name, pin in {**recipe.pins, **new}.items() if pin is not None}
    change = Change(changed, replace(recipe, pins=pins), relaxed.result.points.layout(row), before)
    return _with_planned_layout(relaxed.setting, _tidied(change) if "recompute" in new else change)


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


def _larger(setting: Setting) -> Iterator[Change]:
    """Yield more nodes, then shorter sequences, each with as few of the pins changed as do."""
    recipe = setting.recipe
    safe_alone = replace(recipe.memory, accept=None)
    without_budget = setting.with_recipe(replace(relax_pins(setting), budget=NO_BUDGET, memory=safe_alone))
    trial = fewest_safe(without_budget, recipe.nodes + 1, most_nodes(without_budget.recipe))
    if trial is not None:
        larger = setting.with_recipe(replace(recipe, nodes=trial.nodes))
        yield from _with_other_pins(larger, *_node_settings(recipe, trial.nodes), trial.layout)
    for length in _shorter(without_budget):
        training = replace(recipe.training, sequence_length=length)
        key = "training.sequence_length"
        shorter = setting.with_recipe(replace(recipe, training=training))
        yield from _with_other_pins(shorter, {key: length}, {key: recipe.workload.sequence_length})


def _shorter(setting: Setting) -> Iterator[int]:
    """Yield the shorter sequences with which the devices may hold the model. A shorter one that as many ranks can share
    needs no more than a longer one, so nothing else is asked where the shortest cannot."""
    training, world = setting.recipe.training, setting.recipe.world_size
    lengths = [length for factor in SHORTER if (length := training.sequence_length // factor) >= 1]

    @cache
    def may_hold(length: int) -> bool:
        recipe = replace(setting.recipe, training=replace(training, sequence_length=length))
        return LeastDevices(setting.with_recipe(recipe), world).may_hold(world)

    if lengths and (lengths[-1] % MOST_CONTEXT or may_hold(lengths[-1])):
        yield from filter(may_hold, lengths)


def _with_other_pins(
    setting: Setting, settings: Mapping[str, Any], before: Mapping[str, Any], layout: Layout | None = None
) -> Iterator[Change]:
    """Yield the `settings` under which a setting is searched, with as few of its pins changed as leave a safe layout;
    nothing where none does. `layout` is the fastest safe one where a search of any pins found it."""
    if setting.recipe.pins:
        change = _by_pins(search_relaxed(setting), settings, before)
    elif layout is not None:
        change = Change(settings, setting.recipe, layout, before)
    else:  # nothing to relax: the search of the plan says it all
        change = _with_planned_layout(setting, Change(settings, setting.recipe, Layout(), before))
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
