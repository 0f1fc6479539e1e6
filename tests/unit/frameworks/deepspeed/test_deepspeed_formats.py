"""Formats of gradients and optimizer states on DeepSpeed: where each is legal, what is rendered and read back, and what
memory, time and checkpoints are then. What is refused whatever the layout: tests/unit/frameworks/test_rules.py."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import pytest

from llmlaunch.errors import UserError
from llmlaunch.frameworks.checkpoints import checkpoint_bytes
from llmlaunch.frameworks.deepspeed.backend import DeepSpeed
from llmlaunch.frameworks.deepspeed.command_line import read_ds_config
from llmlaunch.frameworks.deepspeed.number_formats import FORMAT_RULES
from llmlaunch.layers.parameters import count_parameters
from llmlaunch.layout import Layout
from llmlaunch.planner.changes import judge_layouts
from llmlaunch.planner.planning import make_plan
from llmlaunch.planner.setting import setting_of
from support.backend_output import ds_config, refused_by
from support.recipes import recipe_of

NAME = "llama2-7b-deepspeed"
BF16 = "training.optimizer={main_parameters: bf16, first_moment: bf16, second_moment: bf16}"
MASTERS, WIDE = "training.optimizer={main_parameters: bf16}", "training.gradient_dtype=fp32"
OWN, ON_HOST = "backend={name: deepspeed, script: train.py}", "layout={offload_optimizer: 1.0}"
MASTERS_KEY, STATES_KEY = "bf16_master_weights_and_grads", "bf16_optimizer_states"
STAGES = tuple(Layout(data=16, zero_stage=stage) for stage in range(4))
# Overrides, and the rules of formats that refuse ZeRO 0, 1, 2 and 3.
RULED: list[tuple[Sequence[str], tuple[str, str, str, str]]] = [
    ([BF16], ("bf16-masters-zero", "", "", "")),
    ([BF16, OWN, ON_HOST], ("bf16-masters-zero", "", "", "")),
    ([BF16, ON_HOST], ("bf16-masters-zero bf16-masters-on-device", *["bf16-masters-on-device"] * 3)),
    ([MASTERS, OWN, ON_HOST], ("bf16-masters-zero", "", "", "")),
    ([MASTERS, OWN], ("bf16-masters-zero bf16-masters-alone", *["bf16-masters-alone"] * 3)),
    ([WIDE], ("gradients-fp32-zero", "", "", "")),
    ([WIDE, ON_HOST], ("gradients-fp32-zero gradients-fp32-here", *["gradients-fp32-here"] * 3)),
    (
        [BF16, WIDE],
        ("gradients-fp32-zero bf16-masters-zero bf16-masters-fp32-gradients", "bf16-masters-fp32-gradients", "", ""),
    ),
]


@pytest.mark.parametrize(("overrides", "refused"), RULED)
def test_a_stage_has_the_formats_that_its_optimizer_has(overrides: Sequence[str], refused: tuple[str, ...]) -> None:
    recipe, keys = recipe_of(NAME, *overrides), {rule.key for rule in FORMAT_RULES}
    assert [refused_by(recipe, layout) & keys for layout in STAGES] == [set(said.split()) for said in refused]


def test_every_rule_of_formats_has_its_case() -> None:
    assert {key for _, refused in RULED for key in " ".join(refused).split()} == {rule.key for rule in FORMAT_RULES}


@pytest.mark.parametrize(
    ("formats", "written"), [(BF16, (True, True)), (MASTERS, (True, None)), ("training.optimizer={}", (None, None))]
)
def test_formats_are_written_and_read_back(formats: str, written: tuple[bool | None, bool | None]) -> None:
    recipe = recipe_of(NAME, formats, OWN, ON_HOST)
    config = ds_config(recipe, STAGES[2])
    assert tuple(config["bf16"].get(key) for key in (MASTERS_KEY, STATES_KEY)) == written
    read = read_ds_config(json.dumps(config)).document["training"].get("optimizer", {})
    assert read.items() <= asdict(recipe.training.numbers.optimizer).items()
    assert set(read.values()) <= {"bf16"}
    assert len(read) == (3 if written[1] else int(bool(written[0])))


def test_they_are_the_recipes_and_no_key_of_the_file() -> None:
    own = recipe_of(NAME, f"backend={{name: deepspeed, ds_config: {{bf16: {{{MASTERS_KEY}: true}}}}}}")
    with pytest.raises(UserError, match=f"ds_config.bf16.{MASTERS_KEY}: follows from training.optimizer; write that"):
        make_plan(setting_of(own, DeepSpeed()))


def test_a_release_without_them_is_named() -> None:
    old = recipe_of(NAME, BF16, "backend={name: deepspeed, version: '0.18.2'}")
    with pytest.raises(
        UserError, match=rf"training.optimizer: is rendered with bf16.{MASTERS_KEY}, .*came with 0.18.3"
    ):
        make_plan(setting_of(old, DeepSpeed()))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_they_take_half_the_states_on_the_device_in_a_checkpoint_and_in_the_update(stage: int) -> None:
    wide, narrow = recipe_of(NAME), recipe_of(NAME, BF16)
    parameters = count_parameters(wide.model).total
    verdicts = [judge_layouts(setting_of(recipe, DeepSpeed()), [STAGES[stage]])[0] for recipe in (wide, narrow)]
    bytes_, seconds = zip(*((verdict.device_bytes, verdict.step_seconds) for verdict in verdicts), strict=True)
    assert bytes_[0] - bytes_[1] >= 6 * parameters / 16
    assert seconds[1] < seconds[0]
    assert (checkpoint_bytes(wide), checkpoint_bytes(narrow)) == (14 * parameters, 8 * parameters)


def test_nobody_who_asks_for_nothing_gets_them() -> None:
    assert not {MASTERS_KEY, STATES_KEY} & ds_config(recipe_of(NAME), STAGES[1])["bf16"].keys()
