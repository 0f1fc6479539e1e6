"""What measured runs say of the plans of one recipe: handed to the planner, which asks no store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmlaunch.calibration.margins import Margin
from llmlaunch.calibration.support import Support
from llmlaunch.layout import Layout
from llmlaunch.memory.correction import NO_CORRECTION, Correction
from llmlaunch.techniques import Techniques
from llmlaunch.workload import Workload

__all__ = ["NO_LESSONS", "Lessons", "Rehearsal"]


@dataclass(frozen=True)
class Rehearsal:
    """What ranks that ran alone say of one layout with its words, as `Candidate` has them, and of no other. `safe` and
    `device_bytes`, those of the rank nearest to its limit or farthest beyond it, are theirs, judged where a device may
    be filled to `limit_bytes` by plan. `sentence` is for a person, `told` is `memory.rehearsed` of a plan's JSON."""

    workload: Workload
    layout: Layout
    techniques: Techniques
    gradient_dtype: str | None
    safe: bool
    device_bytes: int
    limit_bytes: int
    sentence: str
    told: Mapping[str, Any]


@dataclass(frozen=True)
class Lessons:
    """`margin` is the bound at the recipe's risk, None where it asks for none; `correction` belongs into every
    prediction, of the chosen layout and of all it is compared with; `support` counts the runs behind both, None where
    nobody looked. `rehearsals` hold for their very shapes alone."""

    margin: Margin | None = None
    correction: Correction = NO_CORRECTION
    support: Support | None = None
    rehearsals: tuple[Rehearsal, ...] = ()


NO_LESSONS = Lessons()
