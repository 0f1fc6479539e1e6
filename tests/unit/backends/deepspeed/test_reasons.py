"""Every word, variable and ds_config key we render says what it follows from."""

from __future__ import annotations

import pytest

from llmlaunch.backends.argument import command_words
from llmlaunch.backends.deepspeed.config import REASONS, dotted_keys
from llmlaunch.layout import RECOMPUTE_FULL, Layout
from support.backend_output import ds_config, render
from support.recipes import recipe_of

GPU, CPU = "llama2-7b-deepspeed", "quickstart"
CASES = [
    (CPU, Layout(data=2, zero_stage=1), ()),
    (CPU, Layout(data=2, zero_stage=0), ("training.precision=fp32",)),
    (
        GPU,
        Layout(data=16, zero_stage=3, recompute=RECOMPUTE_FULL),
        ("layout={recompute: full, offload_checkpoints: true}",),
    ),
    (GPU, Layout(data=16, zero_stage=2), ("training.precision=fp16", "layout={offload_optimizer: 1.0}")),
    (GPU, Layout(data=16, zero_stage=3), ("layout={offload_optimizer: 1.0, offload_parameters: true}",)),
    (GPU, Layout(tensor=2, data=8, zero_stage=1), ("training.gradient_dtype=fp32",)),
    (GPU, Layout(context=2, data=8, zero_stage=2), ()),
    (
        GPU,
        Layout(pipeline=2, data=8, zero_stage=1),
        ("backend={name: deepspeed, script: t.py, script_kind: pipeline}",),
    ),
    (GPU, Layout(data=16, zero_stage=3), ("backend={name: deepspeed, script: t.py, script_kind: hugging-face}",)),
    (
        GPU,
        Layout(tensor=2, pipeline=2, data=4, zero_stage=1),
        ("backend={name: deepspeed, script: p.py, script_kind: megatron-deepspeed}", "data={path: /data/text}"),
    ),
    (GPU, Layout(data=16, zero_stage=3), ("backend={name: deepspeed, script: /home/me/train.py}",)),
]


@pytest.mark.parametrize(("name", "layout", "overrides"), CASES)
def test_nothing_is_rendered_without_a_reason(name: str, layout: Layout, overrides: tuple[str, ...]) -> None:
    recipe = recipe_of(name, *overrides)
    result = render(recipe, layout)
    assert list(result.settings) == list(dotted_keys(ds_config(recipe, layout)))
    assert set(result.environment) <= set(result.variables)
    words = command_words(result.arguments)
    assert words == result.program[-len(words) :]
    for reason in (*result.settings.values(), *(each.reason for each in result.arguments), *result.variables.values()):
        assert reason.keys or reason.why


def test_keys_are_listed_as_they_are_nested() -> None:
    assert list(dotted_keys({"b": {"y": 1, "x": {"z": 2}}, "a": 3})) == ["a", "b.x.z", "b.y"]


def test_every_reason_is_of_a_key_that_can_be_rendered() -> None:
    settings = [render(recipe_of(name, *overrides), layout).settings for name, layout, overrides in CASES]
    assert {key for each in settings for key in each} == set(REASONS)
