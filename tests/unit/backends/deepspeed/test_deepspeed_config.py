"""The two JSON files of a DeepSpeed job: every key has a reason, and splits and models are said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.backends.argument import command_words
from llmlaunch.backends.deepspeed.backend import DeepSpeed
from llmlaunch.backends.deepspeed.config import REASONS, dotted_keys
from llmlaunch.backends.deepspeed.rules import RULES
from llmlaunch.errors import UserError
from llmlaunch.layout import RECOMPUTE_FULL, Layout
from llmlaunch.planner.planning import make_plan
from llmlaunch.planner.setting import setting_of
from llmlaunch.recipe.types import Recipe
from support.backend_output import ds_config, refused_by, render
from support.recipes import recipe_of

GPU, CPU = "llama2-7b-deepspeed", "quickstart"
CASES = [
    (CPU, Layout(data=2, zero_stage=1), ()),
    (CPU, Layout(data=2, zero_stage=0), ("training.precision=fp32",)),
    (
        GPU,
        Layout(data=16, zero_stage=3, recompute=RECOMPUTE_FULL),
        ("layout={recompute: full, offload_checkpoints: true}",),
    ),
    (GPU, Layout(data=16, zero_stage=2), ("training.precision=fp16", "layout={offload_optimizer: 1.0}")),
    (GPU, Layout(data=16, zero_stage=3), ("layout={offload_optimizer: 1.0, offload_parameters: true}",)),
    (GPU, Layout(tensor=2, data=8, zero_stage=1), ("training.gradient_dtype=fp32",)),
    (GPU, Layout(context=2, data=8, zero_stage=2), ()),
    (
        GPU,
        Layout(pipeline=2, data=8, zero_stage=1),
        ("backend={name: deepspeed, script: t.py, script_kind: pipeline}",),
    ),
    (GPU, Layout(data=16, zero_stage=3), ("backend={name: deepspeed, script: t.py, script_kind: hugging-face}",)),
    (
        GPU,
        Layout(tensor=2, pipeline=2, data=4, zero_stage=1),
        ("backend={name: deepspeed, script: p.py, script_kind: megatron-deepspeed}", "data={path: /data/text}"),
    ),
    (GPU, Layout(data=16, zero_stage=3), ("backend={name: deepspeed, script: /home/me/train.py}",)),
]


@pytest.mark.parametrize(("name", "layout", "overrides"), CASES)
def test_nothing_is_rendered_without_a_reason(name: str, layout: Layout, overrides: tuple[str, ...]) -> None:
    recipe = recipe_of(name, *overrides)
    result = render(recipe, layout)
    assert list(result.settings) == list(dotted_keys(ds_config(recipe, layout)))
    assert set(result.environment) <= set(result.variables)
    words = command_words(result.arguments)
    assert words == result.program[-len(words) :]
    for reason in (*result.settings.values(), *(each.reason for each in result.arguments), *result.variables.values()):
        assert reason.keys or reason.why


def test_keys_are_listed_as_they_are_nested() -> None:
    assert list(dotted_keys({"b": {"y": 1, "x": {"z": 2}}, "a": 3})) == ["a", "b.x.z", "b.y"]


def test_every_reason_is_of_a_key_that_can_be_rendered() -> None:
    settings = [render(recipe_of(name, *overrides), layout).settings for name, layout, overrides in CASES]
    assert {key for each in settings for key in each} == set(REASONS)


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


@pytest.mark.parametrize(
    "layout", [Layout(tensor=8, data=2), Layout(context=16), Layout(data=16, recompute=RECOMPUTE_FULL)]
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_deepspeed_runs_is_legal(layout: Layout, stage: int) -> None:
    assert refused_by(recipe_of(GPU), replace(layout, zero_stage=stage), RULES) == set()


def test_splits_are_searched_for_the_shipped_script_on_gpus_alone() -> None:
    shipped = DeepSpeed().space(recipe_of(GPU))
    assert shipped.tensor == (1, 2, 4, 8)
    assert 16 in shipped.context
    for recipe in (recipe_of(GPU, OWN), recipe_of(CPU)):
        assert (DeepSpeed().space(recipe).tensor, DeepSpeed().space(recipe).context) == ((1,), (1,))


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
