"""Which points of a search runs and rehearsals tell of.

Evidence is on one layout with its techniques. A rehearsal, or a run, that refutes them tells of that layout's other
techniques, too: to switch a collective's overlap off mends no estimate that was 30 GiB short. They are taken to need as
much more than predicted as those that ran, until one of them runs itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np

from llmlaunch.calibration.lessons import MeasuredStep, Rehearsal
from llmlaunch.columns import BoolColumn, IntColumn
from llmlaunch.frameworks.base import StateTechniques, StepTechniques
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.planner.points import Points
from llmlaunch.planner.search_space import SPLIT_FIELDS, all_techniques
from llmlaunch.planner.setting import Setting
from llmlaunch.recipe.types import Recipe
from llmlaunch.verdicts import TIGHT, UNSAFE

Evidence = TypeVar("Evidence", Rehearsal, MeasuredStep)


def points_of(evidence: Iterable[Evidence], recipe: Recipe, points: Points) -> Mapping[int, Evidence]:
    """Map point indices to the evidence on exactly that layout, with the same techniques and workload."""
    by_row: dict[int, Evidence] = {}
    for one_layout in evidence:
        for row in _rows_of_layout(points, one_layout.layout):
            if same_techniques(recipe, *points.techniques(row), one_layout):
                by_row[row] = one_layout
    return by_row


def rehearsals_of_points(setting: Setting, points: Points) -> Mapping[int, Rehearsal]:
    """Map point indices to the rehearsals that decide about them: those of their own techniques, else what one that
    refutes other techniques of the same layout leads to expect."""
    by_row: dict[int, Rehearsal] = {}
    for rehearsal in _refuting(setting):
        for row in _rows_of_layout(points, rehearsal.layout):
            expected = _expected(setting, rehearsal, int(points.rows.device_bytes[row]))
            if expected is not None and (row not in by_row or by_row[row].device_bytes < expected.device_bytes):
                by_row[row] = expected
    return {**by_row, **points_of(setting.lessons.rehearsals, setting.recipe, points)}


def refuted(setting: Setting, points: Points) -> BoolColumn:
    """Return which points a rehearsal refuses, whatever their estimate."""
    result = np.zeros(len(points), dtype=np.bool_)
    if any(_refuting(setting)):
        for row, rehearsal in rehearsals_of_points(setting, points).items():
            result[row] = rehearsal.refuses(setting.limit.limit_bytes)
    return result


def evidence_of(evidence: Iterable[Evidence], recipe: Recipe, layout: Layout) -> Evidence | None:
    """Return the evidence on one layout with the techniques of `recipe`."""
    own = recipe.workload, recipe.techniques, recipe.training.gradient_dtype
    return next((e for e in evidence if e.layout == layout and _ran_with(e) == own), None)


def rehearsal_on(setting: Setting, layout: Layout, device_bytes: int) -> Rehearsal | None:
    """Return the rehearsal that decides about one layout, predicted to need `device_bytes`, with the techniques of the
    setting's recipe."""
    own = evidence_of(setting.lessons.rehearsals, setting.recipe, layout)
    others = (_expected(setting, r, device_bytes) for r in _refuting(setting) if r.layout == layout)
    return own or max((e for e in others if e is not None), key=lambda e: e.device_bytes, default=None)


def same_split(splits: LayoutColumns, layout: Layout) -> BoolColumn:
    """Whether each split has the layout's sizes: few of millions of points are then compared one by one."""
    same = np.ones(len(splits), dtype=np.bool_)
    for name in SPLIT_FIELDS:
        same &= np.equal(getattr(splits, name), getattr(layout, name))
    return same


def same_techniques(
    recipe: Recipe, step: StepTechniques, state: StateTechniques, evidence: Rehearsal | MeasuredStep
) -> bool:
    """Whether the evidence is on the workload of the recipe with these techniques."""
    return _ran_with(evidence) == (recipe.workload, all_techniques(recipe, step, state), state.gradient_dtype)


def _ran_with(evidence: Rehearsal | MeasuredStep) -> tuple[object, ...]:
    return evidence.workload, evidence.techniques, evidence.gradient_dtype


def _rows_of_layout(points: Points, layout: Layout) -> list[int]:
    rows: IntColumn = np.flatnonzero(same_split(points.splits, layout)[points.rows.split])
    return [row for row in rows.tolist() if points.layout(row) == layout]


def _refuting(setting: Setting) -> list[Rehearsal]:
    return [r for r in setting.lessons.rehearsals if not r.safe and r.workload == setting.recipe.workload]


def _expected(setting: Setting, refuting: Rehearsal, device_bytes: int) -> Rehearsal | None:
    """Return what is expected of other techniques of a refuted layout that are predicted to need `device_bytes`; None
    where they need so much less that they are safe even so."""
    expected_bytes = device_bytes + refuting.short_bytes
    if expected_bytes <= refuting.limit_bytes:
        return None
    # how much more than the card one that ran out would have taken, nobody knows
    tight = expected_bytes <= setting.limit.most_bytes and not refuting.ran_out
    sentence = f"{refuting.sentence}; with other techniques this layout is taken to be off by as much"
    verdict = {"verdict": TIGHT if tight else UNSAFE, "sentence": sentence, "device_bytes": expected_bytes}
    return replace(
        refuting,
        tight=tight,
        device_bytes=expected_bytes,
        sentence=sentence,
        details={**refuting.details, **verdict},
    )
