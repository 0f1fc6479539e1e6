"""Words of a person's own beside the plan: whatever flag says again what is planned is refused by name."""

from __future__ import annotations

import pytest

from llmlaunch.backends.base import Rendered
from llmlaunch.backends.megatron.arguments import PLANNED_BY
from llmlaunch.backends.megatron.backend import MegatronLM
from llmlaunch.backends.megatron.versions import core_parser
from llmlaunch.errors import UserError
from llmlaunch.layout import Layout
from support.recipe_keys import schema
from support.recipes import recipe_of

LAYOUT = Layout(8, 4, data=16, sequence_parallel=1, zero_stage=1)
SAVING = ("training.save_interval=100", "training.checkpoint_path=/ckpt")


def rendered(*words: str, layout: Layout = LAYOUT) -> Rendered:
    backend = f"backend={{name: megatron-lm, extra_args: {list(words)}}}"
    return MegatronLM().render(recipe_of("llama3-70b", backend, *SAVING), layout)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--lr=1.0",), "--lr is planned by llmlaunch already (by training.learning_rate)"),
        (("--lr", "1.0"), "--lr is planned by llmlaunch already"),
        (("--persistent-save-interval", "5"), "--persistent-save-interval says what --save-interval does"),
        (("--fp16",), "--fp16 would change what is planned; say it as training.precision"),
        (("--recompute-activations",), "say it as layout.recompute"),
        (("--num-layers-per-virtual-pipeline-stage=2",), "say it as layout.layers_by_stage"),
        (("--use-megatron-fsdp",), "say it as layout.zero_stage"),
        (("--data-args-path", "x"), "say it as data.blend"),
    ],
)
def test_what_contradicts_the_plan_is_refused_and_names_the_key(words: tuple[str, ...], why: str) -> None:
    with pytest.raises(UserError, match=r"backend\.extra_args: ") as refused:
        rendered(*words)
    assert why in str(refused.value)


def test_a_switch_that_is_off_in_the_plan_stays_off() -> None:
    with pytest.raises(UserError, match=r"--sequence-parallel would change .*; say it as layout\.sequence"):
        rendered("--sequence-parallel", layout=Layout(8, 4, data=16, zero_stage=1))


@pytest.mark.parametrize("words", [("--manual-gc",), ("--min-lr", "1e-5"), ("--of-my-fork", "--value=--lr")])
def test_what_the_plan_does_not_speak_of_passes(words: tuple[str, ...]) -> None:
    assert rendered(*words).program[-len(words) :] == words


def test_every_name_is_one_of_the_parser_and_every_key_one_of_a_recipe() -> None:
    names = {flag.dest for flag in core_parser("0.19").flags.values()}
    assert PLANNED_BY.keys() <= names
    parts = {"layout": "Layout", "training": "Training", "data": "Data", "model": "Model"}
    for key in PLANNED_BY.values():
        part, _, name = key.partition(".")
        assert name in schema()["$defs"][parts[part]]["properties"], key
