"""The schedule of a recipe as the shipped DeepSpeed script hears and obeys it."""

from __future__ import annotations

import argparse
import importlib.util

import pytest

from llmlaunch.layout import Layout
from llmlaunch.trainers import TRAINER
from support.backend_output import words_of
from support.recipes import recipe_of

SPEC = importlib.util.spec_from_file_location("learning_of_the_script", TRAINER.with_name("learning.py"))
assert SPEC is not None
assert SPEC.loader is not None
LEARNING = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(LEARNING)


def heard(*overrides: str) -> argparse.Namespace:
    """What the script makes of its words."""
    recipe = recipe_of("llama2-7b-deepspeed", "training.steps=100", *overrides)
    parser = argparse.ArgumentParser()
    LEARNING.add_learning(parser)
    parser.add_argument("--steps", type=int)
    return parser.parse_known_args(words_of(recipe, Layout(data=recipe.world_size))[1:])[0]


def rates(*overrides: str) -> list[float]:
    args = heard("training.learning_rate=0.001", *overrides)
    return [LEARNING.learning_rate(args, step) for step in range(args.steps + 1)]


def test_by_itself_it_warms_up_and_stays() -> None:
    rising, steady = rates()[:10], rates()[10:]
    assert rising == pytest.approx([0.001 * (step + 1) / 11 for step in range(10)])
    assert steady == [0.001] * 91
    args = heard()
    assert (args.weight_decay, args.adam_betas, args.minimum_learning_rate) == (0.1, [0.9, 0.95], 0.0)


def test_a_decay_begins_at_the_peak_and_ends_at_the_minimum() -> None:
    overrides = ("training.warmup_steps=20", "training.minimum_learning_rate=0.0001")
    linear, cosine = (rates(*overrides, f"training.learning_rate_decay={decay}") for decay in ("linear", "cosine"))
    for rate in (linear, cosine):
        assert [rate[step] for step in (20, 60, 100)] == pytest.approx([0.001, 0.00055, 0.0001])  # 60 is half-way
    assert linear[40] < cosine[40] < cosine[20]


def test_adamw_is_the_recipes() -> None:
    args = heard("training.weight_decay=0.01", "training.adam_betas=[0.8, 0.99]")
    assert (args.weight_decay, args.adam_betas) == (0.01, [0.8, 0.99])
