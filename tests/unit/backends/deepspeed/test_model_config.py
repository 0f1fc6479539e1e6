"""The models of the shipped DeepSpeed script: each family as its own configuration, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.backends.deepspeed.backend import DeepSpeed
from llmlaunch.errors import UserError
from llmlaunch.layout import Layout
from llmlaunch.planner.planning import make_plan
from llmlaunch.planner.setting import setting_of
from llmlaunch.recipe.types import Recipe
from support.backend_output import render
from support.recipes import recipe_of

MOE = "num_experts: 8, topk: 2, ffn_hidden_size: 512"


def recipe_for(model: str, *more: str) -> Recipe:
    return recipe_of("llama2-7b-deepspeed", f"model={model}", *more)


def config(model: str, *more: str) -> dict[str, Any]:
    rendered = render(recipe_for(model, *more), Layout(data=16, zero_stage=3))
    values: dict[str, Any] = json.loads(rendered.files["trainer/model.json"])
    return values


MIXTRAL = {
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 14336,
    "router_aux_loss_coef": 0.02,
}


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("mixtral-8x7b", MIXTRAL),
        ("llama3.1-8b", {"rope_theta": 500000.0, "mlp_bias": False}),
        ("mistral-7b", {"sliding_window": 4096}),
        ("qwen2.5-7b", {"num_key_value_heads": 4}),
        ("qwen3-8b", {"head_dim": 128, "rms_norm_eps": 1e-6}),
        ("qwen2-57b-a14b", {"shared_expert_intermediate_size": 20480, "output_router_logits": True}),
        ("qwen3-30b-a3b", {"num_experts": 128, "norm_topk_prob": True, "mlp_only_layers": []}),
        ("gemma-7b", {"hidden_act": "gelu_pytorch_tanh"}),
        ("gemma2-9b", {"attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 256}),
        ("gemma3-27b", {"rope_local_base_freq": 10000.0, "query_pre_attn_scalar": 168}),
        ("gpt3-6.7b", {"n_embd": 4096, "n_positions": 2048}),
    ],
)
def test_each_family_is_said_in_its_own_words(preset: str, expected: dict[str, Any]) -> None:
    assert expected.items() <= config(preset, "training.sequence_length=2048").items()


def test_a_sequence_longer_than_the_model_was_built_for_makes_room() -> None:
    assert config("llama2-7b", "training.sequence_length=8192")["max_position_embeddings"] == 8192


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("{base: llama3-8b, position_embedding: alibi}", r"its kind of positions cannot be said.*backend\.script"),
        ("{base: llama3-8b, normalization: LayerNorm}", "its kind of norms cannot be said"),
        ("{base: llama3-8b, mtp_num_layers: 1}", r"mtp_num_layers: .*megatron-lm"),
        (f"{{base: llama3-8b, moe: {{{MOE}, capacity_factor: 1.0}}}}", "drop no tokens"),
        (f"{{base: llama3-8b, moe: {{{MOE}, shared_expert_ffn_hidden_size: 512}}}}", "shared_expert_gate"),
        (f"{{base: llama3-8b, moe: {{{MOE}, router: {{balancing: seq_aux_loss}}}}}}", "the way it balances"),
        ("{base: llama3-8b, family: gemma}", "is no gemma of Hugging Face"),
        ("{base: llama3-8b, hidden_size: 4104, head_dim: 128, num_attention_heads: 32}", "divides hidden_size 4104"),
        ("{base: llama3-8b, family: qwen3_moe}", "experts, or none, cannot be said"),
        ("deepseek-v2-lite", "no model to train from nothing"),
    ],
)
def test_models_the_script_cannot_build_are_refused_before_anything_is_searched(model: str, message: str) -> None:
    recipe = recipe_for(model)
    with pytest.raises(UserError, match=message):
        make_plan(setting_of(recipe, DeepSpeed()))


def test_deepseek_from_weights_is_taken(tmp_path: Path) -> None:
    assert config("deepseek-v2-lite", f"training.start_from={tmp_path}")["model_type"] == "deepseek_v2"


def test_a_cap_on_scores_costs_the_scores_and_a_window_its_mask() -> None:
    plain, capped = (DeepSpeed().facts(recipe_for(model)) for model in ("gemma-7b", "gemma2-9b"))
    assert not plain.attention_scores_saved
    assert capped.attention_scores_saved
    assert capped.logit_bytes == plain.logit_bytes + 2.0
    short, long = (DeepSpeed().facts(recipe_for("mistral-7b", f"training.sequence_length={n}")) for n in (4096, 8192))
    assert long.workspace_bytes == short.workspace_bytes + 3.0 * 8192**2
