"""Number formats and the schedule in a recipe: read, absent where nothing is said, refused where they contradict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from llmlaunch.cluster.load import find_accelerator
from llmlaunch.errors import UserError
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.training import number_notes
from llmlaunch.workload import NO_NUMBER_FORMATS, NumberFormats, OptimizerFormats

Write = Callable[[str | bytes], Path]


@pytest.fixture
def recipe(write: Write, good: str) -> Path:
    return write(good)


def test_a_recipe_that_names_none_has_none(recipe: Path) -> None:
    assert load_recipe(recipe).training.numbers == NO_NUMBER_FORMATS


def test_every_key_arrives(recipe: Path) -> None:
    words = ("training.fp8=mxfp8", "training.fp8_parameters=true", "training.optimizer={second_moment: bf16}")
    numbers = load_recipe(recipe, words).training.numbers
    assert numbers == NumberFormats("mxfp8", True, OptimizerFormats("fp32", "fp32", "bf16"))
    assert load_recipe(recipe, ("training.fp4=nvfp4",)).training.numbers == NumberFormats("nvfp4")
    assert load_recipe(recipe, ("training.optimizer={}",)).training.numbers.optimizer == OptimizerFormats()


def test_the_schedule_arrives(recipe: Path) -> None:
    words = (
        "training.warmup_steps=0",
        "training.learning_rate_decay=cosine",
        "training.minimum_learning_rate=0.0001",
        "training.weight_decay=0",
        "training.adam_betas=[0.5, 0.6]",
        "training.gradient_clipping=2",
    )
    training = load_recipe(recipe, words).training
    assert (training.warmup_steps, training.learning_rate_decay, training.minimum_learning_rate) == (0, "cosine", 1e-4)
    assert (training.weight_decay, training.adam_betas, training.gradient_clipping) == (0.0, (0.5, 0.6), 2.0)


def test_the_digest_sees_them_and_only_them(recipe: Path) -> None:
    plain = load_recipe(recipe).digest
    assert load_recipe(recipe, ("training.weight_decay=0.1", "training.fp8_parameters=false")).digest == plain
    others = ("training.fp8=delayed", "training.optimizer={}", "training.weight_decay=0.2", "training.warmup_steps=10")
    assert len({load_recipe(recipe, (word,)).digest for word in others} - {plain}) == len(others)


def test_a_device_whose_peak_is_not_known_is_told(recipe: Path) -> None:
    h100 = find_accelerator("h100-80gb")
    other = replace(h100, name="mine", flops_per_second={"bf16": 9e14})
    assert number_notes(NumberFormats("delayed"), h100) == number_notes(NumberFormats(), other) == ()
    [note] = number_notes(NumberFormats("delayed"), other)
    assert note == "mine has no fp8_tflops: narrow products are timed as those of bf16"
    loaded = load_recipe(recipe, ("training.fp4=nvfp4", "cluster=b200-x8"))
    assert "the fp4 peak of b200 is not known: twice its fp8 peak" in loaded.assumptions


def test_the_headline_names_all_formats() -> None:
    assert NO_NUMBER_FORMATS.beside("bf16") == "bf16"
    assert NumberFormats("blockwise").beside("bf16") == "bf16 and fp8 (blockwise)"
    assert NumberFormats("nvfp4").beside("bf16") == "bf16 and nvfp4"


DEEPSPEED = "backend=deepspeed"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("training.fp8=delayed", "training.fp4=nvfp4"), "training.fp4: linear layers multiply in one format"),
        (("training.fp8_parameters=true",), "training.fp8_parameters: belongs to fp8"),
        (("training.fp8=delayed", "training.precision=fp16"), "training.fp8: is for precision: bf16"),
        (("training.optimizer={}", "training.precision=fp32"), "training.optimizer: chooses formats beside half"),
        (("training.fp8=delayed", DEEPSPEED), "training.fp8: is a word of megatron-lm"),
        (("training.fp8_parameters=true", DEEPSPEED), "training.fp8_parameters: is a word of megatron-lm"),
        (("training.optimizer={}", DEEPSPEED), "training.optimizer: is a word of megatron-lm"),
        (("training.fp8=fp8",), "training.fp8: "),
        (("training.optimizer={main_parameters: bf16}",), "training.optimizer.main_parameters: "),
        (("training.warmup_steps=1000",), "training.warmup_steps: 1000 of 1000 steps"),
        (("training.minimum_learning_rate=1.0",), "training.minimum_learning_rate: is above the learning rate"),
        (
            ("training.minimum_learning_rate=1.0e-5", "training.learning_rate_decay=constant"),
            "training.minimum_learning_rate: belongs to a decay",
        ),
        (("training.adam_betas=[0.9]",), "training.adam_betas"),
        (("training.adam_betas=[0.9, 1.0]",), r"training.adam_betas\[1\]"),
        (("training.minimum_learning_rate=1.0e-5", DEEPSPEED), "training.minimum_learning_rate: belongs to a decay"),
    ],
)
def test_contradictions_are_told_with_their_key(recipe: Path, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_recipe(recipe, overrides)
