"""Recipes that ended in a traceback, or in a reason that did not hold, get a plan or the rule that is broken."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmlaunch.errors import UserError
from llmlaunch.families.lookup import resolve_model
from llmlaunch.models.shape import ModelShape
from llmlaunch.planner.legality import situation
from llmlaunch.planner.search import search
from llmlaunch.recipe.load import load_recipe
from support.command_line import CommandLine
from support.plans import setting_for
from support.soak import share

FOLDER = Path(__file__).resolve().parents[2] / "data" / "odd_recipes"
SIZES = {"num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "vocab_size": 256}
MIXTURE = {"num_experts": 4, "topk": 2, "ffn_hidden_size": 32}


def path(name: str) -> Path:
    return FOLDER / f"{name}.yaml"


@pytest.mark.parametrize("name", ["two_pins", "neighbours_indexerror", "ds_moe_pattern"])
def test_a_recipe_whose_pins_are_offered_to_nobody_else_has_a_plan(llmlaunch: CommandLine, name: str) -> None:
    plan = llmlaunch.json("plan", path(name))
    assert plan["verdict"] == "safe"
    if name == "two_pins":  # states have neighbours where the pinned recompute is not offered without its pin
        assert {"zero_stage", "gradient_dtype"} <= {neighbour["field"] for neighbour in plan["neighbours"]}


def message(llmlaunch: CommandLine, name: str, *overrides: str) -> str:
    lines = llmlaunch("check", path(name), *overrides, code=2).stderr.splitlines()
    assert len(lines) == 1
    return lines[0]


BROKEN = {
    "interleaved micro-batches": (
        ("interleaved_batch", "layout.virtual_pipeline=2"),
        "layout.pipeline: 6 contradicts layout.virtual_pipeline: 2 ",
        "the pipeline size must divide the number of micro-batches (here 6 and 3) [interleaved-microbatches;",
    ),
    "experts beyond the devices": (
        ("experts_beyond_devices", "layout.techniques=asked"),
        "layout.pipeline: 4 contradicts layout.expert: 16: ",
        "must divide the number of devices (here 16 x 1 x 4 = 64 and 32) [expert-world;",
    ),
    "chunks that no cut has": (
        ("uneven_chunks", "layout.recompute=selective"),
        "layout.pipeline: 8 contradicts layout.virtual_pipeline: 2: ",
        "(here 8 x 2 = 16 and 40) [virtual-layers;",
    ),
    "the same, with every size pinned": (
        ("gradient_dtype_clash",),
        "layout.pipeline: 8 contradicts layout.virtual_pipeline: 2: ",
        "[virtual-layers;",
    ),
}


@pytest.mark.parametrize("name", share(BROKEN, ["interleaved micro-batches", "experts beyond the devices"]))
def test_the_rule_that_is_broken_is_named_with_its_numbers(llmlaunch: CommandLine, name: str) -> None:
    words, pins, rule = BROKEN[name]
    said = message(llmlaunch, *words)
    assert pins in said
    assert rule in said


def test_what_is_called_legal_instead_is_legal() -> None:
    recipe = load_recipe(path("interleaved_batch"), ["layout.virtual_pipeline=2", "layout.pipeline=3"])
    assert len(search(setting_for(recipe)).points)


def test_the_numbers_of_a_rule_are_those_that_it_refuses() -> None:
    here = setting_for(load_recipe(path("experts_beyond_devices")))
    ruled = [rule for rule in here.backend.rules(here.recipe) if rule.figures is not None]
    layouts = search(here.with_recipe(load_recipe(path("experts_beyond_devices"), ["nodes=8"]))).points.layouts
    for rule in ruled:
        assert rule.figures is not None
        assert " and " in rule.figures(situation(here.recipe, layouts.take(np.array([0]))))


def test_a_format_of_gradients_that_clashes_is_named_where_it_is_written(
    llmlaunch: CommandLine, tmp_path: Path
) -> None:
    said = llmlaunch(
        "check",
        path("uneven_chunks"),
        "backend=deepspeed",
        "layout={zero_stage: 0}",
        "training.gradient_dtype=fp32",
        code=2,
    ).stderr
    assert "contradicts training.gradient_dtype: fp32 (override training.gradient_dtype=fp32)" in said


def test_bridge_takes_the_loss_that_megatron_lms_parser_refuses(llmlaunch: CommandLine, tmp_path: Path) -> None:
    """megatron/core/model_parallel_config.py warns of it, and megatron/bridge/training/config.py lets it pass (0.6)."""
    llmlaunch("render", path("bridge_loss"), "layout.loss=te", "-o", tmp_path / "run")
    model = json.loads((tmp_path / "run" / "bridge.json").read_text())["model"]
    assert (model["cross_entropy_loss_fusion"], model["cross_entropy_fusion_impl"]) == (True, "te")
    assert (
        "write loss: native"
        in llmlaunch("check", path("bridge_loss"), "layout.loss=te", "backend=megatron-lm", code=2).stderr
    )


def test_transformer_engines_loss_keeps_a_copy_of_the_logits() -> None:
    """transformer_engine/pytorch/cross_entropy.py, 2.20.2: the input is preserved unless overwrite_input is given."""
    facts = {
        loss: setting_for(load_recipe(path("bridge_loss"), [f"layout.loss={loss}"])).job.facts
        for loss in ("te", "native", "none")
    }
    assert [facts[loss].loss.logit_bytes for loss in ("te", "none", "native")] == [2 + 2, 2 + 4, 2 + 8]


def test_a_head_width_that_is_empty_is_named(llmlaunch: CommandLine) -> None:
    assert "head_dim_null.yaml:3: model.head_dim: is empty" in message(llmlaunch, "head_dim_null")


@pytest.mark.parametrize("name", sorted(ModelShape.__dataclass_fields__))
def test_no_key_of_a_model_may_be_empty_and_break_the_reader(name: str) -> None:
    with contextlib.suppress(UserError):
        resolve_model(SIZES | {"moe": MIXTURE, name: None}, default_positions=128)


@pytest.mark.parametrize("pattern", [[1, 1, 0, 1], [0, 1, 1, 1], [0, 1, 0, 1]])
def test_a_plain_mixture_with_dense_layers_is_one_that_transformers_builds(pattern: list[int]) -> None:
    spec: dict[str, Any] = SIZES | {"moe": MIXTURE | {"layer_pattern": pattern}}
    shape, notes = resolve_model(spec, default_positions=128, of_transformers=True)
    assert (shape.family, shape.qk_layernorm) == ("qwen3_moe", True)
    assert "norms on queries and keys" in notes[0]
    assert resolve_model(spec, default_positions=128)[0].family == "mixtral"  # Megatron builds it as it is
    written, _ = resolve_model(spec | {"qk_layernorm": False}, default_positions=128, of_transformers=True)
    assert written.family == "mixtral"


def test_a_mixture_whose_family_has_no_dense_layers_is_refused_by_their_name(llmlaunch: CommandLine) -> None:
    said = message(llmlaunch, "ds_moe_pattern", "model.family=mixtral")
    assert "its dense layers between mixtures cannot be said" in said


def test_a_snapshot_of_nothing_is_refused_by_check_as_by_render(llmlaunch: CommandLine, tmp_path: Path) -> None:
    asked = (path("two_pins"), "code={snapshot: true}")
    said = llmlaunch("check", *asked, code=2).stderr
    assert "code.snapshot: nothing to copy" in said
    assert "code.snapshot: nothing to copy" in llmlaunch("render", *asked, "-o", tmp_path / "run", code=2).stderr
