"""Laws that every recipe keeps, tried on random ones: a plan or a message, and no answer that contradicts another."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from llmlaunch.app.planned_run import PlannedRun, plan
from llmlaunch.errors import UserError
from llmlaunch.planner.search import search
from support.plans import setting_for
from support.plausible_recipes import recipes, text_of
from support.soak import examples


@contextlib.contextmanager
def written(recipe: dict[str, Any]) -> Any:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "random.yaml"
        path.write_text(text_of(recipe))
        yield path


def planned(recipe: dict[str, Any], *overrides: str) -> PlannedRun | str:
    """Return the plan, or the message of what a person must change; anything else that is raised is our fault."""
    with written(recipe) as path:
        try:
            return plan(path, overrides)
        except UserError as error:
            return str(error)


@examples(1)
@given(recipes())
def test_a_recipe_has_a_message_or_a_plan_that_agrees_with_itself_and_is_rendered_if_check_accepts_it(
    recipe: dict[str, Any],
) -> None:
    run = planned(recipe)
    if isinstance(run, str):
        assert run
        assert "Traceback" not in run
        return
    result, limit = run.plan, run.plan.limit.limit_bytes
    assert result.host_limit is not None
    device = max(rank.device_bytes for rank in result.estimate.ranks)
    host, host_limit = result.estimate.host_bytes_per_node or 0, result.host_limit.limit_bytes
    if run.verdict == "safe":
        assert device <= limit
        assert host <= host_limit
    if run.verdict == "unsafe":
        assert device > limit or host > host_limit or result.estimate.fault is not None
    assert device == result.device_bytes
    run.neighbours()
    run.hints()
    if not result.unrendered:
        assert refusal_of_check(run) == refusal_of_render(run)


def refusal_of_check(run: PlannedRun) -> str:
    try:
        run.refuse_unsafe()
        run.refuse_unrenderable()
    except UserError as error:
        return str(error)
    return ""


def refusal_of_render(run: PlannedRun) -> str:
    with TemporaryDirectory() as folder:
        try:
            run.refuse_unsafe()
            run.write(Path(folder) / "run", lambda note: None)
        except UserError as error:
            return str(error)
    return ""


@examples(2)
@given(recipes(layout=st.just("auto")), st.sampled_from([2, 4]))
def test_what_is_safe_stays_safe_with_more_memory_and_on_more_nodes(recipe: dict[str, Any], times: int) -> None:
    run = planned(recipe)
    if isinstance(run, str) or run.verdict != "safe":
        return
    here = setting_for(replace(run.setting.recipe, preference=False))
    roomier = replace(here, limit=replace(here.limit, limit_bytes=times * here.limit.limit_bytes))
    assert search(roomier, exact=1, safe_alone=True).safe.any()
    batch = recipe["training"]["global_batch_size"]
    more = planned(recipe, f"nodes={times * recipe['nodes']}", f"training.global_batch_size={times * batch}")
    assert isinstance(more, str) or more.verdict == "safe"
