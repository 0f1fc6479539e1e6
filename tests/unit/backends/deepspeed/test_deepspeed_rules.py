"""AutoTP and Ulysses: what is rendered for them, what they accept, and what is searched."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmlaunch.backends.deepspeed.backend import DeepSpeed
from llmlaunch.backends.deepspeed.rules import RULES
from llmlaunch.layout import Layout
from support.backend_output import ds_config, refused_by
from support.recipes import recipe_of

GPU, CPU = "llama2-7b-deepspeed", "quickstart"
OWN = "backend={name: deepspeed, script: /home/me/train.py}"


def test_tensor_parallelism_is_autotp_with_whole_logits_and_the_batch_without_its_total() -> None:
    """Without a mesh of its own DeepSpeed would check the total over all ranks, tensor parallel ones too."""
    config = ds_config(recipe_of(GPU), Layout(tensor=4, data=4, micro_batch_size=2, zero_stage=3))
    assert config["tensor_parallel"] == {"autotp_size": 4, "vocab_parallel_lm_head": False}
    assert not {"sequence_parallel_size", "train_batch_size"} & set(config)
    assert config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * 4 == 256


def test_context_parallelism_is_ulysses_and_gradients_travel_as_without() -> None:
    config = ds_config(recipe_of(GPU), Layout(context=4, data=4, zero_stage=3))
    assert config["sequence_parallel_size"] == 4
    assert config["seq_parallel_communication_data_type"] == "bf16"
    assert config["train_batch_size"] == 256
    assert "tensor_parallel" not in config


HEADS = "model={{base: llama2-7b, num_attention_heads: {}, num_query_groups: {}, head_dim: 128}}"


@pytest.mark.parametrize(
    ("key", "layout", "override"),
    [
        ("tensor-or-context", Layout(tensor=2, context=2, data=4), "model=llama2-7b"),
        ("tensor-plan", Layout(tensor=2, data=8), "model=mixtral-8x7b"),
        ("tensor-query-groups", Layout(tensor=8, data=2), "model={base: llama2-7b, num_query_groups: 4}"),
        ("tensor-ffn", Layout(tensor=8, data=2), "model={base: llama2-7b, ffn_hidden_size: 11012}"),
        ("tensor-adapters", Layout(tensor=2, data=8), "training.adapters={rank: 8}"),
        ("tensor-tiles", Layout(tensor=2, data=8), "layout={loss: tiled}"),
        ("tensor-tiles", Layout(tensor=2, data=8), "layout={mlp_chunks: 4}"),
        ("context-heads", Layout(context=16), HEADS.format(8, 8)),
        ("context-query-groups", Layout(context=4, data=4), HEADS.format(12, 3)),
        ("context-sequence", Layout(context=16), "training.sequence_length=4001"),
        ("context-masks", Layout(context=2, data=8), "model={base: llama2-7b, sliding_window: {tokens: 1024}}"),
    ],
)
def test_each_rule_of_splitting_refuses_what_it_is_there_for(key: str, layout: Layout, override: str) -> None:
    assert key in refused_by(recipe_of(GPU, override), layout, RULES)


@pytest.mark.parametrize("layout", [Layout(tensor=8, data=2), Layout(context=16), Layout(tensor=2, data=8)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_deepspeed_runs_is_legal(layout: Layout, stage: int) -> None:
    assert refused_by(recipe_of(GPU), replace(layout, zero_stage=stage), RULES) == set()


def test_splits_are_searched_for_the_shipped_script_on_gpus_alone() -> None:
    shipped = DeepSpeed().space(recipe_of(GPU))
    assert shipped.tensor == (1, 2, 4, 8)
    assert 16 in shipped.context
    for recipe in (recipe_of(GPU, OWN), recipe_of(CPU)):
        assert (DeepSpeed().space(recipe).tensor, DeepSpeed().space(recipe).context) == ((1,), (1,))
