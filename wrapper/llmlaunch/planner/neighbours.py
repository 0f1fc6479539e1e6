"""What each neighbouring choice would cost: one choice of the chosen layout changed, the world size kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from math import log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmlaunch.backends.base import StateTechniques, StepTechniques
from llmlaunch.errors import UserError
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_NAMES, RECOMPUTE_NONE, Layout, LayoutColumns
from llmlaunch.planner.judge import LayoutVerdict, judge_layouts, rules_failed
from llmlaunch.planner.points import Points
from llmlaunch.planner.pricing import price
from llmlaunch.planner.search_space import (
    SPLIT_FIELDS,
    TechniqueSpace,
    offered_values,
    recipe_with_techniques,
    technique_space,
)
from llmlaunch.planner.setting import Setting
from llmlaunch.recipe.types import Recipe
from llmlaunch.rundir.messages import counted

__all__ = ["Neighbour", "Value", "neighbours", "state_techniques_of", "step_techniques_of", "technique_neighbours"]


# What gives way where a change alone breaks a rule: sequence parallelism comes and goes with tensor parallelism, and
# virtual stages split what the pipeline has split.
GIVES_WAY = {"tensor": "sequence_parallel", "pipeline": "virtual_pipeline"}


def neighbours(setting: Setting, chosen: Layout) -> list[Neighbour]:
    """For each size in order the next value down and up that is legal; then every other way to hold states and
    gradients, to recompute and to offload. `setting` is of the recipe that says the words chosen with the layout."""
    return [*_of_sizes(setting, chosen), *technique_neighbours(setting, chosen)]


def _of_sizes(setting: Setting, chosen: Layout) -> Iterator[Neighbour]:
    steps = _amounts_solved(setting, chosen, list(_steps(setting, chosen)))
    here = chosen.as_json()
    for (name, _), one in zip(steps, judge_layouts(setting, [layout for _, layout in steps]), strict=True):
        there = one.layout.as_json()
        follows = [n for n in there if there[n] != here[n] and n not in (name, "data", "layers_by_stage")]
        along = {n: _plain(there[n]) for n in follows}
        yield Neighbour(name, _plain(here[name]), _plain(there[name]), one, along)


def _plain(value: object) -> Value:
    assert isinstance(value, (int, str))
    return value


def _steps(setting: Setting, chosen: Layout) -> Iterator[tuple[str, Layout]]:
    """For each size the nearest legal layout below and above; where none is legal, the nearest that splits the
    devices."""
    recipe = setting.recipe
    space = setting.backend.space(recipe)
    for name in SPLIT_FIELDS:
        if name == "data":
            continue
        now, values = getattr(chosen, name), sorted(offered_values(recipe, space, name))
        for side in (reversed([v for v in values if v < now]), [v for v in values if v > now]):
            tries = [layout for value in side for layout in _ways(setting, chosen, name, value)]
            if tries:
                legal = _legal(setting, LayoutColumns.of(tries))
                yield name, tries[int(legal[0]) if len(legal) else 0]


def _legal(setting: Setting, layouts: LayoutColumns) -> NDArray[np.int64]:
    """Rows that no rule refuses."""
    failed = rules_failed(setting.recipe, layouts, setting.backend.rules(setting.recipe))
    return np.flatnonzero(~failed.any(axis=0))


def _ways(setting: Setting, chosen: Layout, name: str, value: int) -> Iterator[Layout]:
    """The change alone, then with what gives way to it, the nearest value first."""
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
    """The data size takes up the change, and stages are even; None where the sizes do not split the devices."""
    size: dict[str, Any] = {name: value}
    changed = replace(chosen, **size)
    if name in ("pipeline", "virtual_pipeline"):
        changed = replace(changed, layers_by_stage=())
    split = changed.tensor * changed.pipeline * changed.context
    return replace(changed, data=chosen.world_size // split) if chosen.world_size % split == 0 else None


def _amounts_solved(setting: Setting, chosen: Layout, steps: list[tuple[str, Layout]]) -> list[tuple[str, Layout]]:
    """Each legal layout with as many recomputed or offloaded layers as it needs, where the planner chose how many for
    the chosen one."""
    running = step_techniques_of(setting, chosen)
    if running.solved is None or not steps:
        return steps
    layouts = LayoutColumns.of([layout for _, layout in steps])
    legal = _legal(setting, layouts)
    plain = replace(running, solved=None, recompute=RECOMPUTE_NONE if running.recompute else running.recompute)
    words = TechniqueSpace((plain, running), (state_techniques_of(setting, chosen),))
    points, _ = price(setting, layouts.take(legal), words, ())
    answer = list(steps)
    for row in range(len(points)):  # those of `running` come last, and are only those that need some
        at = int(legal[points.rows.split[row]])
        answer[at] = (steps[at][0], points.layout(row))
    return answer


def technique_neighbours(setting: Setting, chosen: Layout) -> Iterator[Neighbour]:
    """Every way the backend offers that differs from the chosen one in one choice; of several ways to recompute by
    module or to offload, the best."""
    recipe = replace(setting.recipe, pins=_stages_offered(setting), fixed=("gradient_dtype",))
    offered, now = (
        technique_space(recipe, setting.backend),
        (step_techniques_of(setting, chosen), state_techniques_of(setting, chosen)),
    )
    words = replace(offered, held=(*offered.held, *_other_formats(setting, now[1])))
    rules = [rule for rule in setting.backend.rules(setting.recipe) if rule.of_techniques]
    points, _ = price(setting.with_recipe(recipe), LayoutColumns.of([chosen]), words, rules)
    for row in _best_of_each(setting, points, now):
        running, held = points.words(row)
        name, _ = _difference(now, (running, held)) or ("", "")
        layout = replace(points.layout(row), layers_by_stage=chosen.layers_by_stage)
        one = judge_layouts(setting.with_recipe(recipe_with_techniques(recipe, running, held)), [layout])[0]
        yield Neighbour(name, _said(name, now, chosen), _said(name, (running, held), layout), one)


def _stages_offered(setting: Setting) -> dict[str, tuple[int, ...]]:
    """Every ZeRO stage of the implementation the recipe chose: pinned, so that it stays that one."""
    space = setting.backend.space(setting.recipe)
    return {"zero_stage": tuple(dict.fromkeys(held.zero_stage for held in space.state_techniques))}


def step_techniques_of(setting: Setting, chosen: Layout) -> StepTechniques:
    """The running words of the chosen layout; an amount that the recipe does not pin is for the planner to solve."""
    ways, pins = setting.recipe.techniques, setting.recipe.pins
    words = StepTechniques(
        chosen.recompute,
        ways.recompute_modules,
        ways.recompute_method,
        chosen.recompute_layers,
        ways.offload_modules,
        ways.offload_checkpoints,
        chosen.offload_layers,
    )
    if chosen.recompute == RECOMPUTE_FULL and ways.recompute_method == "block" and "recompute_layers" not in pins:
        return replace(words, recompute_layers=0, solved="recompute_layers")
    if chosen.offload_layers and "offload_layers" not in pins:
        return replace(words, offload_layers=0, solved="offload_layers")
    return words


def state_techniques_of(setting: Setting, chosen: Layout) -> StateTechniques:
    ways = setting.recipe.techniques
    dtype = setting.recipe.training.gradient_dtype
    return StateTechniques(chosen.zero_stage, dtype, ways.offload_optimizer, ways.offload_parameters)


def _other_formats(setting: Setting, now: StateTechniques) -> list[StateTechniques]:
    """Gradients accumulated in another format than now: never chosen unasked, but worth knowing."""
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


def _best_of_each(setting: Setting, points: Points, now: tuple[StepTechniques, StateTechniques]) -> list[int]:
    """Of the points that differ from `now` in the same way, the fastest safe one, else the one that needs the least."""
    best: dict[tuple[str, str], tuple[bool, float, int]] = {}
    rows = points.rows
    fits = rows.device_bytes <= setting.limit.limit_bytes
    safe = fits & (rows.host_bytes <= setting.host_limit.limit_bytes)
    worth = np.where(safe, rows.step_seconds, rows.device_bytes)
    for row in range(len(points)):
        kind = _difference(now, points.words(row))
        if kind is not None:
            candidate = (not bool(safe[row]), float(worth[row]), row)
            best[kind] = min(best.get(kind, candidate), candidate)
    order = ("zero_stage", "gradient_dtype", "offload_optimizer", "offload_parameters", "recompute", "offload")
    return [best[kind][2] for kind in sorted(best, key=lambda kind: order.index(kind[0]))]


def _difference(
    now: tuple[StepTechniques, StateTechniques], then: tuple[StepTechniques, StateTechniques]
) -> tuple[str, str] | None:
    """(the one choice in which they differ, which way it goes); None where they differ in none or several."""
    held = [f.name for f in fields(StateTechniques) if getattr(now[1], f.name) != getattr(then[1], f.name)]
    running = [
        part for part, said in (("recompute", _recompute), ("offload", _offload)) if said(now[0]) != said(then[0])
    ]
    if len(held) + len(running) != 1:
        return None
    name = (held or running)[0]
    return name, _direction(name, then)


def _recompute(way: StepTechniques) -> tuple[object, ...]:
    method = way.recompute_method if way.recompute == RECOMPUTE_FULL else ""
    return way.recompute, way.recompute_modules, method, way.recompute_layers, way.solved == "recompute_layers"


def _offload(way: StepTechniques) -> tuple[object, ...]:
    return way.offload_modules, way.offload_checkpoints, way.offload_layers, way.solved == "offload_layers"


def _direction(name: str, words: tuple[StepTechniques, StateTechniques]) -> str:
    """What the ways of one choice are told apart by; of those alike the best is shown."""
    running, held = words
    if name == "recompute":
        return f"{RECOMPUTE_NAMES[running.recompute]} {running.recompute_method}"
    if name == "offload":
        kinds = (running.offload_modules, running.offload_checkpoints, running.offload_layers or running.solved)
        return " ".join(str(bool(kind)) for kind in kinds)
    return str(getattr(held, name))


def _said(name: str, words: tuple[StepTechniques, StateTechniques], layout: Layout) -> Value:
    """A choice as a person says it."""
    running, held = words
    if name == "recompute":
        modules = ", ".join(running.recompute_modules)
        detail = modules if RECOMPUTE_NAMES[running.recompute] == "selective" else ""
        if running.recompute == RECOMPUTE_FULL and layout.recompute_layers:
            layers = _layers(layout.recompute_layers)
            detail = f"{layers} of each chunk" if running.recompute_method == "block" else f"groups of {layers}"
        return RECOMPUTE_NAMES[running.recompute] + (f" ({detail})" if detail else "")
    if name == "offload":
        whole = (_layers(layout.offload_layers),) if layout.offload_layers else ()
        checkpoints = ("checkpoints",) if running.offload_checkpoints else ()
        return ", ".join((*running.offload_modules, *checkpoints, *whole)) or "none"
    value: Value = getattr(held, name)
    return value


def _layers(count: int) -> str:
    return counted(count, "layer")


Value = int | bool | str | float | None


@dataclass(frozen=True)
class Neighbour:
    """The choice `name` changed from `before` to `after`; `along` are the fields of the layout that had to follow, with
    what they become, data parallelism apart, which takes up every change of a size."""

    name: str
    before: Value
    after: Value
    judged: LayoutVerdict
    along: Mapping[str, Value] = field(default_factory=dict)
