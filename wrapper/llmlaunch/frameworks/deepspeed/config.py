"""The two JSON files of a DeepSpeed job: ds_config.json, and the model the shipped script builds, as Hugging Face's
configuration.
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
from llmlaunch.frameworks.deepspeed.own_settings import OWN_REASON, set_keys
from llmlaunch.frameworks.deepspeed.setting_row import ABSENT
from llmlaunch.frameworks.deepspeed.settings import SETTINGS
from llmlaunch.layout import Layout
from llmlaunch.models.shape import ModelShape
from llmlaunch.recipe.types import Recipe

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
