"""What a recipe fixes that makes its training slower is told with the line to write and its gain, which comes true."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmlaunch.app.planned_run import plan
from llmlaunch.assets import asset
from llmlaunch.planner.hints import LEAST_GAIN, MOST_HINTS, Hint
from support.command_line import CommandLine
from support.recipes import SMALL

SLOW = {
    "tensor parallelism across nodes": ("layout={tensor: 16}", "layout.tensor", 0.2),
    "recompute of everything": ("layout={tensor: 8, recompute: full}", "layout.recompute", 0.1),
    "micro-batches that are too small": ("layout={tensor: 8, micro_batch_size: 1}", "layout.micro_batch_size", 0.02),
    "a deep pipeline without interleaving": (
        "layout={tensor: 4, pipeline: 8, virtual_pipeline: 1, micro_batch_size: 1}",
        "layout.pipeline",
        0.02,
    ),
    "a batch that divides badly": ("training.global_batch_size=100", "training.global_batch_size", 0.02),
    "fp32": ("training.precision=fp32 nodes=8", "training.precision", 0.5),
}


@pytest.mark.parametrize(("words", "key", "least"), SLOW.values(), ids=SLOW)
def test_a_slow_choice_has_a_hint_whose_gain_comes_true(words: str, key: str, least: float) -> None:
    overrides = words.split(" ") if "{" not in words else [words]
    before = plan(SMALL, overrides)
    hints = before.hints()
    assert 1 <= len(hints) <= MOST_HINTS
    assert [hint.gain for hint in hints] == sorted((hint.gain for hint in hints), reverse=True)
    (hint,) = [hint for hint in hints if hint.key == key]
    assert hint.gain >= max(least, LEAST_GAIN)
    after = plan(SMALL, [*overrides, f"{hint.key}={hint.value}"])
    assert after.verdict == "safe"
    gain = after.tokens_per_second_per_gpu / before.tokens_per_second_per_gpu - 1
    assert gain >= hint.gain - 0.002


def test_a_library_that_nobody_mentions_is_hinted_at_with_what_it_gains() -> None:
    mixture = asset("recipes", "qwen3-30b-a3b.yaml")
    before = plan(mixture)
    hint = next(hint for hint in before.hints() if hint.key == "backend.libraries")
    assert (hint.value, hint.remark) == (["deepep"], "if the job's image has DeepEP")
    after = plan(mixture, ["backend.libraries=[deepep]"])
    assert after.verdict == "safe"
    # a plan gives up to 2 % for a switch fewer (docs/planning.md, the preference)
    assert after.tokens_per_second_per_gpu / before.tokens_per_second_per_gpu - 1 >= hint.gain - 0.02
    assert not [hint for hint in after.hints() if hint.key == "backend.libraries"]


@pytest.mark.parametrize("words", [(), ("layout={tensor: 1}",), ("training.global_batch_size=480",)])
def test_what_is_the_fastest_already_has_no_hint(words: tuple[str, ...]) -> None:
    assert plan(SMALL, words).hints() == []


def test_a_plan_that_is_not_safe_has_no_hint() -> None:
    assert plan(SMALL, ["layout={tensor: 1, pipeline: 1, context: 1, zero_stage: 0}"]).hints() == []


def test_a_hint_says_what_to_write_and_what_stands_there() -> None:
    hint = Hint("layout.tensor", 16, 8, 0.1234, "and a remark")
    assert hint.sentence() == "layout.tensor: 8 (now 16): 12.3% more tokens a second; and a remark"
    assert hint.as_json() == {"key": "layout.tensor", "value": 8, "gain": 0.1234}


def test_check_shows_them(llmlaunch: CommandLine) -> None:
    slow: tuple[str | Path, ...] = ("check", SMALL, "layout={tensor: 16}")
    assert ", 1 way to be faster" in llmlaunch(*slow).stdout
    text = llmlaunch(*slow, "-v").stdout
    assert "Faster, by one line of the recipe:\n  layout.tensor: " in text
    hints = llmlaunch.json(*slow)["hints"]
    assert {"key", "value", "gain"} == set(hints[0])
    assert "hints" not in llmlaunch.json("check", SMALL)
