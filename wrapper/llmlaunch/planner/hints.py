"""What a recipe fixes that makes its training slower: each with the one line to write, and the gain as it is priced.

A hint is about what is the person's to choose: a pin of the layout, a batch that devices cannot share evenly, fp32, a
library that nobody says the job has.
What the planner is free to choose is the fastest already.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from llmlaunch.frozen import frozen
from llmlaunch.planner.plan import Plan
from llmlaunch.planner.search_space import as_ints, excluded_techniques, yaml_text
from llmlaunch.planner.setting import Setting, within_budget
from llmlaunch.recipe.written import written_pin
from llmlaunch.techniques.switches import TokenDispatch
from llmlaunch.techniques.technique import key_of

LEAST_GAIN = 0.02  # what a model of time can tell apart, and is worth a change
MOST_HINTS = 3
HINT_CANDIDATES = 100_000  # of each kind of hint (`PricingBudget`); a search of a whole space is some 40 000
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
    kinds = (_other_pins, _other_batches, _narrower_numbers, _libraries)
    hints = [hint for kind in kinds for hint in within_budget(HINT_CANDIDATES, kind(setting, plan))[0]]
    worthwhile = [hint for hint in hints if hint.gain >= LEAST_GAIN]
    return sorted(worthwhile, key=lambda hint: -hint.gain)[:MOST_HINTS]


def _other_pins(setting: Setting, plan: Plan) -> Iterator[Hint]:
    """Yield for each pin the value that would be planned if it alone were free, where that is another one."""
    recipe = setting.recipe
    if not recipe.pins:
        return
    from llmlaunch.planner.changes import BELONGS, as_pin, planned, relax_pins, stated_value

    for name, pin in recipe.pins.items():
        if name == "recompute" and any(stated_value(recipe, other) for other in BELONGS):
            continue
        best = planned(setting, relax_pins(setting, keep=recipe.pins.keys() - {name}))
        if best is None:
            continue
        number = int(getattr(best.layout, name))
        value = as_pin(name, number)
        if value is not None and number not in as_ints(name, pin):
            written = written_pin(recipe, name)
            gain = plan.chosen.step_seconds / best.step_seconds - 1.0
            yield Hint(written.key, written.value(pin), written.value(value), gain)


def _other_batches(setting: Setting, plan: Plan) -> Iterator[Hint]:
    """Yield the nearby batch with the highest rate, where the devices cannot share the recipe's evenly."""
    recipe, key = setting.recipe, "training.global_batch_size"
    batch = recipe.workload.global_batch_size
    if batch % recipe.world_size == 0:
        return
    from llmlaunch.planner.changes import as_pin, planned, resized

    here = {name: as_pin(name, int(getattr(plan.layout, name))) for name in KEPT_WITH_BATCH}
    near = replace(recipe, pins={**{name: value for name, value in here.items() if value is not None}, **recipe.pins})
    rates: dict[int, float] = {}
    for other in _even_batches(batch, recipe.world_size):
        chosen = planned(setting, resized(near, key, other).recipe)
        rates |= {} if chosen is None else {other: chosen.tokens_per_second_per_gpu}
    best = max(rates, key=lambda other: rates[other], default=batch)
    chosen = planned(setting, resized(recipe, key, best).recipe) if rates else None
    if chosen is not None:
        gain = chosen.tokens_per_second_per_gpu / plan.chosen.tokens_per_second_per_gpu - 1.0
        remark = f"{recipe.world_size} devices share it evenly; the batch is part of what the model learns"
        yield Hint(key, batch, best, gain, remark)


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
    for gain in _gains(setting, plan, training=replace(recipe.training, precision="bf16")):
        yield Hint("training.precision", "fp32", "bf16", gain, "weights of the optimizer stay fp32")


def _libraries(setting: Setting, plan: Plan) -> Iterator[Hint]:
    """Yield the library that sends tokens to their experts faster, in the same layout, where nothing says whether the
    job's environment has it."""
    recipe, dispatcher = setting.recipe, key_of(TokenDispatch)
    if recipe.backend.libraries or dispatcher in (*recipe.fixed, *excluded_techniques(recipe)):
        return
    for library in setting.backend.space(recipe).libraries:
        techniques = replace(plan.chosen.techniques, token_dispatcher="flex", flex_backend=library)
        for gain in _gains(setting, plan, techniques=techniques):
            remark = f"if the job's image has {LIBRARY_NAMES[library]}"
            yield Hint("backend.libraries", [], [library], gain, remark)
            return


def _gains(setting: Setting, plan: Plan, **changed: Any) -> Iterator[float]:
    """Yield what the planned layout gains with `changed` fields of its recipe; nothing where it is not safe so."""
    from llmlaunch.planner.changes import safe_layouts

    recipe = replace(setting.recipe, **{"techniques": plan.chosen.techniques, **changed})
    for seconds, _ in safe_layouts(setting, recipe, [plan.layout]):
        yield plan.chosen.step_seconds / seconds - 1.0
