"""What each neighbouring choice would cost: one choice of the chosen layout changed, the world size kept.

The sizes come first; then the ways to hold states and gradients, to recompute and to offload, with the split kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from math import log2
from typing import Any

import numpy as np

from llmlaunch.columns import IntColumn
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
from llmlaunch.planner.candidate import host_labels
from llmlaunch.planner.judge import LayoutVerdict, judge_layouts, rules_failed
from llmlaunch.planner.points import Points
from llmlaunch.planner.pricing import price_all
from llmlaunch.planner.search_space import (
    SPLIT_FIELDS,
    TechniqueSpace,
    offered_values,
    recipe_with_techniques,
    switches_beside,
    technique_space,
)
from llmlaunch.planner.setting import Setting
from llmlaunch.planner.technique_batches import is_safe
from llmlaunch.recipe.types import Recipe
from llmlaunch.rundir.values import counted
from llmlaunch.techniques import (
    MOVING_NAMES,
    NO_TECHNIQUES,
    SWITCH_NAMES,
    ActivationTreatments,
    StateTreatments,
    Techniques,
)
from llmlaunch.techniques.technique import declarations

__all__ = ["Neighbour", "Value", "neighbours", "technique_neighbours"]

Value = int | bool | str | float | None
ChosenTechniques = tuple[StepTechniques, StateTechniques]

ORDER = (
    *("zero_stage", "gradient_dtype", *declarations(StateTreatments), "recompute", "offload"),
    *SWITCH_NAMES,
)
OFFLOADS = tuple(name for name in declarations(ActivationTreatments) if name in MOVING_NAMES)
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
    return [*_size_neighbours(setting, chosen), *technique_neighbours(setting, chosen)]


def _size_neighbours(setting: Setting, chosen: Layout) -> Iterator[Neighbour]:
    steps = _amounts_solved(setting, chosen, list(_size_steps(setting, chosen)))
    here, layouts, (without, switches_off) = chosen.as_json(), [layout for _, layout in steps], _switched_off(setting)
    verdicts = zip(judge_layouts(setting, layouts), judge_layouts(without, layouts), strict=True)
    for (name, _), (verdict, plain) in zip(steps, verdicts, strict=True):
        gives_way = plain.legal and not verdict.legal
        there = verdict.layout.as_json()
        follows = [n for n in there if there[n] != here[n] and n not in (name, "data", "layers_by_stage")]
        along = {n: _plain(there[n]) for n in follows} | (switches_off if gives_way else {})
        yield Neighbour(name, _plain(here[name]), _plain(there[name]), plain if gives_way else verdict, along)


def _switched_off(setting: Setting) -> tuple[Setting, dict[str, Value]]:
    """Return the setting without the switches that the search turned on, and these with the values they have then."""
    techniques, fixed = setting.recipe.techniques, setting.recipe.fixed
    free = [name for name in SWITCH_NAMES if name not in fixed]
    off = {name: getattr(NO_TECHNIQUES, name) for name in free}
    changed = {name: value for name, value in off.items() if getattr(techniques, name) != value}
    if not changed:
        return setting, {}
    plain = replace(setting.recipe, techniques=replace(techniques, **changed))
    return setting.with_recipe(plain), {name: _plain(value) for name, value in changed.items()}


def _plain(value: object) -> Value:
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    assert value is None or isinstance(value, (int, str, float))
    return value


def _size_steps(setting: Setting, chosen: Layout) -> Iterator[tuple[str, Layout]]:
    """Yield for each size the nearest legal layout below and above; where none is legal, the nearest that splits the
    devices."""
    recipe = setting.recipe
    space = setting.backend.space(recipe)
    for name in SPLIT_FIELDS:
        if name == "data":
            continue
        now, values = getattr(chosen, name), sorted(offered_values(recipe, space, name))
        for side in (reversed([v for v in values if v < now]), [v for v in values if v > now]):
            tries = [layout for value in side for layout in _changes(setting, chosen, name, value)]
            if tries:
                legal = _legal_rows(_switched_off(setting)[0], LayoutColumns.of(tries))
                yield name, tries[int(legal[0]) if len(legal) else 0]


def _legal_rows(setting: Setting, layouts: LayoutColumns) -> IntColumn:
    failed = rules_failed(setting.recipe, layouts, setting.backend.rules(setting.recipe))
    return np.flatnonzero(~failed.any(axis=0))


def _changes(setting: Setting, chosen: Layout, name: str, value: int) -> Iterator[Layout]:
    """Yield the change alone, then together with what gives way to it, the nearest value first."""
    changed = _changed(chosen, name, value)
    if changed is None:
        return
    yield changed
    other = GIVES_WAY.get(name)
    if other is None:
        return
    recipe, now = setting.recipe, getattr(chosen, other)
    values = [v for v in offered_values(recipe, setting.backend.space(recipe), other) if v != now]
    for near in sorted(values, key=lambda v: abs(log2(max(v, 0.5) / max(now, 0.5)))):
        follows: dict[str, Any] = {other: near}
        yield replace(changed, **follows)


def _changed(chosen: Layout, name: str, value: int) -> Layout | None:
    """Change one size; the data size takes up the change, and stages become even. Return None where the sizes do not
    split the devices."""
    size: dict[str, Any] = {name: value}
    changed = replace(chosen, **size)
    if name in ("pipeline", "virtual_pipeline"):
        changed = replace(changed, layers_by_stage=())
    split = changed.tensor * changed.pipeline * changed.context
    return replace(changed, data=chosen.world_size // split) if chosen.world_size % split == 0 else None


def _amounts_solved(setting: Setting, chosen: Layout, steps: list[tuple[str, Layout]]) -> list[tuple[str, Layout]]:
    """Give each legal layout as many recomputed or offloaded layers as it needs, where the planner solved that amount
    for the chosen layout."""
    step = _step_techniques_of(setting, chosen)
    if step.solved is None or not steps:
        return steps
    layouts = LayoutColumns.of([layout for _, layout in steps])
    legal = _legal_rows(setting, layouts)
    plain = replace(step, solved=None, recompute=RECOMPUTE_NONE if step.recompute else step.recompute)
    space = TechniqueSpace((plain, step), (_state_techniques_of(setting, chosen),), own=step.keeping_all)
    points = price_all(setting, layouts.take(legal), space, ())
    answer = list(steps)
    for row in range(len(points)):  # rows with the solved amount come last, and only where some of it is needed
        at = int(legal[points.rows.split[row]])
        answer[at] = (steps[at][0], points.layout(row))
    return answer


def technique_neighbours(setting: Setting, chosen: Layout) -> Iterator[Neighbour]:
    """Yield a neighbour for every choice of techniques that differs from the chosen ones in one respect; of several
    ways to recompute by module or to offload, the best."""
    # every ZeRO stage of the implementation that the recipe chose, so that it stays that one
    stages = offered_values(setting.recipe, setting.backend.space(setting.recipe), "zero_stage")
    recipe = replace(setting.recipe, pins={"zero_stage": stages}, fixed=("gradient_dtype",))
    now = _step_techniques_of(setting, chosen), _state_techniques_of(setting, chosen)
    space = technique_space(recipe, setting.backend)
    # A pin may have led to techniques that are not offered without it; states are changed beside those, too.
    near = dict.fromkeys((now[0], *(step for step in space.step if len(_step_differences(now[0], step)) <= 1)))
    space = replace(space, step=tuple(near), state=(*space.state, *_other_formats(setting, now[1])))
    rules = [rule for rule in setting.backend.rules(setting.recipe) if rule.of_techniques]
    points = price_all(setting.with_recipe(recipe), LayoutColumns.of([chosen]), space, rules)
    for row in _best_of_each(setting, points, now):
        then = points.techniques(row)
        name, _ = _difference(now, then) or ("", "")
        layout = replace(points.layout(row), layers_by_stage=chosen.layers_by_stage)
        changed = setting.with_recipe(recipe_with_techniques(recipe, *then))
        (verdict,) = judge_layouts(changed, [layout])
        yield Neighbour(name, _label(name, now, chosen), _label(name, then, layout), verdict)


def _step_techniques_of(setting: Setting, chosen: Layout) -> StepTechniques:
    """Return the step techniques of the chosen layout; an amount that the recipe does not pin is left to be solved."""
    techniques, pins = setting.recipe.techniques, setting.recipe.pins
    step = StepTechniques(**_values_in(StepTechniques, techniques, chosen))
    block = chosen.recompute == RECOMPUTE_FULL and techniques.recompute_method == "block"
    if block and RECOMPUTE_LAYERS not in pins:
        return replace(step, recompute_layers=0, solved=RECOMPUTE_LAYERS)
    if chosen.offload_layers and OFFLOAD_LAYERS not in pins:
        return replace(step, offload_layers=0, solved=OFFLOAD_LAYERS)
    return step


def _state_techniques_of(setting: Setting, chosen: Layout) -> StateTechniques:
    dtype = setting.recipe.training.gradient_dtype
    return StateTechniques(gradient_dtype=dtype, **_values_in(StateTechniques, setting.recipe.techniques, chosen))


def _values_in(kind: type[Any], *sources: Techniques | Layout) -> dict[str, Any]:
    """Return the fields of step or state techniques as the `sources` have them."""
    return {f.name: getattr(source, f.name) for source in sources for f in fields(kind) if hasattr(source, f.name)}


def _other_formats(setting: Setting, now: StateTechniques) -> list[StateTechniques]:
    """Return the state techniques with gradients accumulated in another format: never chosen unasked, but worth
    knowing."""
    recipe, formats = setting.recipe, ("fp32", "bf16") if setting.recipe.workload.precision == "bf16" else ()
    others = []
    for dtype in formats:
        changed = replace(recipe, training=replace(recipe.training, gradient_dtype=dtype))
        if _accepted(setting, changed) and setting.with_recipe(changed).job.facts != setting.job.facts:
            others.append(replace(now, gradient_dtype=dtype))
    return others


def _accepted(setting: Setting, recipe: Recipe) -> bool:
    try:
        setting.backend.rules(recipe)
    except UserError:
        return False
    return True


def _best_of_each(setting: Setting, points: Points, now: ChosenTechniques) -> list[int]:
    """Return one row for each kind of difference from `now`: the fastest safe point, else the one that needs the least
    memory."""
    best: dict[tuple[str, str], tuple[bool, float, int]] = {}
    rows = points.rows
    safe = is_safe(setting, rows.device_bytes, rows.host_bytes)
    worth = np.where(safe, rows.step_seconds, rows.device_bytes)
    for row in range(len(points)):
        kind = _difference(now, points.techniques(row))
        if kind is not None:
            candidate = (not bool(safe[row]), float(worth[row]), row)
            best[kind] = min(best.get(kind, candidate), candidate)
    return [best[kind][2] for kind in sorted(best, key=lambda kind: ORDER.index(kind[0]))]


def _difference(now: ChosenTechniques, then: ChosenTechniques) -> tuple[str, str] | None:
    """Return the one choice in which the techniques differ and its new kind; None if they differ in none or several."""
    state = [f.name for f in fields(StateTechniques) if getattr(now[1], f.name) != getattr(then[1], f.name)]
    differences = [*state, *_step_differences(now[0], then[0])]
    if len(differences) != 1:
        return None
    return differences[0], _kind(differences[0], then)


def _step_differences(now: StepTechniques, then: StepTechniques) -> list[str]:
    parts = (("recompute", _recompute), ("offload", _offload))
    return [*(name for name, part in parts if part(now) != part(then)), *switches_beside(now, then)]


def _recompute(step: StepTechniques) -> tuple[object, ...]:
    method = step.recompute_method if step.recompute == RECOMPUTE_FULL else ""
    return step.recompute, step.recompute_modules, method, step.recompute_layers, step.solved == RECOMPUTE_LAYERS


def _offload(step: StepTechniques) -> tuple[object, ...]:
    return (*(getattr(step, name) for name in OFFLOADS), step.offload_layers, step.solved == OFFLOAD_LAYERS)


def _kind(name: str, techniques: ChosenTechniques) -> str:
    """Return what distinguishes the values of one choice; of those with the same kind only the best is shown."""
    step, state = techniques
    if name == "recompute":
        return f"{RECOMPUTE_NAMES[step.recompute]} {step.recompute_method}"
    if name == "offload":
        kinds = (*(getattr(step, name) for name in OFFLOADS), step.offload_layers or step.solved)
        return " ".join(str(bool(kind)) for kind in kinds)
    return str(getattr(step if name in SWITCH_NAMES else state, name))


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
