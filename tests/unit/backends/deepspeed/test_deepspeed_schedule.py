"""The schedule of a recipe as the shipped DeepSpeed script hears and obeys it."""

from __future__ import annotations

import argparse
import importlib.util
import json

import pytest

from llmlaunch.assets import asset
from llmlaunch.backends.deepspeed.backend import DeepSpeed
from llmlaunch.layout import Layout
from llmlaunch.recipe.load import load_recipe
from llmlaunch.trainers import TRAINER

SPEC = importlib.util.spec_from_file_location("learning_of_the_script", TRAINER.with_name("learning.py"))
assert SPEC is not None
assert SPEC.loader is not None
LEARNING = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(LEARNING)


def heard(*overrides: str) -> argparse.Namespace:
    """What the script makes of its words."""
    recipe = load_recipe(asset("recipes", "llama2-7b-deepspeed.yaml"), ("training.steps=100", *overrides))
    rendered = DeepSpeed().render(recipe, Layout(data=recipe.world_size))
    parser = argparse.ArgumentParser()
    LEARNING.add_learning(parser)
    parser.add_argument("--steps", type=int)
    return parser.parse_known_args([word for word in rendered.program if isinstance(word, str)][1:])[0]


def rates(*overrides: str) -> list[float]:
    args = heard("training.learning_rate=0.001", *overrides)
    return [LEARNING.learning_rate(args, step) for step in range(args.steps + 1)]


def test_by_itself_it_warms_up_and_stays() -> None:
    made = rates()
    assert made[:10] == pytest.approx([0.001 * (step + 1) / 11 for step in range(10)])
    assert made[10:] == [0.001] * 91
    args = heard()
    assert (args.weight_decay, args.adam_betas, args.minimum_learning_rate) == (0.1, [0.9, 0.95], 0.0)


def test_a_decay_begins_at_the_peak_and_ends_at_the_minimum() -> None:
    words = ("training.warmup_steps=20", "training.minimum_learning_rate=0.0001")
    linear = rates(*words, "training.learning_rate_decay=linear")
    assert linear[20] == pytest.approx(0.001)
    assert linear[60] == pytest.approx(0.00055)  # half-way between
    assert linear[100] == pytest.approx(0.0001)
    cosine = rates(*words, "training.learning_rate_decay=cosine")
    assert cosine[60] == pytest.approx(0.00055)
    assert linear[40] < cosine[40] < cosine[20] == pytest.approx(0.001)
    assert cosine[100] == pytest.approx(0.0001)


def test_adamw_and_clipping_are_the_recipes() -> None:
    words = ("training.weight_decay=0.01", "training.adam_betas=[0.8, 0.99]", "training.gradient_clipping=0.5")
    args = heard(*words)
    assert (args.weight_decay, args.adam_betas) == (0.01, [0.8, 0.99])
    recipe = load_recipe(asset("recipes", "llama2-7b-deepspeed.yaml"), words)
    rendered = DeepSpeed().render(recipe, Layout(data=recipe.world_size))
    assert json.loads(rendered.files["ds_config.json"])["gradient_clipping"] == 0.5
