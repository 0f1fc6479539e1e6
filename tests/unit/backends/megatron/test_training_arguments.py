"""Formats of checkpoints, and where TensorBoard's files go."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmlaunch.assets import asset
from llmlaunch.backends.argument import command_words
from llmlaunch.backends.checkpoints import reshards, save_seconds
from llmlaunch.backends.megatron.backend import MegatronLM
from llmlaunch.errors import UserError
from llmlaunch.layout import Layout
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.types import Recipe

SAVING = ("training.save_interval=100", "training.checkpoint_path=/ckpt")
OLD = ("training.checkpoint_format=torch", "layout.zero_stage=0")
WHOLE = Layout(8, 8, data=8, sequence_parallel=1)


def recipe_of(*overrides: str, name: str = "llama3-70b") -> Recipe:
    return load_recipe(asset("recipes", f"{name}.yaml"), (*SAVING, *overrides))


def format_of(recipe: Recipe, layout: Layout) -> str:
    words = command_words(MegatronLM().render(recipe, layout).arguments)
    assert words.count("--ckpt-format") == 1
    return words[words.index("--ckpt-format") + 1]


def test_each_layout_has_its_format_and_a_recipe_may_say_another() -> None:
    assert format_of(recipe_of(), WHOLE) == "torch_dist"
    assert format_of(recipe_of(*OLD), WHOLE) == "torch"
    sharded = ("layout.zero_stage=3", "training.checkpoint_format=fsdp_dtensor")
    assert format_of(recipe_of(*sharded), Layout(data=512, zero_stage=3)) == "fsdp_dtensor"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("training.checkpoint_format=torch_dcp",), "torch_dcp needs --use-torch-fsdp2"),
        (("training.checkpoint_format=fsdp_dtensor",), "fsdp_dtensor needs zero_stage 2 or 3"),
        (("training.checkpoint_format=torch",), "torch needs zero_stage: 0 pinned"),
        (("training.checkpoint_format=torch", "layout.zero_stage=[0, 1]"), "torch needs zero_stage: 0 pinned"),
        (("training.checkpoint_format=torch_dist", "layout.zero_stage=3"), "take fsdp_dtensor alone"),
    ],
)
def test_a_format_that_does_not_go_with_the_layout_is_refused(words: tuple[str, ...], why: str) -> None:
    with pytest.raises(UserError, match=r"training\.checkpoint_format: ") as refused:
        MegatronLM().rules(recipe_of(*words))
    assert why in str(refused.value)


def test_the_old_format_is_of_one_cut_and_written_by_few() -> None:
    old, new = recipe_of(*OLD), recipe_of()
    other = replace(WHOLE, pipeline=4, data=16)
    assert reshards(new, WHOLE, other)
    assert not reshards(old, WHOLE, other)
    assert reshards(old, WHOLE, replace(WHOLE, context=2, data=4))
    assert save_seconds(old, WHOLE) > save_seconds(new, WHOLE)


def test_tensorboard_gets_its_folder() -> None:
    words = command_words(MegatronLM().render(recipe_of("training.tensorboard=/tb"), WHOLE).arguments)
    assert words[words.index("--tensorboard-dir") + 1] == "/tb"


@pytest.mark.parametrize("said", ["checkpoint_format=torch", "tensorboard=/tb"])
def test_both_are_words_of_megatron(said: str) -> None:
    with pytest.raises(UserError, match=f"training.{said.partition('=')[0]}: is a word of megatron-lm"):
        recipe_of(f"training.{said}", name="quickstart")
