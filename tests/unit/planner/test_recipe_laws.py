"""Laws that every recipe keeps, tried on random ones: a plan or a message, and no answer that contradicts another."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from llmlaunch.app.planned_run import PlannedRun, plan
from llmlaunch.errors import UserError
from llmlaunch.planner.search import search
from support.plans import setting_for
from support.plausible_recipes import recipes, text_of

FEW = settings(max_examples=12, deadline=None, derandomize=True)


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


@FEW
@given(recipes())
def test_a_recipe_has_a_plan_or_a_message_and_no_verdict_contradicts_its_detail(recipe: dict[str, Any]) -> None:
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


@FEW
@given(recipes())
def test_what_check_accepts_is_rendered(recipe: dict[str, Any]) -> None:
    run = planned(recipe)
    if isinstance(run, str) or run.plan.unrendered:
        return
    try:
        run.refuse_unsafe()
        run.refuse_unrenderable()
        checked = ""
    except UserError as error:
        checked = str(error)
    with TemporaryDirectory() as folder:
        try:
            run.refuse_unsafe()
            run.write(Path(folder) / "run", lambda note: None)
            rendered = ""
        except UserError as error:
            rendered = str(error)
    assert checked == rendered


FREE = recipes(layout=st.just("auto"))


@FEW
@given(FREE, st.sampled_from([2, 4]))
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


@FEW
@given(FREE)
def test_longer_sequences_never_need_less(recipe: dict[str, Any]) -> None:
    longer = recipe | {"training": recipe["training"] | {"sequence_length": 2 * recipe["training"]["sequence_length"]}}
    run = planned(longer)
    if not isinstance(run, str) and run.verdict == "safe":
        shorter = planned(recipe)
        assert isinstance(shorter, str) or shorter.verdict == "safe"
