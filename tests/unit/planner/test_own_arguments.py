"""An argument that nobody knows counts where its cost could matter, for safe and for unsafe plans alike."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from llmlaunch.errors import NothingSafe, NoVerdict, UserError
from llmlaunch.memory.peak import MODEL_STATES, OUTSIDE_TORCH
from llmlaunch.planner.plan import Plan
from llmlaunch.planner.planning import make_plan
from llmlaunch.planner.refusal import refuse
from llmlaunch.units import GIB, gib
from support.command_line import CommandLine
from support.plans import gallery_setting, setting_for
from support.recipes import recipe_text, small
from support.soak import share
from support.tight import ONE_LAYOUT, RECIPE, rehearsal_of

UNKNOWN = ("--of-my-fork", "--log-params-norm")
ONE_STAGE = "layout.pipeline=1"
ROOMY, TINY = 200.0, 1.0  # GiB of a card on which all layouts fit, and none


def backend(*words: str, **keys: object) -> str:
    return f"backend={json.dumps({'name': 'megatron-lm', 'extra_args': words, **keys})}"


def test_a_safe_layout_with_an_unknown_argument_is_tight_and_not_submitted() -> None:
    known = make_plan(gallery_setting(RECIPE, ONE_LAYOUT, backend("--adam-eps", "1e-15")))
    plan = make_plan(gallery_setting(RECIPE, ONE_LAYOUT, backend("--adam-eps", "1e-15", *UNKNOWN)))
    assert (known.verdict, plan.verdict, plan.verdict_by_estimate) == ("safe", "tight", "safe")
    assert known.device_bytes == plan.device_bytes
    with pytest.raises(NothingSafe) as refused:
        refuse(plan)
    assert f"neutral_args: [{', '.join(UNKNOWN)}]" in str(refused.value)
    assert "--adam-eps" not in str(refused.value)


def test_the_persons_word_makes_it_safe_and_accepting_tight_plans_makes_it_run() -> None:
    trusted = make_plan(gallery_setting(RECIPE, ONE_LAYOUT, backend(*UNKNOWN, neutral_args=UNKNOWN)))
    assert (trusted.verdict, trusted.arguments.unknown) == ("safe", ())
    half = make_plan(gallery_setting(RECIPE, ONE_LAYOUT, backend(*UNKNOWN, neutral_args=UNKNOWN[:1])))
    assert [argument.flag for argument in half.arguments.unknown] == ["--log-params-norm"]
    accepted = make_plan(gallery_setting(RECIPE, ONE_LAYOUT, backend(*UNKNOWN), "memory.accept=tight"))
    assert (accepted.verdict, accepted.may_run) == ("tight", True)


def test_a_rehearsal_with_the_argument_answers_for_it() -> None:
    setting = gallery_setting(RECIPE, ONE_LAYOUT, backend(*UNKNOWN))
    plan = make_plan(setting)
    rehearsal = rehearsal_of(plan, setting, plan.device_bytes / GIB)
    rehearsed = replace(setting, lessons=replace(setting.lessons, rehearsals=(rehearsal,)))
    assert make_plan(rehearsed).verdict == "safe"


def test_what_the_person_calls_neutral_must_be_passed_on() -> None:
    with pytest.raises(UserError, match=r"neutral_args.*--other stands in neither extra_args nor script_args"):
        small(backend(*UNKNOWN, neutral_args=["--other"]))


def with_limit(gib: float, *words: str) -> Plan:
    """Return the plan of the one layout with these arguments on a card of so many GiB."""
    setting = gallery_setting(RECIPE, ONE_LAYOUT, ONE_STAGE, backend(*words))
    size = int(gib * GIB)
    return make_plan(
        replace(setting, limit=replace(setting.limit, limit_bytes=size, memory_bytes=size, fits_bytes=size))
    )


@cache
def known_gib(card_gib: float) -> tuple[float, float]:
    """Return the GiB that the plan for a card of so many needs without unknown arguments, and how many of them a step
    adds to the model states and to what torch does not hold."""
    plan = with_limit(card_gib)
    return plan.device_bytes / GIB, step_gib(plan)


def step_gib(plan: Plan) -> float:
    lasting = sum(plan.estimate.worst.terms.get(name, 0) for name in (*MODEL_STATES, *OUTSIDE_TORCH))
    return (plan.estimate.worst.device_bytes - lasting) / GIB


def test_what_an_unknown_argument_could_cost_at_most_is_what_a_step_adds() -> None:
    needs, step = known_gib(ROOMY)
    assert 1.0 < step < needs
    roomy, full = with_limit(needs + 1.01 * step, *UNKNOWN), with_limit(needs + 0.99 * step, *UNKNOWN)
    assert (roomy.verdict, full.verdict) == ("safe", "tight")
    (note,) = (note for note in roomy.assumptions if UNKNOWN[0] in note)
    assert f"needs at most {step:.1f} GiB more, which fits" in note


def test_what_an_unknown_argument_could_spare_is_half_of_what_a_step_adds() -> None:
    needs, step = known_gib(TINY)
    near, far = with_limit(needs - 0.49 * step, *UNKNOWN), with_limit(needs - 0.51 * step, *UNKNOWN)
    assert (near.verdict, far.verdict) == ("unknown", "unsafe")
    assert f"{gib(int(0.49 * step * GIB))} GiB too much without arguments that may need less" in near.reason
    assert far.reason == ""
    with pytest.raises(NoVerdict, match="rehearse"):
        refuse(near)
    assert with_limit(needs - 0.49 * step).verdict == "unsafe"  # without the arguments


@pytest.mark.parametrize(
    ("flags", "above", "below"),
    [
        (("--log-params-norm",), "tight", "unsafe"),  # can only need more
        (("--use-precision-aware-optimizer",), "safe", "unknown"),  # can only need less, of the model states, too
        (("--of-my-fork",), "tight", "unsafe"),  # below, by more than half of what a step adds
        (("--adam-eps", "1e-15"), "safe", "unsafe"),
        (("--optimizer", "sgd"), "unknown", "unknown"),  # decides it, whatever the room
    ],
)
def test_what_is_known_of_an_unknown_argument_counts(flags: tuple[str, ...], above: str, below: str) -> None:
    needs, step = known_gib(ROOMY)
    assert with_limit(needs + 0.5 * step, *flags).verdict == above
    needs, step = known_gib(TINY)
    assert with_limit(needs - 0.6 * step, *flags).verdict == below


@pytest.mark.parametrize(
    "layout", share(["tensor: 4, pipeline: 1", "tensor: 2, pipeline: 4"], ["tensor: 4, pipeline: 1"])
)
def test_no_argument_that_is_priced_changes_more_than_an_unknown_one_may(layout: str) -> None:
    pinned = f"layout={{techniques: asked, {layout}, context: 1, micro_batch_size: 1, recompute: none}}"
    plain = make_plan(setting_for(small(pinned)))
    for words in (
        ("--no-gradient-accumulation-fusion",),
        ("--no-bias-swiglu-fusion",),
        ("--defer-embedding-wgrad-compute", "--wgrad-deferral-limit", "1"),
    ):
        changed = make_plan(setting_for(small(pinned, backend(*words))))
        more = (changed.device_bytes - plain.device_bytes) / GIB
        assert -0.5 * step_gib(plain) <= more <= step_gib(plain), words


def test_check_names_the_classes(llmlaunch: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_text(layout="{tensor: 8, pipeline: 2, context: 1, micro_batch_size: 1, techniques: asked}"))
    words = ("--attention-backend", "unfused", "--adam-eps", "1e-15", *UNKNOWN)
    shown = llmlaunch("check", "-v", str(path), backend(*words))
    assert "your arguments: priced: --attention-backend unfused; neutral: --adam-eps 1e-15; unknown:" in shown.stdout
    plan = llmlaunch.json("check", str(path), backend(*words))
    assert plan["verdict"] == "safe"
    assert plan["arguments"] == {
        "priced": ["--attention-backend unfused"],
        "neutral": ["--adam-eps 1e-15"],
        "unknown": list(UNKNOWN),
    }
