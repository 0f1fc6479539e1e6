"""What each neighbouring choice would cost: one field of the chosen layout changed, the world size kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import log2
from typing import Any

from llmlaunch.layout import LAYOUT_FIELDS, Layout
from llmlaunch.planner.enumerate import offered_values
from llmlaunch.planner.judge import Judged, judged
from llmlaunch.planner.setting import Setting

__all__ = ["Neighbour", "neighbours"]

KINDS = ("zero_stage", "recompute")  # every other value is a neighbour, not only the next ones
# What gives way where a change alone breaks a rule: sequence parallelism comes and goes with tensor parallelism, and
# virtual stages split what the pipeline has split.
GIVES_WAY = {"tensor": "sequence_parallel", "pipeline": "virtual_pipeline"}


@dataclass(frozen=True)
class Neighbour:
    """The layout's field `name` changed to what `judged.layout` has there; `along` is the field that had to follow,
    data parallelism apart, which takes up every change of a size."""

    name: str
    judged: Judged
    along: str | None = None


def neighbours(setting: Setting, chosen: Layout) -> list[Neighbour]:
    """For each field in order the next value down and up that splits the devices, for a kind (ZeRO stage, recompute)
    every other one."""
    tries = [try_ for name, value in _steps(setting, chosen) for try_ in _ways(setting, chosen, name, value)]
    found = judged(setting, [changed for _, changed, _ in tries])
    best: dict[tuple[str, int], Neighbour] = {}
    for (name, changed, along), one in zip(tries, found, strict=True):
        first = best.setdefault((name, getattr(changed, name)), Neighbour(name, one, along))
        if one.legal and not first.judged.legal:
            best[name, getattr(changed, name)] = Neighbour(name, one, along)
    return list(best.values())


def _steps(setting: Setting, chosen: Layout) -> Iterator[tuple[str, int]]:
    recipe = setting.recipe
    space = setting.backend.space(recipe)
    for name in LAYOUT_FIELDS:
        if name == "data":
            continue
        now = getattr(chosen, name)
        values = [v for v in offered_values(recipe, space, name) if v != now and _changed(chosen, name, v) is not None]
        below = [v for v in values if v < now]
        above = [v for v in values if v > now]
        near = sorted(values) if name in KINDS else [*sorted(below)[-1:], *sorted(above)[:1]]
        yield from ((name, value) for value in near)


def _ways(setting: Setting, chosen: Layout, name: str, value: int) -> Iterator[tuple[str, Layout, str | None]]:
    """The change alone, then with what gives way to it, the nearest value first."""
    changed = _changed(chosen, name, value)
    assert changed is not None
    yield name, changed, None
    other = GIVES_WAY.get(name)
    if other is None:
        return
    recipe, now = setting.recipe, getattr(chosen, other)
    values = [v for v in offered_values(recipe, setting.backend.space(recipe), other) if v != now]
    for near in sorted(values, key=lambda v: abs(log2(max(v, 0.5) / max(now, 0.5)))):
        field: dict[str, Any] = {other: near}
        yield name, replace(changed, **field), other


def _changed(chosen: Layout, name: str, value: int) -> Layout | None:
    """The data size takes up the change, and stages are even; None where the sizes do not split the devices."""
    field: dict[str, Any] = {name: value}
    changed = replace(chosen, **field)
    if name in ("pipeline", "virtual_pipeline"):
        changed = replace(changed, layers_by_stage=())
    split = changed.tensor * changed.pipeline * changed.context
    return replace(changed, data=chosen.world_size // split) if chosen.world_size % split == 0 else None
