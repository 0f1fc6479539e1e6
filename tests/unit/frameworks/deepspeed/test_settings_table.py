"""Every row of the table of ds_config.json: what is written is read again, nothing that a file says is lost, the
installed DeepSpeed has the key, and another version's keys are refused."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.documents.nested import put_at
from llmlaunch.errors import UserError
from llmlaunch.frameworks.deepspeed.backend import DeepSpeed
from llmlaunch.frameworks.deepspeed.command_line import read_ds_config
from llmlaunch.frameworks.deepspeed.config import ds_config
from llmlaunch.frameworks.deepspeed.setting_row import (
    ABSENT,
    ANY,
    BETAS,
    COUNT,
    DEVICE,
    NUMBER,
    SHARE,
    SIZE,
    STAGE,
    SWITCH,
    TEXT,
    WHOLE,
    DsConfigKey,
    Form,
)
from llmlaunch.frameworks.deepspeed.settings import DECAYS, PLANNED, SETTINGS
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_NAMES, Layout
from llmlaunch.recipe.types import Recipe
from support.backend_output import refused_by
from support.recipes import recipe_of

INSTALLED = version("deepspeed")
RENDERED = [row for row in SETTINGS if row.is_rendered]
VERSIONED = [row for row in SETTINGS if row.until is not None or row.since != "0.3"]
KINDS = ("own", "hugging-face", "pipeline")
OVERRIDES = (
    "training.precision=bf16",
    "training.precision=fp16",
    "training.gradient_dtype=fp32",
    "training.optimizer={main_parameters: bf16, first_moment: bf16, second_moment: bf16}",
    "layout={offload_optimizer: 0.5, offload_parameters: true}",
    "layout={recompute: full, offload_checkpoints: true}",
    "tracking={wandb: {project: ours, entity: team}, tensorboard: /tb}",
)
LAYOUTS = (
    Layout(data=16, micro_batch_size=2),
    Layout(data=16, zero_stage=1, recompute=RECOMPUTE_FULL),
    Layout(data=16, zero_stage=2),
    Layout(data=16, zero_stage=3, micro_batch_size=2),
    Layout(tensor=4, data=4, zero_stage=3),
    Layout(context=4, data=4, zero_stage=3),
    Layout(pipeline=4, data=4, zero_stage=1, recompute=RECOMPUTE_FULL),
)
EXAMPLES: Mapping[Form, tuple[Any, ...]] = {
    ANY: (True,),
    BETAS: ([0.9, 0.95],),
    COUNT: (4,),
    DEVICE: ("cpu", "nvme"),
    NUMBER: (0.25,),
    SHARE: (0.5,),
    SIZE: (4,),
    STAGE: (2, 3),
    SWITCH: (True,),
    TEXT: (next(iter(DECAYS)), "fp32"),
    WHOLE: (7,),
}


@cache
def jobs() -> tuple[tuple[Recipe, Layout], ...]:
    """Jobs that together have every number format, kind of script, split, stage and technique that is rendered."""
    recipes = [recipe_of("llama2-7b-deepspeed", script(kind), each) for kind, each in product(KINDS, OVERRIDES)]
    return tuple(
        (recipe, layout)
        for recipe, layout in product(recipes, LAYOUTS)
        if not refused_by(recipe, layout, DeepSpeed().rules(recipe))
    )


def script(kind: str) -> str:
    return f"backend={{name: deepspeed, script: t.py, script_kind: {kind}}}"


def value_at(settings: Mapping[str, Any], key: str) -> Any:
    value: Any = settings
    for part in key.split("."):
        value = value.get(part, ABSENT) if isinstance(value, Mapping) else ABSENT
    return value


def stated(recipe: Recipe, layout: Layout, key: str) -> Any:
    """The value of a recipe key as a person would write it."""
    section, _, name = key.partition(".")
    if name == "offload_checkpoints" or name.startswith("offload_"):
        return getattr(recipe.techniques, name)
    if section == "layout":
        return RECOMPUTE_NAMES[layout.recompute] if name == "recompute" else getattr(layout, name)
    if name in ("precision", "global_batch_size"):
        return getattr(recipe.workload, name)
    if name == "optimizer":
        return asdict(recipe.training.numbers.optimizer)
    return getattr(recipe.training, name)


@pytest.mark.parametrize("row", RENDERED, ids=lambda row: row.key)
def test_what_a_row_writes_is_read_into_the_same_recipe_key(row: DsConfigKey) -> None:
    written = [(recipe, layout) for recipe, layout in jobs() if row.value(recipe, layout) is not ABSENT]
    assert written
    for recipe, layout in written:
        config = ds_config(recipe, layout)
        assert value_at(config, row.key) == row.value(recipe, layout)
        reading = read_ds_config(json.dumps(config))
        if row.reads or row.planned:
            key = row.reads or PLANNED[row.key]
            again = value_at(reading.document, key)
            asked = any(sentence.startswith(f"{key}:") for sentence in reading.missing)
            named = any(row.key in unread.words for unread in reading.unread)
            unsaid = again is ABSENT and is_default(recipe, layout, key)
            assert again == stated(recipe, layout, key) or unsaid or asked or named, key
        elif layout.zero_stage or not row.key.startswith("zero_optimization."):
            assert value_at(reading.document, f"backend.ds_config.{row.key}") == value_at(config, row.key)


def is_default(recipe: Recipe, layout: Layout, key: str) -> bool:
    """Whether a recipe without the key would say the same."""
    section, _, name = key.partition(".")
    if section == "layout" and name in ("tensor", "context", "pipeline"):
        return bool(getattr(layout, name) == 1)
    return (key, stated(recipe, layout, key)) in (("layout.recompute", "none"), ("training.gradient_dtype", None))


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row.key)
def test_nothing_that_a_file_says_is_lost(row: DsConfigKey) -> None:
    """A value becomes a recipe key, stays in `backend.ds_config`, or is named with the reason."""
    for name, value in product(row.names, EXAMPLES[row.form]):
        config: dict[str, Any] = {"zero_optimization": {"stage": 3}, "train_batch_size": 64}
        if ".offload_" in name:
            put_at(config, f"{name.rpartition('.')[0]}.device", "nvme" if row.left_out else "cpu")
        if row.key.startswith(("bf16.", "fp16.")):
            put_at(config, f"{name.partition('.')[0]}.enabled", True)
        put_at(config, name, value)
        with_it = read_ds_config(json.dumps(config))
        key = row.reads or PLANNED.get(row.key)
        kept = value_at(with_it.document, f"backend.ds_config.{row.key}") == value
        said = key is not None and value_at(with_it.document, key) is not ABSENT
        named = any(row.key.startswith(word) for unread in with_it.unread for word in unread.words)
        assert kept or said or named, (name, value)


def source(*parts: str) -> ast.Module:
    """A module of the installed DeepSpeed, read without importing it, which would take seconds."""
    spec = find_spec("deepspeed")
    assert spec is not None
    assert spec.origin is not None
    return ast.parse(Path(spec.origin).parent.joinpath(*parts).read_text("utf-8"))


def fields(name: str, *parts: str) -> Iterator[str]:
    """The keys that a configuration class takes: its fields and their aliases."""
    (definition,) = (node for node in source(*parts).body if isinstance(node, ast.ClassDef) and node.name == name)
    for field in definition.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            yield field.target.id
            calls = (node for node in ast.walk(field) if isinstance(node, ast.keyword) and node.arg == "alias")
            yield from (str(node.value.value) for node in calls if isinstance(node.value, ast.Constant))


def texts(*parts: str) -> Iterator[str]:
    """All texts in a module."""
    for node in ast.walk(source(*parts)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@cache
def keys_of(section: str) -> frozenset[str]:
    """The keys that the installed DeepSpeed knows within a section."""
    monitors = ("monitor", "config.py")
    zero, offloaded = ("runtime", "zero", "config.py"), ("runtime", "zero", "offload_config.py")
    precision, split = ("runtime", "precision_config.py"), ("runtime", "tensor_parallel", "config.py")
    classes = {
        "zero_optimization": ("DeepSpeedZeroConfig", *zero),
        "zero_optimization.offload_optimizer": ("DeepSpeedZeroOffloadOptimizerConfig", *offloaded),
        "zero_optimization.offload_param": ("DeepSpeedZeroOffloadParamConfig", *offloaded),
        "bf16": ("DeepSpeedBF16Config", *precision),
        "bfloat16": ("DeepSpeedBF16Config", *precision),
        "fp16": ("DeepSpeedFP16Config", *precision),
        "tensor_parallel": ("TPTrainingConfig", *split),
        "wandb": ("WandbConfig", *monitors),
        "tensorboard": ("TensorBoardConfig", *monitors),
    }
    others = {
        "activation_checkpointing": [("runtime", "activation_checkpointing", "config.py")],
        "optimizer.params": [("runtime", "config.py"), ("ops", "adam", "fused_adam.py")],
        "scheduler.params": [("runtime", "lr_schedules.py")],
    }
    if section in classes:
        return frozenset(fields(*classes[section]))
    modules = others.get(section, [("runtime", "config.py"), ("runtime", "constants.py"), ("comm", "constants.py")])
    top = [("runtime", "torch_autocast.py"), ("monitor", "config.py")] if not section else []
    return frozenset(text for parts in (*modules, *top) for text in texts(*parts))


ADAM = {"lr", "betas", "weight_decay"}  # arguments of the optimizer's class, which DeepSpeed passes on


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row.key)
def test_the_installed_deepspeed_has_the_key(row: DsConfigKey) -> None:
    section, _, name = row.key.rpartition(".")
    known = keys_of(section) | (ADAM if section == "optimizer.params" else set())
    names = [each.rpartition(".")[2] for each in row.names]
    if row.is_in(INSTALLED):
        assert set(names) <= known
    elif section:
        assert name not in known
    else:
        assert any(text.startswith(name) for text in known)  # the message with which it is refused


@pytest.mark.parametrize("row", VERSIONED, ids=lambda row: row.key)
def test_a_key_that_the_jobs_deepspeed_does_not_have_is_refused(row: DsConfigKey) -> None:
    recipe = recipe_of("llama2-7b-deepspeed", script("own"))
    config: dict[str, Any] = {}
    put_at(config, row.key, EXAMPLES[row.form][0])
    if row.planned:
        return  # the recipe decides it, so no person writes it
    for release in filter(None, ("0.2.0" if row.since != "0.3" else None, row.until)):
        backend = replace(recipe.backend, ds_config=config, version=release)
        with pytest.raises(UserError, match=rf"{row.key}: DeepSpeed {release} does not have it"):
            DeepSpeed().rules(replace(recipe, backend=backend))
    backend = replace(recipe.backend, ds_config=config, version=row.since)
    DeepSpeed().rules(replace(recipe, backend=backend))


@pytest.mark.parametrize("name", ["cpu_offload_params", "cpu_offload_param"])
def test_the_switches_of_earlier_versions_are_read(name: str) -> None:
    config = {"zero_optimization": {"stage": 3, "cpu_offload": True, name: True}, "train_batch_size": 64}
    reading = read_ds_config(json.dumps(config))
    layout = {"recompute": "none", "zero_stage": 3, "offload_optimizer": 1.0, "offload_parameters": True}
    assert reading.document["layout"] == layout
    assert not reading.document["backend"]["ds_config"]["zero_optimization"].keys() & {"cpu_offload", name}


def test_a_pipeline_that_checkpoints_every_layer_recomputes_them() -> None:
    reading = read_ds_config(json.dumps({"pipeline": {"stages": 2, "activation_checkpoint_interval": 1}}))
    assert reading.document["layout"]["recompute"] == "full"
    every_second = read_ds_config(json.dumps({"pipeline": {"stages": 2, "activation_checkpoint_interval": 2}}))
    assert every_second.document["layout"]["recompute"] == "none"
    assert every_second.document["backend"]["ds_config"]["pipeline"] == {"activation_checkpoint_interval": 2}


def test_a_format_of_gradients_that_no_recipe_has_is_named() -> None:
    reading = read_ds_config(json.dumps({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp16"}}))
    assert [unread.words for unread in reading.unread] == [("data_types.grad_accum_dtype",)]


@pytest.mark.parametrize(
    ("release", "legal"),
    [
        *[("0.16.3", False), ("0.16", False), ("0.19.7", False), ("0.19.7+cu128", False)],
        *[("0.19.8", True), ("0.19", True), ("0.20.0.dev1", True), ("1.0", True), ("a fork", True), (None, True)],
    ],
)
def test_a_split_needs_the_version_that_has_its_keys(release: str | None, legal: bool) -> None:
    recipe = recipe_of("llama2-7b-deepspeed")
    versioned = replace(recipe, backend=replace(recipe.backend, version=release))
    assert ("tensor-version" not in {rule.key for rule in DeepSpeed().rules(versioned)}) == legal


@pytest.mark.parametrize(("release", "taken"), [("0.9", True), ("0.19", True), ("0.19.7", False), ("0.20", False)])
def test_a_removed_key_is_refused_where_the_version_is_sure(release: str, taken: bool) -> None:
    (row,) = (row for row in SETTINGS if row.key == "zero_optimization.mics_shard_size")
    assert row.is_in(release) == taken
