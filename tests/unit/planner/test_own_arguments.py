"""An argument that nobody knows is never called safe without the person's word."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llmlaunch.errors import NothingSafe, UserError
from llmlaunch.planner.judge import refuse
from llmlaunch.planner.planning import make_plan
from llmlaunch.units import GIB
from support.command_line import CommandLine
from support.plans import gallery_setting
from support.recipes import recipe_text, small
from support.tight import ONE_LAYOUT, RECIPE, rehearsal_of

UNKNOWN = ("--of-my-fork", "--log-params-norm")


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


def test_an_unsafe_layout_stays_unsafe() -> None:
    setting = gallery_setting(RECIPE, ONE_LAYOUT, backend(*UNKNOWN))
    tiny = replace(setting.limit, limit_bytes=GIB, memory_bytes=GIB, fits_bytes=GIB)
    assert make_plan(replace(setting, limit=tiny)).verdict == "unsafe"


def test_check_names_the_classes_and_exits_with_3(llmlaunch: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_text(layout="{tensor: 8, pipeline: 2, context: 1, micro_batch_size: 1}"))
    words = ("--attention-backend", "unfused", "--adam-eps", "1e-15", *UNKNOWN)
    shown = llmlaunch("check", "-v", str(path), backend(*words), code=3)
    assert "your arguments: priced: --attention-backend unfused; neutral: --adam-eps 1e-15; unknown:" in shown.stdout
    plan = llmlaunch.json("check", str(path), backend(*words), code=3)
    assert plan["arguments"] == {
        "priced": ["--attention-backend unfused"],
        "neutral": ["--adam-eps 1e-15"],
        "unknown": list(UNKNOWN),
    }
    assert llmlaunch.json("check", str(path))["arguments"] is None
