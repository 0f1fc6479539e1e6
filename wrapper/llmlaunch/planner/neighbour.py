"""One neighbouring choice of a layout and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from llmlaunch.planner.judge import Judged

__all__ = ["Neighbour", "Value"]

Value = int | bool | str | float | None


@dataclass(frozen=True)
class Neighbour:
    """The choice `name` changed from `before` to `after`; `along` are the fields of the layout that had to follow, with
    what they become, data parallelism apart, which takes up every change of a size."""

    name: str
    before: Value
    after: Value
    judged: Judged
    along: Mapping[str, Value] = field(default_factory=dict)
