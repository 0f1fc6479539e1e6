"""A measurement record prices the very step that was planned: what is learned from it is no mistake of reading it."""

from __future__ import annotations

import json

import pytest

from llmlaunch.calibration.step_times import predicted_seconds, timed_runs
from llmlaunch.cluster.cards import machines
from llmlaunch.planner.plan import as_planned
from llmlaunch.rendering.run_json import measurement_template
from support.plans import gallery_setting, plan_of
from support.soak import share

GALLERY = ("llama3-8b", "mixtral-8x7b", "llama2-7b-deepspeed", "llama3.1-8b-ulysses")


@pytest.mark.parametrize("name", share(GALLERY, ["mixtral-8x7b"]))
def test_a_record_prices_the_step_that_was_planned(name: str) -> None:
    setting, plan = gallery_setting(name), plan_of(name)
    recipe = as_planned(setting.recipe, plan.chosen)
    template = measurement_template(recipe, plan)
    record = {**json.loads(json.dumps(template)), "id": "r/1/rank0/device", "peak_bytes": 1, "step_seconds": 1.0}
    [[run]] = timed_runs([record], machines())[0].values()
    assert predicted_seconds(run) == pytest.approx(plan.chosen.step_seconds, rel=1e-3)
    assert (run.cluster.node_link, run.cluster.fabric_link) == (recipe.cluster.node_link, recipe.cluster.fabric_link)
