"""The two JSON files of a DeepSpeed job: ds_config.json, and the model the shipped script builds, as Hugging Face's
configuration; and settings of the first checked against their rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from llmlaunch.documents.nested import put_at
from llmlaunch.errors import UserError
from llmlaunch.families.registry import family_named
from llmlaunch.families.written import config_of, unsaid
from llmlaunch.frameworks.argument import Reason
from llmlaunch.frameworks.deepspeed.own_settings import AUTO, OWN_REASON, set_keys
from llmlaunch.frameworks.deepspeed.setting_row import ABSENT, MAPPING
from llmlaunch.frameworks.deepspeed.settings import FORMS, PLANNED, SETTINGS, settings_of
from llmlaunch.layout import Layout
from llmlaunch.models.shape import ModelShape
from llmlaunch.recipe.types import Recipe
from llmlaunch.rundir.values import shortened

Json = dict[str, Any]


def ds_config(recipe: Recipe, layout: Layout) -> Json:
    """The whole of ds_config.json. The batch triple is exact: total = micro x accumulation x data."""
    config: Json = {}
    for row in SETTINGS:
        value = row.value(recipe, layout)
        if value is not ABSENT:
            put_at(config, row.key, value)
    return config


def to_json(value: Json) -> bytes:
    """Readable, and the same bytes for the same values."""
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def settings(config: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Reason]:
    """The reason of every key of a ds_config, dotted, in the order of the file; `own` are the keys the person wrote.
    Raises KeyError for another key that has none: a key is rendered together with its reason."""
    written = dict(set_keys(own))
    reasons = {row.key: row.reason for row in SETTINGS if row.is_rendered}
    return {key: OWN_REASON if key in written else reasons[key] for key in sorted(dict(set_keys(config)))}


# fields of a shape in the words of a person; others go by their own name
FIELD_NAMES = {
    "normalization": "its kind of norms",
    "position_embedding": "its kind of positions",
    "gated_mlp": "its kind of MLP",
    "linear_bias": "its biases",
    "qkv_bias": "its biases on query, key and value",
    "qk_layernorm": "its norms on queries and keys",
    "hidden_dropout": "dropout on the residual stream",
    "moe.layer_pattern": "its dense layers between mixtures",
    "moe.shared_expert_ffn_hidden_size": "its shared expert",
    "moe.router.balancing": "the way it balances its experts",
    "moe": "experts, or none,",
    "mla": "ordinary attention, or latent,",
}
BYTE_TOKENS = 256


def model_config(recipe: Recipe) -> Json:
    """The model as a Hugging Face configuration of its family, long enough for the recipe's sequences."""
    longest = max(recipe.model.max_position_embeddings, recipe.workload.sequence_length)
    return config_of(replace(recipe.model, max_position_embeddings=longest))


def refuse_what_the_trainer_cannot_build(recipe: Recipe) -> None:
    """Raise UserError for a model that transformers has no class for, or would train as another one."""
    shape = recipe.model
    lost = unsaid(replace(shape, mtp_num_layers=0))
    if lost:
        parts = ", ".join(FIELD_NAMES.get(field, field) for field in lost)
        raise UserError(
            f"{recipe.path}: model: {shape.name} is no {shape.family} of Hugging Face's: {parts} cannot be said in its "
            "configuration; set model.family, name a script of your own (backend.script) or use backend: megatron-lm"
        )
    for key, problem in _problems(recipe, shape):
        raise UserError(f"{recipe.path}: {key}: {problem}")


def _problems(recipe: Recipe, shape: ModelShape) -> Iterator[tuple[str, str]]:
    if shape.mtp_num_layers:
        yield (
            "model.mtp_num_layers",
            "transformers builds no multi-token prediction; set it to 0 or use backend: megatron-lm",
        )
    if shape.moe is not None and shape.moe.capacity_factor is not None:
        yield (
            "model.moe.capacity_factor",
            "transformers' experts drop no tokens; remove it or use backend: megatron-lm",
        )
    family = family_named(shape.family)
    if not family.balances_experts and recipe.training.start_from is None and recipe.techniques.adapters is None:
        yield (
            "model",
            f"transformers' {shape.family} has neither the loss nor the bias update that keeps experts evenly used, so "
            "that it is no model to train from nothing; name training.start_from or use backend: megatron-lm",
        )
    if family.whole_heads and shape.hidden_size % shape.num_attention_heads:
        yield (
            "model.num_attention_heads",
            f"transformers' {shape.family} wants a number that divides hidden_size {shape.hidden_size}; with "
            "family: mistral the same model is built",
        )
    if not recipe.data.mock and recipe.data.tokenizer is None and shape.vocab_size < BYTE_TOKENS:
        yield (
            "data",
            f"without a tokenizer every byte is a token, which needs a vocabulary of at least {BYTE_TOKENS}; the model "
            f"has {shape.vocab_size}: raise model.vocab_size",
        )


class WrongSetting(Exception):
    """A key of a ds_config has a value of another form; the message names the dotted key and says how to correct it."""


def checked_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with every section of FORMS a mapping; a section that is null is left out.

    `"zero_optimization": true` is stage 1, as DeepSpeed's earlier form had it (`read_zero_config_deprecated`). Raises
    WrongSetting for the first key that has another form.
    """
    zero = settings.get("zero_optimization")
    current_form = {**settings, "zero_optimization": {"stage": int(zero)}} if isinstance(zero, bool) else settings
    checked = _copied(current_form)
    for key, form in FORMS.items():
        *sections, name = key.split(".")
        within: Any = checked
        for section in sections:
            within = within.get(section, {})
        value = within.get(name)
        if value is None and form is MAPPING:
            within.pop(name, None)
        elif value is not None and not form.fits(value) and (form is MAPPING or value != AUTO):
            raise WrongSetting(f"{key}: must be {form.words}, not {shortened(str(value), 40)!a}; correct it")
    return checked


def refuse_odd_settings(recipe: Recipe) -> None:
    """Raise UserError for a key of `backend.ds_config` that has another form than DeepSpeed takes."""
    try:
        checked_settings(recipe.backend.ds_config)
    except WrongSetting as wrong:
        raise UserError(f"{recipe.path}: backend.ds_config.{wrong}") from None


def refuse_planned_settings(recipe: Recipe) -> None:
    """Raise UserError for a key that the recipe decides elsewhere, for "auto" where nobody would fill it in, and for
    what the job's DeepSpeed does not have."""
    for key, value in set_keys(recipe.backend.ds_config):
        if key in PLANNED:
            raise UserError(
                f"{recipe.path}: backend.ds_config.{key}: follows from {PLANNED[key]}; write that, and remove it here"
            )
        if value == AUTO and recipe.backend.script_kind != "hugging-face":
            raise UserError(
                f'{recipe.path}: backend.ds_config.{key}: "auto" is filled in by Hugging Face\'s Trainer alone; write '
                "the value"
            )
        _refuse_another_version(recipe, key)
    _refuse_later_formats(recipe)


def _refuse_later_formats(recipe: Recipe) -> None:
    """Raise UserError for formats of optimizer states that a later DeepSpeed than the job's has, where its version
    is known."""
    version = recipe.backend.runs_version
    for row in settings_of("training.optimizer"):
        if version is not None and row.is_after(version) and row.value(recipe, Layout()) is not ABSENT:
            raise UserError(
                f"{recipe.path}: {PLANNED[row.key]}: is rendered with {row.key}, which DeepSpeed {version} does not "
                f"have (it came with {row.since}); remove it, or name another backend.version"
            )


def _refuse_another_version(recipe: Recipe, key: str) -> None:
    """Raise UserError for a key that the job's DeepSpeed does not have, where its version is known. DeepSpeed itself
    would stop at it, or overlook it at the top level."""
    version = recipe.backend.runs_version
    row = next((row for row in SETTINGS if f"{key}.".startswith(f"{row.key}.")), None)
    if version is None or row is None or row.is_in(version):
        return
    change = f"it came with {row.since}" if row.is_after(version) else f"{row.until} removed it"
    raise UserError(
        f"{recipe.path}: backend.ds_config.{key}: DeepSpeed {version} does not have it ({change}); remove it, or name "
        "another backend.version"
    )


def _copied(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copied(value) if isinstance(value, Mapping) else value for name, value in settings.items()}
