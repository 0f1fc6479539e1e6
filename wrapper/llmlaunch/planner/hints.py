"""What a recipe fixes that makes its training slower: each with the one line to write, and the gain as it is priced.

A hint is about what is the person's to choose: a pin of the layout, a batch that devices cannot share evenly, fp32, a
library that nobody says the job has.
What the planner is free to choose is the fastest already.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from llmlaunch.errors import UserError
from llmlaunch.frozen import frozen
from llmlaunch.planner.candidate import yaml_text
from llmlaunch.planner.headroom import search_with_headroom
from llmlaunch.planner.judge import judge_layouts
from llmlaunch.planner.plan import Plan
from llmlaunch.planner.pricing_budget import BudgetSpent, PricingBudget
from llmlaunch.planner.relaxed_pins import as_pin, relax_pins
from llmlaunch.planner.search_space import as_ints, excluded_techniques
from llmlaunch.planner.setting import Setting
from llmlaunch.planner.smallest_change import BELONGS, stated_value
from llmlaunch.recipe.types import Recipe
from llmlaunch.recipe.written import written_pin
from llmlaunch.techniques.switches import TokenDispatch
from llmlaunch.techniques.technique import key_of

__all__ = ["Hint", "faster_choices"]

LEAST_GAIN = 0.02  # what a model of time can tell apart, and is worth a change
MOST_HINTS = 3
HINT_CANDIDATES = 100_000  # of each kind of hint (`pricing_budget`); a search of a whole space is some 40 000
MOST_CHANGE_OF_BATCH = 0.125  # a batch further away is another training
# What the search for the best batch keeps of the chosen layout, so that it prices some hundred rows. What is planned
# for that batch is searched in the whole space.
KEPT_WITH_BATCH = ("context", "expert", "expert_tensor", "zero_stage", "recompute")
LIBRARY_NAMES = {"deepep": "DeepEP", "hybridep": "HybridEP"}


@frozen
class Hint:
    """Write `value` at the dotted `key` in place of `before`, and tokens are trained on faster by `gain`, a share of
    today's rate. `remark` says what else it changes."""

    key: str
    before: Any
    value: Any
    gain: float
    remark: str = ""

    def sentence(self) -> str:
        """Return the hint as a line for a person."""
        remark = f"; {self.remark}" if self.remark else ""
        line = f"{self.key}: {yaml_text(self.value)}"
        return f"{line} (now {yaml_text(self.before)}): {self.gain:.1%} more tokens a second{remark}"

    def as_json(self) -> dict[str, Any]:
        return {"key": self.key, "value": self.value, "gain": self.gain}


def faster_choices(setting: Setting, plan: Plan) -> list[Hint]:
    """Return the few hints that gain most; none where the plan is not safe. Each is legal and safe if it alone is
    followed. Each kind of hint has a budget: a large space may hold hints that are not found, and none is promised."""
    if not plan.safe:
        return []
    hints: list[Hint] = []
    for kind in (_other_pins, _other_batches, _narrower_numbers, _libraries):
        with contextlib.suppress(BudgetSpent), PricingBudget(HINT_CANDIDATES).limiting():
            for hint in kind(setting, plan):
                hints.append(hint)  # those before the budget is spent stay
    worthwhile = [hint for hint in hints if hint.gain >= LEAST_GAIN]
    return sorted(worthwhile, key=lambda hint: -hint.gain)[:MOST_HINTS]


def _other_pins(setting: Setting, plan: Plan) -> Iterator[Hint]:
    """Yield for each pin the value that would be planned if it alone were free, where that is another one."""
    recipe = setting.recipe
    for name, pin in recipe.pins.items():
        if name == "recompute" and any(stated_value(recipe, other) for other in BELONGS):
            continue
        freed = relax_pins(setting, keep=recipe.pins.keys() - {name})
        result = search_with_headroom(setting.with_recipe(freed), exact=1, safe_alone=True)
        if not np.any(result.safe):
            continue
        best = result.candidate(freed, 0)
        number = int(getattr(best.layout, name))
        value = as_pin(name, number)
        if value is not None and number not in as_ints(name, pin):
            written = written_pin(recipe, name)
            gain = plan.chosen.step_seconds / best.step_seconds - 1.0
            yield Hint(written.key, written.value(pin), written.value(value), gain)


def _other_batches(setting: Setting, plan: Plan) -> Iterator[Hint]:
    """Yield the nearby batch with the highest rate, where the devices cannot share the recipe's evenly."""
    recipe = setting.recipe
    batch = recipe.workload.global_batch_size
    if batch % recipe.world_size == 0:
        return
    here = {name: as_pin(name, int(getattr(plan.layout, name))) for name in KEPT_WITH_BATCH}
    pins = {**{name: value for name, value in here.items() if value is not None}, **recipe.pins}
    rates: dict[int, float] = {}
    for other in _even_batches(batch, recipe.world_size):
        rate = _rate(setting, replace(recipe, pins=pins, training=replace(recipe.training, global_batch_size=other)))
        if rate is not None:
            rates[other] = rate
    if not rates:
        return
    best = max(rates, key=lambda other: rates[other])
    rate = _rate(setting, replace(recipe, training=replace(recipe.training, global_batch_size=best)))
    if rate is not None:
        gain = rate / plan.chosen.tokens_per_second_per_gpu - 1.0
        remark = f"{recipe.world_size} devices share it evenly; the batch is part of what the model learns"
        yield Hint("training.global_batch_size", batch, best, gain, remark)


def _rate(setting: Setting, recipe: Recipe) -> float | None:
    """Return the tokens a second and device that would be planned for a recipe; None where nothing is safe."""
    try:
        result = search_with_headroom(setting.with_recipe(recipe), exact=1, safe_alone=True)
    except UserError:
        return None
    return result.candidate(recipe, 0).tokens_per_second_per_gpu if np.any(result.safe) else None


def _even_batches(batch: int, devices: int) -> list[int]:
    """Return the nearest batches below and above that so many devices share evenly, or half as many, and so on."""
    share = devices
    batches: list[int] = []
    while share > 1 and not batches:
        below = batch // share * share
        near = [other for other in (below, below + share) if 0 < abs(other - batch) <= MOST_CHANGE_OF_BATCH * batch]
        batches = [other for other in near if other > 0]
        share //= 2
    return batches


def _narrower_numbers(setting: Setting, plan: Plan) -> Iterator[Hint]:
    """Yield bf16 in place of fp32 on a GPU, in the same layout."""
    recipe = setting.recipe
    if recipe.workload.precision != "fp32" or recipe.cluster.accelerator.kind != "gpu":
        return
    changed = replace(_as_chosen(recipe, plan), training=replace(recipe.training, precision="bf16"))
    try:
        (verdict,) = judge_layouts(setting.with_recipe(changed), [plan.layout])
    except UserError:
        return
    if verdict.refusal is None and verdict.step_seconds is not None:
        gain = plan.chosen.step_seconds / verdict.step_seconds - 1.0
        yield Hint("training.precision", "fp32", "bf16", gain, "weights of the optimizer stay fp32")


def _libraries(setting: Setting, plan: Plan) -> Iterator[Hint]:
    """Yield the library that sends tokens to their experts faster, in the same layout, where nothing says whether the
    job's environment has it."""
    recipe, dispatcher = setting.recipe, key_of(TokenDispatch)
    if recipe.backend.libraries or dispatcher in (*recipe.fixed, *excluded_techniques(recipe)):
        return
    hints: list[Hint] = []
    for library in setting.backend.space(recipe).libraries:
        techniques = replace(plan.chosen.techniques, token_dispatcher="flex", flex_backend=library)
        changed = replace(_as_chosen(recipe, plan), techniques=techniques)
        try:
            (verdict,) = judge_layouts(setting.with_recipe(changed), [plan.layout])
        except UserError:
            continue
        if verdict.refusal is None and verdict.step_seconds is not None:
            gain = plan.chosen.step_seconds / verdict.step_seconds - 1.0
            remark = f"if the job's image has {LIBRARY_NAMES[library]}"
            hints.append(Hint("backend.libraries", [], [library], gain, remark))
    yield from hints[:1]


def _as_chosen(recipe: Recipe, plan: Plan) -> Recipe:
    return replace(recipe, techniques=plan.chosen.techniques)
