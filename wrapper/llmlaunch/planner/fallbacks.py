"""Fallback layouts for a job that runs out of device memory, each with more head-room than the one before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import numpy as np

from llmlaunch.frameworks.resharding import reshards
from llmlaunch.memory.estimator import Estimate, estimate
from llmlaunch.planner.headroom import search_with_headroom
from llmlaunch.planner.plan import Candidate, Fallback, Fallbacks, Plan, as_planned
from llmlaunch.planner.planning import plan_of
from llmlaunch.planner.search import SearchResult
from llmlaunch.planner.setting import Setting, node_of
from llmlaunch.recipe.types import Recipe
from llmlaunch.techniques import StateTreatments
from llmlaunch.techniques.technique import declarations
from llmlaunch.units import GIB
from llmlaunch.verdicts import TIGHT

# Share of a device's memory that each layout leaves free beyond the one before. A plan that ran out of memory was too
# low by more than its margin; by how much more nobody knows. A step lies between the mean error of predicted device
# peaks (5 to 7 %) and its 95th percentile (11 to 13 %; README.md). A plan by the 80 % rule stands runs that need 25 %
# more than predicted, its first fallback 39 %, the second 56 %.
HEAD_ROOM_STEP = 0.08

# Share of a step worth giving for fewer activations: of what is predicted they are the part that is least certain.
WORTH = 0.01


def find_fallbacks(setting: Setting, plan: Plan, count: int) -> Fallbacks:
    """Return at most `count` layouts to fall back on from a `plan` that may run, found in the `setting` it was searched
    with. Each is the fastest layout of the same search, with its pins kept and on the same devices, whose worst rank
    stays HEAD_ROOM_STEP of a device below the one before. Where a tight plan has too few of them, the nearest safe
    layout with other pins follows: a job that has died of its pins can go on in no other way."""
    layouts: list[Fallback] = []
    before = [plan]
    for after, change in islice(_next_plans(setting, plan), count):
        loads = (can_load(setting.recipe, earlier.chosen, after.chosen) for earlier in before)
        layouts.append(Fallback(after, tuple(loads), change))
        before.append(after)
    complete = len(layouts) == count
    return Fallbacks(tuple(layouts), None if complete else _missing(setting, before[-1], len(layouts), count))


def can_load(recipe: Recipe, saved: Candidate, loading: Candidate) -> bool:
    """Whether a checkpoint saved under one layout can be loaded under the other: their backend reshards it, and both
    hold gradients and optimizer states in the same way."""
    same = saved.gradient_dtype == loading.gradient_dtype and all(
        getattr(saved.techniques, name) == getattr(loading.techniques, name) for name in declarations(StateTreatments)
    )
    return same and reshards(recipe, saved.layout, loading.layout)


def _next_plans(setting: Setting, first: Plan) -> Iterator[tuple[Plan, str | None]]:
    """Yield one fallback plan after the other, as long as a layout leaves enough free; then, for a tight `first`, the
    one with other pins, with what it changes of them."""
    plan = first
    while True:
        lowered = _lowered(setting, plan)
        result = search_with_headroom(lowered)
        if not np.any(result.safe):
            break
        plan = plan_of(lowered, result, _place(lowered, result, plan))
        yield replace(plan, verdict=first.limit.verdict_of(plan.device_bytes)), None
    if first.verdict == TIGHT and not plan.safe:
        yield from _with_other_pins(replace(setting, limit=first.limit, widened=False))


def _with_other_pins(setting: Setting) -> Iterator[tuple[Plan, str]]:
    """Yield the plan of the smallest change that is safe, where it changes nothing but the layout."""
    from llmlaunch.planner.smallest_change import find_advice  # few jobs need it

    change = find_advice(setting).change
    if change is None or not all(key.startswith("layout.") for key in change.settings):
        return
    changed = setting.with_recipe(change.recipe)
    yield plan_of(changed, search_with_headroom(changed), 0), change.sentence()


def _lowered(setting: Setting, plan: Plan) -> Setting:
    """Return the setting whose limit leaves a step more head-room than the plan."""
    used = plan.chosen.device_bytes
    limit = min(used - int(HEAD_ROOM_STEP * setting.limit.memory_bytes), setting.limit.limit_bytes)
    reason = f"{HEAD_ROOM_STEP:.0%} of device memory below the {used / GIB:.1f} GiB of the layout before"
    return replace(setting, limit=replace(setting.limit, limit_bytes=max(limit, 0), reason=reason))


def _place(setting: Setting, result: SearchResult, plan: Plan) -> int:
    """Return the place of the first layout nearly as good as the first that also keeps no more activations than the
    plan, because nobody knows which term was too low; else the first place."""
    most = _activations(plan.estimate)
    for place, index in enumerate(result.first):
        if result.preferred_seconds[index] > (1.0 + WORTH) * result.preferred_seconds[result.first[0]]:
            break
        if _activations(_estimated(setting, result.candidate(setting.recipe, place))) <= most:
            return place
    return 0


def _estimated(setting: Setting, candidate: Candidate) -> Estimate:
    job = setting.job_of(as_planned(setting.recipe, candidate))
    return estimate(job, candidate.layout, node=node_of(setting.recipe))


def _activations(detail: Estimate) -> int:
    return max(rank.terms.get("activations", 0) for rank in detail.ranks)


def _missing(setting: Setting, last: Plan, have: int, count: int) -> str:
    """Why there are fewer fallbacks than the recipe asks for."""
    recipe = setting.recipe
    pins = {**recipe.pins, **{name: getattr(recipe.techniques, name, None) for name in recipe.fixed}}
    pinned = ", ".join(f"{name}: {_plain(value)}" for name, value in pins.items() if value is not None)
    step = HEAD_ROOM_STEP * setting.limit.memory_bytes / GIB
    asked_by = "memory.accept: tight" if last.verdict == TIGHT else "on_oom"
    which = f"{have} of {count} layouts; no other has" if have else "no layout has"
    return f"{asked_by}: {which} {step:.1f} GiB more head-room than {last.chosen.describe()}" + (
        f"; pinned: {pinned}" if pinned else ""
    )


def _plain(value: object) -> str:
    return f"[{', '.join(map(_plain, value))}]" if isinstance(value, tuple) else str(value)
