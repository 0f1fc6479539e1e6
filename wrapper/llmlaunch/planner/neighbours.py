"""What each neighbouring choice would cost: one choice of the chosen layout changed, the world size kept.

The sizes come first; then the ways to hold states and gradients, to recompute and to offload, with the split kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmlaunch.errors import UserError
from llmlaunch.frameworks.base import StateTechniques, StepTechniques
from llmlaunch.layout import (
    OFFLOAD_LAYERS,
    RECOMPUTE_FULL,
    RECOMPUTE_LAYERS,
    RECOMPUTE_NAMES,
    RECOMPUTE_NONE,
    Layout,
    LayoutColumns,
)
from llmlaunch.planner.changes import LayoutVerdict, judge_layouts, rules_failed
from llmlaunch.planner.points import Points
from llmlaunch.planner.pricing import price_all
from llmlaunch.planner.search_space import (
    SPLIT_FIELDS,
    TechniqueSpace,
    host_labels,
    offered_values,
    recipe_with_techniques,
    switches_beside,
    technique_space,
)
from llmlaunch.planner.setting import Setting, within_budget
from llmlaunch.planner.technique_batches import is_safe
from llmlaunch.rundir.values import counted
from llmlaunch.techniques import (
    MOVING_NAMES,
    NO_TECHNIQUES,
    SWITCH_NAMES,
    ActivationTreatments,
    StateTreatments,
)
from llmlaunch.techniques.technique import declarations

Value = int | bool | str | float | None
ChosenTechniques = tuple[StepTechniques, StateTechniques]

ORDER = (
    *("zero_stage", "gradient_dtype", *declarations(StateTreatments), "recompute", "offload"),
    *SWITCH_NAMES,
)
OFFLOADS = tuple(name for name in declarations(ActivationTreatments) if name in MOVING_NAMES)
NEIGHBOUR_CANDIDATES = 100_000  # (`PricingBudget`)
# What gives way where a change alone breaks a rule: sequence parallelism comes and goes with tensor parallelism, and
# virtual stages split what the pipeline has split.
GIVES_WAY = {"tensor": "sequence_parallel", "pipeline": "virtual_pipeline"}


@dataclass(frozen=True)
class Neighbour:
    """The choice `name` changed from `before` to `after`. `along` maps the other layout fields that had to follow to
    their new values, except data parallelism, which takes up every change of a size."""

    name: str
    before: Value
    after: Value
    verdict: LayoutVerdict
    along: Mapping[str, Value] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return plain values. `refused` is a rule's key, "memory", "host_memory" or "rehearsed", null where the layout
        is safe; a layout that a rule refuses has no figures."""
        verdict, refusal = self.verdict, self.verdict.refusal
        return {
            "field": self.name,
            "from": self.before,
            "to": self.after,
            "along": dict(self.along),
            "layout": verdict.layout.as_json(),
            "step_seconds": verdict.step_seconds,
            "device_bytes": verdict.device_bytes,
            "refused": None if refusal is None else refusal.key,
            "reason": None if refusal is None else refusal.reason,
        }


def neighbours(setting: Setting, chosen: Layout) -> list[Neighbour]:
    """Return the neighbours of the chosen layout: for each size the next legal value down and up, then every other way
    to hold states and gradients, to recompute and to offload. `setting` is of the recipe with the chosen techniques."""
    both = (near for kind in (_size_neighbours, technique_neighbours) for near in kind(setting, chosen))
    return within_budget(NEIGHBOUR_CANDIDATES, both)[0]


def _size_neighbours(setting: Setting, chosen: Layout) -> Iterator[Neighbour]:
    without, switches_off = _switched_off(setting)
    tries = list(_size_steps(setting, chosen))
    names, nearest = [name for name, _ in tries], [_least_broken(without, layouts) for _, layouts in tries]
    layouts, here = _amounts_solved(setting, chosen, nearest), chosen.as_json()
    verdicts = zip(names, judge_layouts(setting, layouts), judge_layouts(without, layouts), strict=True)
    for name, verdict, plain in verdicts:
        gives_way = not verdict.legal and verdict.refusal != plain.refusal
        there = verdict.layout.as_json()
        follows = [n for n in there if there[n] != here[n] and n not in (name, "data", "layers_by_stage")]
        along = {n: _plain(there[n]) for n in follows} | (switches_off if gives_way else {})
        yield Neighbour(name, _plain(here[name]), _plain(there[name]), plain if gives_way else verdict, along)


def _switched_off(setting: Setting) -> tuple[Setting, dict[str, Value]]:
    """Return the setting without the switches that the search turned on, and these with the values they have then."""
    techniques, fixed = setting.recipe.techniques, setting.recipe.fixed
    off = {name: getattr(NO_TECHNIQUES, name) for name in SWITCH_NAMES if name not in fixed}
    changed = {name: value for name, value in off.items() if getattr(techniques, name) != value}
    plain = replace(setting.recipe, techniques=replace(techniques, **changed))
    return setting.with_recipe(plain), {name: _plain(value) for name, value in changed.items()}


def _plain(value: object) -> Value:
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    assert value is None or isinstance(value, (int, str, float))
    return value


def _size_steps(setting: Setting, chosen: Layout) -> Iterator[tuple[str, list[list[Layout]]]]:
    """Yield for each size the values below it, then those above it, the nearest first: each with the layouts that have
    it, alone and together with what gives way."""
    recipe = setting.recipe
    space = setting.backend.space(recipe)
    for name in SPLIT_FIELDS:
        now, values = getattr(chosen, name), sorted(offered_values(recipe, space, name)) if name != "data" else []
        for side in (reversed([v for v in values if v < now]), [v for v in values if v > now]):
            layouts = [list(_changes(setting, chosen, name, value)) for value in side]
            if any(layouts):
                yield name, [of_value for of_value in layouts if of_value]


def _least_broken(setting: Setting, tries: Sequence[Sequence[Layout]]) -> Layout:
    """Return the first layout that is legal; where none is, the one with the nearest value that breaks fewest rules, so
    that what is said to refuse it is what nothing that gives way would mend."""
    layouts = [layout for of_value in tries for layout in of_value]
    broken = np.count_nonzero(_failed(setting, LayoutColumns.of(layouts)), axis=0)
    return layouts[int(np.argmin(broken if broken.min() == 0 else broken[: len(tries[0])]))]


def _failed(setting: Setting, layouts: LayoutColumns) -> NDArray[np.bool_]:
    return rules_failed(setting.recipe, layouts, setting.backend.rules(setting.recipe))


def _changes(setting: Setting, chosen: Layout, name: str, value: int) -> Iterator[Layout]:
    """Yield the change alone, then together with what gives way to it, the nearest value first; nothing where the sizes
    do not split the devices. The data size takes up the change, and stages become even."""
    size: dict[str, Any] = {name: value}
    if name in ("pipeline", "virtual_pipeline"):
        size["layers_by_stage"] = ()
    changed = replace(chosen, **size)
    data, left = divmod(chosen.world_size, changed.tensor * changed.pipeline * changed.context)
    if left:
        return
    changed = replace(changed, data=data)
    yield changed
    if (other := GIVES_WAY.get(name)) is not None:
        recipe, now = setting.recipe, getattr(chosen, other)
        values = [v for v in offered_values(recipe, setting.backend.space(recipe), other) if v != now]
        for near in sorted(values, key=lambda v: abs(log2(max(v, 0.5) / max(now, 0.5)))):
            follows: dict[str, Any] = {other: near}
            yield replace(changed, **follows)


def _amounts_solved(setting: Setting, chosen: Layout, layouts: list[Layout]) -> list[Layout]:
    """Give each legal layout as many recomputed or offloaded layers as it needs, where the planner solved that amount
    for the chosen layout."""
    step, state = _techniques_of(setting, chosen)
    if step.solved is None or not layouts:
        return layouts
    columns, answer = LayoutColumns.of(layouts), [*layouts]
    legal = np.flatnonzero(~_failed(setting, columns).any(axis=0))
    plain = replace(step, solved=None, recompute=RECOMPUTE_NONE if step.recompute else step.recompute)
    space = TechniqueSpace(setting.recipe, (plain, step), (state,), own=step.keeping_all)
    points = price_all(setting, columns.take(legal), space, ())
    for row in range(len(points)):  # rows with the solved amount come last, and only where some of it is needed
        answer[int(legal[points.rows.split[row]])] = points.layout(row)
    return answer


def technique_neighbours(setting: Setting, chosen: Layout) -> Iterator[Neighbour]:
    """Yield a neighbour for every choice of techniques that differs from the chosen ones in one respect; of several
    ways to recompute by module or to offload, the best."""
    # every ZeRO stage of the implementation that the recipe chose, so that it stays that one
    stages = offered_values(setting.recipe, setting.backend.space(setting.recipe), "zero_stage")
    recipe = replace(setting.recipe, pins={"zero_stage": stages}, fixed=("gradient_dtype",))
    now = _techniques_of(setting, chosen)
    space = technique_space(recipe, setting.backend)
    # A pin may have led to techniques that are not offered without it; states are changed beside those, too.
    near = dict.fromkeys((now[0], *(step for step in space.step if len(_differences(now, (step, now[1]))) <= 1)))
    space = replace(space, step=tuple(near), state=(*space.state, *_other_formats(setting, now[1])))
    rules = [rule for rule in setting.backend.rules(setting.recipe) if rule.of_techniques]
    points = price_all(setting.with_recipe(recipe), LayoutColumns.of([chosen]), space, rules)
    for name, row in _best_of_each(setting, points, now):
        then, layout = points.techniques(row), replace(points.layout(row), layers_by_stage=chosen.layers_by_stage)
        (verdict,) = judge_layouts(setting.with_recipe(recipe_with_techniques(recipe, *then)), [layout])
        yield Neighbour(name, _label(name, now, chosen), _label(name, then, layout), verdict)


def _techniques_of(setting: Setting, chosen: Layout) -> ChosenTechniques:
    """Return the techniques of the chosen layout; an amount that the recipe does not pin is left to be solved."""
    techniques, pins = setting.recipe.techniques, setting.recipe.pins

    def named(kind: type[Any]) -> dict[str, Any]:
        sources = [(f.name, source) for source in (techniques, chosen) for f in fields(kind)]
        return {name: getattr(source, name) for name, source in sources if hasattr(source, name)}

    step = StepTechniques(**named(StepTechniques))
    if chosen.recompute == RECOMPUTE_FULL and techniques.recompute_method == "block" and RECOMPUTE_LAYERS not in pins:
        step = replace(step, recompute_layers=0, solved=RECOMPUTE_LAYERS)
    elif chosen.offload_layers and OFFLOAD_LAYERS not in pins:
        step = replace(step, offload_layers=0, solved=OFFLOAD_LAYERS)
    dtype = setting.recipe.training.gradient_dtype
    return step, StateTechniques(gradient_dtype=dtype, **named(StateTechniques))


def _other_formats(setting: Setting, now: StateTechniques) -> Iterator[StateTechniques]:
    """Yield the state techniques with gradients accumulated in another format: never chosen unasked, but worth
    knowing."""
    recipe = setting.recipe
    for dtype in ("fp32", "bf16") if recipe.workload.precision == "bf16" else ():
        changed = replace(recipe, training=replace(recipe.training, gradient_dtype=dtype))
        with contextlib.suppress(UserError):
            setting.backend.rules(changed)
            if setting.with_recipe(changed).job.facts != setting.job.facts:
                yield replace(now, gradient_dtype=dtype)


def _best_of_each(setting: Setting, points: Points, now: ChosenTechniques) -> list[tuple[str, int]]:
    """Return one row for each kind of difference from `now`, with what differs: the fastest safe point, else the one
    that needs the least memory."""
    best: dict[tuple[str, object], tuple[bool, float, int]] = {}
    rows = points.rows
    safe = is_safe(setting, rows.device_bytes, rows.host_bytes)
    worth = np.where(safe, rows.step_seconds, rows.device_bytes)
    for row in range(len(points)):
        then = points.techniques(row)
        differences = _differences(now, then)
        if len(differences) == 1:
            kind, candidate = (differences[0], _kind(differences[0], then)), (not safe[row], float(worth[row]), row)
            best[kind] = min(best.get(kind, candidate), candidate)
    ordered = sorted(best.items(), key=lambda item: ORDER.index(item[0][0]))
    return [(name, row) for (name, _), (_, _, row) in ordered]


def _differences(now: ChosenTechniques, then: ChosenTechniques) -> list[str]:
    """Return the choices in which the techniques differ."""
    state = [f.name for f in fields(StateTechniques) if getattr(now[1], f.name) != getattr(then[1], f.name)]
    parts = (("recompute", _recompute), ("offload", _offload))
    step = [name for name, part in parts if part(now[0]) != part(then[0])]
    return [*state, *step, *switches_beside(now[0], then[0])]


def _recompute(step: StepTechniques) -> tuple[object, ...]:
    method = step.recompute_method if step.recompute == RECOMPUTE_FULL else ""
    return step.recompute, step.recompute_modules, method, step.recompute_layers, step.solved == RECOMPUTE_LAYERS


def _offload(step: StepTechniques) -> tuple[object, ...]:
    return (*(getattr(step, name) for name in OFFLOADS), step.offload_layers, step.solved == OFFLOAD_LAYERS)


def _kind(name: str, techniques: ChosenTechniques) -> object:
    """Return what distinguishes the values of one choice; of those with the same kind only the best is shown."""
    step, state = techniques
    if name == "recompute":
        return step.recompute, step.recompute_method
    if name == "offload":
        return tuple(map(bool, _offload(step)))
    return getattr(step if name in SWITCH_NAMES else state, name)


def _label(name: str, techniques: ChosenTechniques, layout: Layout) -> Value:
    """Return the value of one choice as a person reads it."""
    step, state = techniques
    if name == "recompute":
        modules = ", ".join(step.recompute_modules)
        detail = modules if RECOMPUTE_NAMES[step.recompute] == "selective" else ""
        if step.recompute == RECOMPUTE_FULL and layout.recompute_layers:
            layers = counted(layout.recompute_layers, "layer")
            detail = f"{layers} of each chunk" if step.recompute_method == "block" else f"groups of {layers}"
        return RECOMPUTE_NAMES[step.recompute] + (f" ({detail})" if detail else "")
    if name == "offload":
        whole = (counted(layout.offload_layers, "layer"),) if layout.offload_layers else ()
        return ", ".join((*host_labels(step, OFFLOADS), *whole)) or "none"
    return _plain(getattr(step if name in SWITCH_NAMES else state, name))
