"""Neighbours in words: another way to hold states and gradients, to recompute or to offload, the split kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np

from llmlaunch.backends.base import StateTechniques, StepTechniques
from llmlaunch.errors import UserError
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_NAMES, Layout, LayoutColumns
from llmlaunch.planner.judge import judged
from llmlaunch.planner.neighbour import Neighbour, Value
from llmlaunch.planner.points import Points
from llmlaunch.planner.pricing import price
from llmlaunch.planner.setting import Setting
from llmlaunch.planner.variants import recipe_with, words_of
from llmlaunch.recipe.types import Recipe
from llmlaunch.rundir.messages import counted

__all__ = ["held_of", "of_words", "running_of"]


def of_words(setting: Setting, chosen: Layout) -> Iterator[Neighbour]:
    """Every way the backend offers that differs from the chosen one in one choice; of several ways to recompute by
    module or to offload, the best."""
    recipe = replace(setting.recipe, pins=_stages_offered(setting), fixed=("gradient_dtype",))
    offered, now = words_of(recipe, setting.backend), (running_of(setting, chosen), held_of(setting, chosen))
    words = replace(offered, held=(*offered.held, *_other_formats(setting, now[1])))
    rules = [rule for rule in setting.backend.rules(setting.recipe) if rule.of_words]
    points, _ = price(setting.of(recipe), LayoutColumns.of([chosen]), words, rules)
    for row in _best_of_each(setting, points, now):
        running, held = points.words(row)
        name, _ = _difference(now, (running, held)) or ("", "")
        layout = replace(points.layout(row), layers_by_stage=chosen.layers_by_stage)
        one = judged(setting.of(recipe_with(recipe, running, held)), [layout])[0]
        yield Neighbour(name, _said(name, now, chosen), _said(name, (running, held), layout), one)


def _stages_offered(setting: Setting) -> dict[str, tuple[int, ...]]:
    """Every ZeRO stage of the implementation the recipe chose: pinned, so that it stays that one."""
    space = setting.backend.space(setting.recipe)
    return {"zero_stage": tuple(dict.fromkeys(held.zero_stage for held in space.state_techniques))}


def running_of(setting: Setting, chosen: Layout) -> StepTechniques:
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


def held_of(setting: Setting, chosen: Layout) -> StateTechniques:
    ways = setting.recipe.techniques
    dtype = setting.recipe.training.gradient_dtype
    return StateTechniques(chosen.zero_stage, dtype, ways.offload_optimizer, ways.offload_parameters)


def _other_formats(setting: Setting, now: StateTechniques) -> list[StateTechniques]:
    """Gradients accumulated in another format than now: never chosen unasked, but worth knowing."""
    recipe, formats = setting.recipe, ("fp32", "bf16") if setting.recipe.workload.precision == "bf16" else ()
    others = []
    for dtype in formats:
        changed = replace(recipe, training=replace(recipe.training, gradient_dtype=dtype))
        if _accepted(setting, changed) and setting.of(changed).job.facts != setting.job.facts:
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
