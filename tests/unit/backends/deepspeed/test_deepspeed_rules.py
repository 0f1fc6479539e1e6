"""AutoTP and Ulysses: what is rendered for them, what they accept, and what is searched."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from llmlaunch.assets import asset
from llmlaunch.backends.deepspeed.backend import DeepSpeed
from llmlaunch.backends.deepspeed.rules import RULES
from llmlaunch.layout import Layout, LayoutColumns, Situation
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.types import Recipe

GPU, CPU = "llama2-7b-deepspeed", "quickstart"
OWN = "backend={name: deepspeed, script: /home/me/train.py}"


def recipe_of(*overrides: str, name: str = GPU) -> Recipe:
    return load_recipe(asset("recipes", f"{name}.yaml"), overrides)


def config(layout: Layout, *overrides: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DeepSpeed().render(recipe_of(*overrides), layout).files["ds_config.json"])
    return loaded


def refused_by(recipe: Recipe, layout: Layout) -> list[str]:
    situation = Situation(
        LayoutColumns.of([layout]), recipe.model, recipe.workload, recipe.cluster, recipe.nodes, recipe.techniques
    )
    return [rule.key for rule in RULES if not bool(np.all(rule.allows(situation)))]


def test_tensor_parallelism_is_autotp_with_whole_logits() -> None:
    said = config(Layout(tensor=4, data=4, zero_stage=1))
    assert said["tensor_parallel"] == {"autotp_size": 4, "vocab_parallel_lm_head": False}
    assert "sequence_parallel_size" not in said


def test_with_autotp_the_batch_is_said_without_its_total() -> None:
    """Without a mesh of its own DeepSpeed would check the total over all ranks, tensor parallel ones too."""
    said = config(Layout(tensor=4, data=4, micro_batch_size=2, zero_stage=3))
    assert "train_batch_size" not in said
    assert said["train_micro_batch_size_per_gpu"] * said["gradient_accumulation_steps"] * 4 == 256


def test_context_parallelism_is_ulysses_and_gradients_travel_as_without() -> None:
    said = config(Layout(context=4, data=4, zero_stage=3))
    assert said["sequence_parallel_size"] == 4
    assert said["seq_parallel_communication_data_type"] == "bf16"
    assert said["train_batch_size"] == 256
    assert "tensor_parallel" not in said


MIXTURE, WINDOW = "model=mixtral-8x7b", "model={base: llama2-7b, sliding_window: {tokens: 1024}}"


@pytest.mark.parametrize(
    ("key", "layout", "overrides"),
    [
        ("tensor-or-context", Layout(tensor=2, context=2, data=4), ()),
        ("tensor-plan", Layout(tensor=2, data=8), (MIXTURE,)),
        ("tensor-query-groups", Layout(tensor=8, data=2), ("model={base: llama2-7b, num_query_groups: 4}",)),
        ("tensor-ffn", Layout(tensor=8, data=2), ("model={base: llama2-7b, ffn_hidden_size: 11012}",)),
        ("tensor-adapters", Layout(tensor=2, data=8), ("training.adapters={rank: 8}",)),
        ("tensor-tiles", Layout(tensor=2, data=8), ("layout={loss: tiled}",)),
        ("tensor-tiles", Layout(tensor=2, data=8), ("layout={mlp_chunks: 4}",)),
        (
            "context-heads",
            Layout(context=16),
            ("model={base: llama2-7b, num_attention_heads: 8, num_query_groups: 8, head_dim: 128}",),
        ),
        (
            "context-query-groups",
            Layout(context=4, data=4),
            ("model={base: llama2-7b, num_attention_heads: 12, num_query_groups: 3, head_dim: 128}",),
        ),
        ("context-sequence", Layout(context=16), ("training.sequence_length=4001",)),
        ("context-masks", Layout(context=2, data=8), (WINDOW,)),
    ],
)
def test_each_rule_of_splitting_refuses_what_it_is_there_for(
    key: str, layout: Layout, overrides: tuple[str, ...]
) -> None:
    assert key in refused_by(recipe_of(*overrides), layout)


@pytest.mark.parametrize("layout", [Layout(tensor=8, data=2), Layout(context=16), Layout(tensor=2, data=8)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_deepspeed_runs_is_legal(layout: Layout, stage: int) -> None:
    assert (
        refused_by(recipe_of(), Layout(layout.tensor, context=layout.context, data=layout.data, zero_stage=stage)) == []
    )


def test_splits_are_searched_for_the_shipped_script_on_gpus_alone() -> None:
    shipped = DeepSpeed().space(recipe_of())
    assert shipped.tensor == (1, 2, 4, 8)
    assert 16 in shipped.context
    for recipe in (recipe_of(OWN), recipe_of(name=CPU)):
        assert (DeepSpeed().space(recipe).tensor, DeepSpeed().space(recipe).context) == ((1,), (1,))
