"""What each neighbouring choice would cost: one choice of the chosen layout changed, the world size kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmlaunch.layout import RECOMPUTE_NONE, Layout, LayoutColumns
from llmlaunch.planner.enumerate import SPLIT_FIELDS, offered_values
from llmlaunch.planner.judge import judged, rules_failed
from llmlaunch.planner.neighbour import Neighbour, Value
from llmlaunch.planner.neighbour_words import held_of, of_words, running_of
from llmlaunch.planner.pricing import price
from llmlaunch.planner.setting import Setting
from llmlaunch.planner.variants import Words

__all__ = ["neighbours"]

# What gives way where a change alone breaks a rule: sequence parallelism comes and goes with tensor parallelism, and
# virtual stages split what the pipeline has split.
GIVES_WAY = {"tensor": "sequence_parallel", "pipeline": "virtual_pipeline"}


def neighbours(setting: Setting, chosen: Layout) -> list[Neighbour]:
    """For each size in order the next value down and up that is legal; then every other way to hold states and
    gradients, to recompute and to offload. `setting` is of the recipe that says the words chosen with the layout."""
    return [*_of_sizes(setting, chosen), *of_words(setting, chosen)]


def _of_sizes(setting: Setting, chosen: Layout) -> Iterator[Neighbour]:
    steps = _amounts_solved(setting, chosen, list(_steps(setting, chosen)))
    here = chosen.as_json()
    for (name, _), one in zip(steps, judged(setting, [layout for _, layout in steps]), strict=True):
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
    running = running_of(setting, chosen)
    if running.solved is None or not steps:
        return steps
    layouts = LayoutColumns.of([layout for _, layout in steps])
    legal = _legal(setting, layouts)
    plain = replace(running, solved=None, recompute=RECOMPUTE_NONE if running.recompute else running.recompute)
    words = Words((plain, running), (held_of(setting, chosen),))
    points, _ = price(setting, layouts.take(legal), words, ())
    answer = list(steps)
    for row in range(len(points)):  # those of `running` come last, and are only those that need some
        at = int(legal[points.rows.split[row]])
        answer[at] = (steps[at][0], points.layout(row))
    return answer
