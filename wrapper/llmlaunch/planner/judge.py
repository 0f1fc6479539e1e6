"""Verdicts on single layouts, with bytes and step time or the one reason for which a layout is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmlaunch.errors import UserError
from llmlaunch.layout import Layout, LayoutColumns, Rule
from llmlaunch.memory.estimator import estimate, worst_ranks
from llmlaunch.planner.evidence import evidence_of, rehearsal_on
from llmlaunch.planner.legality import situation
from llmlaunch.planner.pricing_budget import count_candidates
from llmlaunch.planner.search import BROKEN_ESTIMATE, HOST_MEMORY, MEMORY, REHEARSED
from llmlaunch.planner.setting import Setting, node_of
from llmlaunch.recipe.types import Recipe
from llmlaunch.timing.step import step_time
from llmlaunch.units import GIB
from llmlaunch.verdicts import TIGHT


@dataclass(frozen=True)
class Refusal:
    """Why a layout is refused. `key` is a rule's key, "tight", "memory", "host_memory", "broken_estimate" or
    "rehearsed"; `reason` is the rule's sentence, what overflows and by how much, which law of memory the estimate
    breaks, or what a rehearsal showed."""

    key: str
    reason: str


@dataclass(frozen=True)
class LayoutVerdict:
    """One layout with its step seconds and device bytes, both None where a rule refuses the layout before pricing."""

    layout: Layout
    step_seconds: float | None
    device_bytes: int | None
    refusal: Refusal | None

    @property
    def legal(self) -> bool:
        return self.device_bytes is not None


def rules_failed(recipe: Recipe, layouts: LayoutColumns, rules: Sequence[Rule]) -> NDArray[np.bool_]:
    """Return which rule (row) refuses which layout (column)."""
    judged = situation(recipe, layouts)
    return np.array([~rule.allows(judged) for rule in rules], dtype=np.bool_).reshape(len(rules), len(layouts))


def judge_layouts(setting: Setting, layouts: Sequence[Layout]) -> list[LayoutVerdict]:
    """Return the verdict on each of `layouts`, which split exactly the recipe's devices, in their order.

    Raises:
        UserError: the backend cannot do what the recipe asks for, whatever the layout.
    """
    # In the order of a search, which asks rules of techniques last.
    rules = sorted(setting.backend.rules(setting.recipe), key=lambda rule: rule.of_techniques)
    failed = rules_failed(setting.recipe, LayoutColumns.of(layouts), rules)
    refusals = [next((rule for rule, fails in zip(rules, column, strict=True) if fails), None) for column in failed.T]
    priced = iter(_priced(setting, [at for at, rule in zip(layouts, refusals, strict=True) if rule is None]))
    return [
        next(priced) if rule is None else LayoutVerdict(at, None, None, Refusal(rule.key, rule.sentence))
        for at, rule in zip(layouts, refusals, strict=True)
    ]


def safe_layouts(setting: Setting, recipe: Recipe, layouts: Sequence[Layout]) -> list[tuple[float, Layout]]:
    """Return those of the `layouts` that are safe with a changed recipe, and the seconds of their steps; none where its
    backend cannot do it."""
    try:
        verdicts = judge_layouts(setting.with_recipe(recipe), layouts)
    except UserError:
        return []
    return [(v.step_seconds, v.layout) for v in verdicts if v.refusal is None and v.step_seconds is not None]


def _priced(setting: Setting, layouts: Sequence[Layout]) -> list[LayoutVerdict]:
    columns = LayoutColumns.of(layouts)
    count_candidates(len(layouts))
    if not layouts:
        return []
    device = worst_ranks(setting.job, columns).device_bytes
    seconds = setting.lessons.shared_factor * step_time(setting.job, setting.cluster, columns).total
    decisive = [step for step in setting.lessons.measured_steps if step.decides]
    ran = [evidence_of(decisive, setting.recipe, layout) for layout in layouts]
    return [
        LayoutVerdict(
            layout,
            float(seconds[i]) if (measured := ran[i]) is None else measured.step_seconds,
            int(device[i]),
            _by_memory(setting, layout),
        )
        for i, layout in enumerate(layouts)
    ]


def _by_memory(setting: Setting, layout: Layout) -> Refusal | None:
    detail = estimate(setting.job, layout, node=node_of(setting.recipe))
    worst, limit, host = detail.worst, setting.limit.limit_bytes, setting.host_limit.limit_bytes
    rehearsed = rehearsal_on(setting, layout, worst.device_bytes)
    if detail.fault is not None:
        return Refusal(BROKEN_ESTIMATE, f"its estimate cannot be right, which is a bug of llmlaunch: {detail.fault}")
    if rehearsed is not None and rehearsed.refuses(limit):
        return Refusal(REHEARSED, rehearsed.sentence)
    if worst.device_bytes > limit and not (rehearsed is not None and rehearsed.allows(limit)):
        over = (worst.device_bytes - limit) / GIB
        return Refusal(
            TIGHT if setting.limit.verdict_of(worst.device_bytes) == TIGHT else MEMORY,
            f"needs {over:.1f} GiB more than the limit on pipeline rank {worst.pipeline_rank}, "
            f"most of it {_largest(worst.terms)}",
        )
    needs = detail.host_bytes_per_node or 0
    if needs > host:
        return Refusal(
            HOST_MEMORY,
            f"a node needs {(needs - host) / GIB:.1f} GiB more host memory than the limit, "
            f"most of it {_largest(detail.host_terms)}",
        )
    return None


def _largest(terms: Mapping[str, int]) -> str:
    term, size = max(terms.items(), key=lambda item: item[1])
    return f"{term.replace('_', ' ')} with {size / GIB:.1f} GiB"
