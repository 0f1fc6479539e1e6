"""Changed recipes and layouts, and what becomes of them: what neighbours, hints and advice are made of.

Each of these is a list of changes to try and an order of preference. A changed recipe is searched (`planned`), changed
layouts are judged side by side (`judge_layouts`), and all that is looked at counts for the budget of whoever asks
(`PricingBudget`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmlaunch.columns import FloatColumn, IntColumn
from llmlaunch.errors import UserError
from llmlaunch.layout import AMOUNTS, RECOMPUTE_LAYERS, RECOMPUTE_NAMES, Layout, LayoutColumns, Rule
from llmlaunch.memory.estimator import estimate, worst_ranks
from llmlaunch.planner.headroom import search_with_headroom
from llmlaunch.planner.legality import situation
from llmlaunch.planner.points import evidence_of, rehearsal_on
from llmlaunch.planner.search import BROKEN_ESTIMATE, HOST_MEMORY, MEMORY, REHEARSED, SearchResult, search
from llmlaunch.planner.search_space import Candidate, Change, as_ints, searched_values
from llmlaunch.planner.setting import Setting, count_candidates, node_of
from llmlaunch.recipe.layout_keys import belonging
from llmlaunch.recipe.types import Recipe
from llmlaunch.recipe.written import written_pin
from llmlaunch.techniques import NO_TECHNIQUES
from llmlaunch.timing.step import step_time
from llmlaunch.units import GIB
from llmlaunch.verdicts import TIGHT

BELONGS = {name: kind for name, (owner, kind) in belonging().items() if owner == "recompute"}  # to a kind of recompute
KINDS = frozenset({"sequence_parallel", "zero_stage", "recompute"})


def planned(setting: Setting, recipe: Recipe) -> Candidate | None:
    """Return what is planned for a changed recipe; None where nothing is safe or its backend cannot do it."""
    result = _safe_result(setting, recipe)
    return None if result is None else result.candidate(recipe, 0)


def _safe_result(setting: Setting, recipe: Recipe) -> SearchResult | None:
    try:
        result = search_with_headroom(setting.with_recipe(recipe), exact=1, safe_alone=True)
    except UserError:
        return None
    return result if np.any(result.safe) else None


def safe_changes(setting: Setting, changes: Iterable[tuple[float, Change]]) -> Iterator[Change]:
    """Yield the changes that leave a safe layout, with the layout that is planned then. `changes` come with how far
    they are, the nearest first; of those that are equally far, the best by the ranking is yielded."""
    for _, near in groupby(changes, key=itemgetter(0)):
        safe = [(result, change) for _, change in near if (result := _safe_result(setting, change.recipe)) is not None]
        if safe:
            result, change = min(safe, key=lambda pair: _ranked_seconds(pair[0]))
            yield replace(change, layout=result.candidate(change.recipe, 0).layout)


def _ranked_seconds(result: SearchResult) -> float:
    """Return what the first of the ranking is ranked by, whether or not it gave way for its head-room."""
    return float(result.preferred_seconds[result.first[0] if result.gave_way is None else result.gave_way])


def nearest_pins(setting: Setting) -> dict[str, int] | None:
    """Return the pins to change, with their values, for the safe layout that breaks the fewest of them, then is the
    least far from those it breaks, then is the fastest; None where no layout is safe whatever the pins."""
    pins = setting.recipe.pins
    result = search(setting.with_recipe(relax_pins(setting)), whole=True)
    safe = np.flatnonzero(result.safe)
    if not len(safe):
        return None
    columns = {name: result.points.take(safe).column(name) for name in pins}
    away = np.array([pin_distance(name, as_ints(name, pins[name]), column) for name, column in columns.items()])
    order = (result.preferred_seconds[safe], np.round(away.sum(axis=0), 9), np.count_nonzero(away, axis=0))
    best = int(np.lexsort(order)[0])
    return {name: int(columns[name][best]) for name, far in zip(pins, away[:, best], strict=True) if far}


def relax_pins(setting: Setting, keep: Iterable[str] = ()) -> Recipe:
    """Return the recipe with every pin but those of `keep` replaced by all that pin and backend offer together."""
    recipe = setting.recipe
    space = setting.backend.space(recipe)
    pins: dict[str, Any] = {name: pin for name, pin in recipe.pins.items() if name in keep}
    for name in recipe.pins.keys() - pins.keys() - {"data"}:  # data follows from the others
        values = dict.fromkeys((*as_ints(name, recipe.pins[name]), *searched_values(recipe, space, name)))
        pins[name] = tuple(RECOMPUTE_NAMES[value] if name == "recompute" else value for value in values)
    return replace(recipe, pins=pins)


def as_pin(name: str, value: int) -> int | bool | str | None:
    """Return a number of a layout as a recipe writes it; None where the recipe writes nothing."""
    if name == "recompute":
        return RECOMPUTE_NAMES[value]
    if name == RECOMPUTE_LAYERS and not value:
        return None
    return bool(value) if name == "sequence_parallel" else value


def pin_distance(name: str, pinned: tuple[int, ...], column: IntColumn) -> FloatColumn:
    """Return how far each value is from the nearest pinned one: in powers of two for a size, in steps for a kind."""

    def place(values: IntColumn) -> FloatColumn:
        if name in KINDS:
            return values.astype(np.float64)
        sizes: FloatColumn = np.log2(values + 1.0 if name in AMOUNTS else np.maximum(values, 1.0))
        return sizes

    nearest: FloatColumn = np.abs(place(column)[:, None] - place(np.array(pinned))).min(axis=1)
    return nearest


def unchanged(recipe: Recipe) -> Change:
    """Return the change that changes nothing, to be built upon."""
    return Change({}, recipe, Layout())


def with_pins(change: Change, values: Mapping[str, int]) -> Change:
    """Return the change with pins set to these values, too. Settings that belong to another kind of recompute than the
    pinned one go: the changed recipe would contradict itself."""
    recipe, settings, before = change.recipe, {**change.settings}, {**change.before}
    pins: dict[str, Any] = {**recipe.pins, **{name: as_pin(name, value) for name, value in values.items()}}
    for name in values:
        pin = written_pin(recipe, name)
        settings[pin.key] = None if pins[name] is None else pin.value(pins[name])
        before[pin.key] = pin.value(recipe.pins[name])
    changed = replace(recipe, pins={name: pin for name, pin in pins.items() if pin is not None})
    for name, kind in BELONGS.items() if "recompute" in values else ():
        if kind != pins["recompute"] and stated_value(recipe, name) is not None:
            changed, settings[f"layout.{name}"] = without(changed, name), None
    return replace(change, settings=settings, recipe=changed, before=before)


def with_chosen_technique(recipe: Recipe, name: str, chosen: Candidate) -> Change:
    """Return the change that writes what was chosen for a technique or an amount of layers; one that is off goes."""
    key, free = f"layout.{name}", without(recipe, name)
    if name in AMOUNTS:
        before, value = recipe.pins[name], getattr(chosen.layout, name)
        changed = replace(free, pins={**free.pins, name: value})
    else:
        before, value = getattr(recipe.techniques, name), getattr(chosen.techniques, name)
        one: dict[str, Any] = {name: value}
        changed = replace(free, techniques=replace(free.techniques, **one), fixed=(*free.fixed, name))
    written = list(value) if isinstance(value, tuple) else value
    return Change({key: written or None}, changed if value else free, chosen.layout, {key: before})


def resized(recipe: Recipe, key: str, value: int) -> Change:
    """Return the change of `nodes`, which may need a larger budget, or of a size under `training`."""
    if key != "nodes":
        size: dict[str, Any] = {(name := key.partition(".")[2]): value}
        changed = replace(recipe, training=replace(recipe.training, **size))
        return Change({key: value}, changed, Layout(), {key: getattr(recipe.workload, name)})
    settings, before, most = {"nodes": value}, {"nodes": recipe.nodes}, recipe.budget.max_nodes
    if most is not None and value > most:
        settings["budget.max_nodes"], before["budget.max_nodes"] = value, most
    return Change(settings, replace(recipe, nodes=value), Layout(), before)


def unfixed(recipe: Recipe, name: str) -> Recipe:
    """Return the recipe with this technique left for the planner to choose."""
    return replace(recipe, fixed=tuple(other for other in recipe.fixed if other != name))


def without(recipe: Recipe, name: str) -> Recipe:
    """Return the recipe without a pin or a technique."""
    if name in recipe.pins:
        return replace(recipe, pins={other: pin for other, pin in recipe.pins.items() if other != name})
    none: dict[str, Any] = {name: getattr(NO_TECHNIQUES, name)}
    return replace(unfixed(recipe, name), techniques=replace(recipe.techniques, **none))


def fixed_value(recipe: Recipe, name: str) -> Any:
    """Return the value of a technique that the recipe fixes; the format of gradients is one of the training."""
    return recipe.training.gradient_dtype if name == "gradient_dtype" else getattr(recipe.techniques, name)


def stated_value(recipe: Recipe, name: str) -> Any:
    """Return what `layout:` states for a pin or technique; None where it states nothing."""
    if name in recipe.pins:
        return recipe.pins[name]
    value = getattr(recipe.techniques, name, None)
    return None if value == getattr(NO_TECHNIQUES, name, None) else value


@dataclass(frozen=True)
class Refusal:
    """Why a layout is refused. `key` is a rule's key, "tight", "memory", "host_memory", "broken_estimate" or
    "rehearsed"; `reason` is the rule's sentence, what overflows and by how much, which law of memory the estimate
    breaks, or what a rehearsal showed."""

    key: str
    reason: str


@dataclass(frozen=True)
class LayoutVerdict:
    """One layout with its step seconds and device bytes, both None where a rule refuses the layout before pricing."""

    layout: Layout
    step_seconds: float | None
    device_bytes: int | None
    refusal: Refusal | None

    @property
    def legal(self) -> bool:
        return self.device_bytes is not None


def rules_failed(recipe: Recipe, layouts: LayoutColumns, rules: Sequence[Rule]) -> NDArray[np.bool_]:
    """Return which rule (row) refuses which layout (column)."""
    judged = situation(recipe, layouts)
    return np.array([~rule.allows(judged) for rule in rules], dtype=np.bool_).reshape(len(rules), len(layouts))


def judge_layouts(setting: Setting, layouts: Sequence[Layout]) -> list[LayoutVerdict]:
    """Return the verdict on each of `layouts`, which split exactly the recipe's devices, in their order.

    Raises:
        UserError: the backend cannot do what the recipe asks for, whatever the layout.
    """
    # In the order of a search, which asks rules of techniques last.
    rules = sorted(setting.backend.rules(setting.recipe), key=lambda rule: rule.of_techniques)
    failed = rules_failed(setting.recipe, LayoutColumns.of(layouts), rules)
    refusals = [next((rule for rule, fails in zip(rules, column, strict=True) if fails), None) for column in failed.T]
    priced = iter(_priced(setting, [at for at, rule in zip(layouts, refusals, strict=True) if rule is None]))
    return [
        next(priced) if rule is None else LayoutVerdict(at, None, None, Refusal(rule.key, rule.sentence))
        for at, rule in zip(layouts, refusals, strict=True)
    ]


def safe_layouts(setting: Setting, recipe: Recipe, layouts: Sequence[Layout]) -> list[tuple[float, Layout]]:
    """Return those of the `layouts` that are safe with a changed recipe, and the seconds of their steps; none where its
    backend cannot do it."""
    try:
        verdicts = judge_layouts(setting.with_recipe(recipe), layouts)
    except UserError:
        return []
    return [(v.step_seconds, v.layout) for v in verdicts if v.refusal is None and v.step_seconds is not None]


def _priced(setting: Setting, layouts: Sequence[Layout]) -> list[LayoutVerdict]:
    columns = LayoutColumns.of(layouts)
    count_candidates(len(layouts))
    if not layouts:
        return []
    device = worst_ranks(setting.job, columns).device_bytes
    seconds = setting.lessons.shared_factor * step_time(setting.job, setting.cluster, columns).total
    decisive = [step for step in setting.lessons.measured_steps if step.decides]
    ran = [evidence_of(decisive, setting.recipe, layout) for layout in layouts]
    return [
        LayoutVerdict(
            layout,
            float(seconds[i]) if (measured := ran[i]) is None else measured.step_seconds,
            int(device[i]),
            _by_memory(setting, layout),
        )
        for i, layout in enumerate(layouts)
    ]


def _by_memory(setting: Setting, layout: Layout) -> Refusal | None:
    detail = estimate(setting.job, layout, node=node_of(setting.recipe))
    worst, limit, host = detail.worst, setting.limit.limit_bytes, setting.host_limit.limit_bytes
    rehearsed = rehearsal_on(setting, layout, worst.device_bytes)
    if detail.fault is not None:
        return Refusal(BROKEN_ESTIMATE, f"its estimate cannot be right, which is a bug of llmlaunch: {detail.fault}")
    if rehearsed is not None and rehearsed.refuses(limit):
        return Refusal(REHEARSED, rehearsed.sentence)
    if worst.device_bytes > limit and not (rehearsed is not None and rehearsed.allows(limit)):
        over = (worst.device_bytes - limit) / GIB
        return Refusal(
            TIGHT if setting.limit.verdict_of(worst.device_bytes) == TIGHT else MEMORY,
            f"needs {over:.1f} GiB more than the limit on pipeline rank {worst.pipeline_rank}, "
            f"most of it {_largest(worst.terms)}",
        )
    needs = detail.host_bytes_per_node or 0
    if needs > host:
        return Refusal(
            HOST_MEMORY,
            f"a node needs {(needs - host) / GIB:.1f} GiB more host memory than the limit, "
            f"most of it {_largest(detail.host_terms)}",
        )
    return None


def _largest(terms: Mapping[str, int]) -> str:
    term, size = max(terms.items(), key=lambda item: item[1])
    return f"{term.replace('_', ' ')} with {size / GIB:.1f} GiB"
