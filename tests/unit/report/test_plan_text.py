"""A plan says under which techniques its figures hold."""

from __future__ import annotations

import re

from llmlaunch.calibration.lessons import NO_LESSONS, Lessons
from llmlaunch.calibration.ratios import RunClass, Score, support_of
from llmlaunch.memory.job import Correction
from llmlaunch.planner.planning import make_plan
from llmlaunch.planner.refusal import explain_unsafe
from llmlaunch.report.plan_text import check_text, plan_text
from support.plans import gallery_setting, plan_of
from support.recipes import recipe_of

ONE = "layout={tensor: 2, pipeline: 1, context: 1, micro_batch_size: 1, recompute: none, techniques: asked}"


def said(*overrides: str, recipe: str = "llama3-8b", lessons: Lessons = NO_LESSONS) -> str:
    """What `check` says of a recipe of the gallery."""
    setting = gallery_setting(recipe, *(overrides or [ONE] if recipe == "llama3-8b" else overrides), lessons=lessons)
    return check_text(setting.recipe, make_plan(setting))


def test_techniques_stand_in_the_headline() -> None:
    few = "zero_stage: 3, context: 1, micro_batch_size: 1, recompute: none, techniques: asked"
    asked = (f"layout={{offload_parameters: true, mlp_chunks: 4, {few}}}", "training.adapters={rank: 8}")
    text = said(*asked, recipe="llama2-7b-deepspeed")
    assert "  with offload_parameters on, mlp_chunks 4, adapters rank 8 frozen_down off" in text
    assert "\n  with " not in said(f"layout={{{few}}}", recipe="llama2-7b-deepspeed")


def test_the_refusals_and_the_safe_layouts_add_up_to_what_was_searched() -> None:
    plan = plan_of("llama3-8b")
    text = plan_text(recipe_of("llama3-8b"), plan)
    head = re.search(r"Searched ([\d,]+) layouts; ([\d,]+) are legal and safe; refused", text)
    assert head is not None
    searched, safe = (int(figure.replace(",", "")) for figure in head.groups())
    counted = re.findall(r"^ +([\d,]+)  ([a-z_-]+): \S", text, flags=re.MULTILINE)
    assert safe + sum(int(count.replace(",", "")) for count, _ in counted) == searched
    assert {key for _, key in counted} == set(plan.refused)


def test_ranked_layouts_say_the_words_that_tell_them_apart() -> None:
    plan = plan_of("llama3-70b")
    ranked = [candidate.describe() for candidate in (plan.chosen, *plan.alternatives)]
    assert len(set(ranked)) == len(ranked)
    assert all(line in plan_text(recipe_of("llama3-70b"), plan) for line in ranked)


def test_a_plan_that_is_not_safe_calls_its_layouts_the_closest() -> None:
    few = "context: 1, layers_by_stage: even, recompute: none, offload_layers: 0, offload_optimizer: 0"
    overrides = ("nodes=1", f"layout={{{few}, techniques: asked}}")
    text = plan_text(recipe_of("llama3-70b", *overrides), plan_of("llama3-70b", *overrides))
    assert "Closest layouts, none of them safe" in text


def lessons(torch_share: float, outside_gib: float, highest: float = 1.02) -> Lessons:
    scores = [Score(ratio, "device", "dense gated", None, 0.7) for ratio in (0.98, 1.0, highest)]
    support = support_of(scores, RunClass("h100-80gb", "dense gated", None), "an id")
    return Lessons(None, Correction(torch_share, outside_gib * 2**30, "an id"), support)


def test_what_measured_runs_add_is_a_term_and_a_line() -> None:
    text = said(lessons=lessons(0.02, -0.31))
    assert re.search(r"^  measured residual +\d", text, flags=re.MULTILINE)
    assert re.search(
        r"  measured residual \+[\d.]+ GiB allocated, \+2\.0% of torch's memory, -0\.31 GiB outside torch "
        r"\(calibration an id, 3 runs\)",
        text,
    )
    assert "  own runs: 3 runs on h100-80gb, 3 of this family of models (dense gated): none peaked" in text
    assert "more than the limit leaves free" not in text
    assert "measured residual" not in said()


def test_runs_that_exceeded_their_predictions_by_more_than_the_limit_leaves_are_pointed_out() -> None:
    text = said(lessons=lessons(0.0, 0.0, highest=1.4))
    assert "none peaked more than 40.0 % above its prediction (calibration an id); that is more than the limit" in text


def test_a_refusal_says_what_of_it_was_measured() -> None:
    overrides = ("nodes=1", "layout={tensor: 1, pipeline: 1, context: 1, recompute: none, techniques: asked}")
    plan = make_plan(gallery_setting("llama3-8b", *overrides, lessons=lessons(0.9, 9.0)))
    assert not plan.safe
    refusal = str(explain_unsafe(plan))
    assert "GiB too much), most of it" in refusal
    assert "and measured residual +" in refusal
    assert "+9.00 GiB outside torch (calibration an id, 3 runs)" in refusal
