"""The two JSON files of a DeepSpeed job: every key has a reason, and splits and models are said."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.documents.nested import leaves
from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import command_words
from llmlaunch.frameworks.deepspeed.backend import DeepSpeed
from llmlaunch.frameworks.deepspeed.rules import RULES
from llmlaunch.layout import RECOMPUTE_FULL, Layout
from llmlaunch.planner.planning import make_plan
from llmlaunch.planner.setting import setting_of
from llmlaunch.recipe.types import Recipe
from support.backend_output import ds_config, refused_by, render
from support.recipes import recipe_of

GPU, CPU = "llama2-7b-deepspeed", "quickstart"
ZERO_3 = Layout(data=16, micro_batch_size=2, zero_stage=3)
RECOMPUTED = Layout(data=16, zero_stage=3, recompute=RECOMPUTE_FULL)
STREAMED = "layout={offload_optimizer: 1.0, offload_parameters: true}"
TO_THE_HOST = "layout={recompute: full, offload_checkpoints: true}"
OPTIMIZER, PARAMETERS = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"


def own_script(kind: str) -> str:
    return f"backend={{name: deepspeed, script: t.py, script_kind: {kind}}}"


# Recipe and overrides, layout, settings of ds_config.json, and those (or sections) it has not.
SETTINGS: dict[str, tuple[str, tuple[str, ...], Layout, dict[str, object], str]] = {
    "no optimizer is named, so that none is compiled on the node": (
        *(GPU, (), ZERO_3, {"zero_allow_untested_optimizer": True, "bf16.enabled": True, "train_batch_size": 256}),
        "optimizer fp16 data_types tensor_parallel sequence_parallel_size activation_checkpointing",
    ),
    "curves in W&B and TensorBoard": (
        *(GPU, ("tracking={wandb: {project: ours, entity: team}, tensorboard: /tb}",), ZERO_3),
        {"wandb.enabled": True, "wandb.team": "team", "tensorboard.output_path": "/tb"},
        "csv_monitor",
    ),
    "fp16 and states on the host": (
        *(GPU, ("training.precision=fp16", "layout={offload_optimizer: 1.0}"), replace(ZERO_3, zero_stage=1)),
        {
            **{"fp16.enabled": True, f"{OPTIMIZER}.device": "cpu", f"{OPTIMIZER}.pin_memory": True},
            **{f"{OPTIMIZER}.ratio": 1.0, "zero_force_ds_cpu_optimizer": False},
        },
        "bf16",
    ),
    "parameters on the host": (
        *(GPU, ("layout={offload_parameters: true}",), ZERO_3),
        {f"{PARAMETERS}.device": "cpu", f"{PARAMETERS}.pin_memory": True},
        OPTIMIZER,
    ),
    "host memory is not pinned where it is the device": (
        *(CPU, (STREAMED,), Layout(data=2, zero_stage=3)),
        *({f"{OPTIMIZER}.pin_memory": False, f"{PARAMETERS}.pin_memory": False}, ""),
    ),
    "checkpoints on the host": (
        *(GPU, (TO_THE_HOST,), RECOMPUTED, {"activation_checkpointing.cpu_checkpointing": True}, ""),
    ),
    "stage 0 says nothing of partitions": (
        *(CPU, ("training.precision=fp32",), Layout(data=2), {"zero_optimization.stage": 0}),
        "bf16 fp16 zero_optimization.reduce_scatter zero_optimization.reduce_bucket_size",
    ),
    "gradients of bf16 accumulated in fp32, and a norm to clip them at": (
        *(GPU, ("training.gradient_dtype=fp32", "training.gradient_clipping=0.5"), ZERO_3),
        *({"data_types.grad_accum_dtype": "fp32", "gradient_clipping": 0.5}, ""),
    ),
    "optimizer states in bf16": (
        *(GPU, ("training.optimizer={main_parameters: bf16, first_moment: bf16, second_moment: bf16}",), ZERO_3),
        *({"bf16.bf16_master_weights_and_grads": True, "bf16.bf16_optimizer_states": True}, ""),
    ),
    # without a mesh of its own DeepSpeed would check the total over all ranks, tensor parallel ones too
    "tensor parallelism is AutoTP with whole logits, and the batch without its total": (
        *(GPU, (), Layout(tensor=4, data=4, micro_batch_size=2, zero_stage=3)),
        {"tensor_parallel.autotp_size": 4, "tensor_parallel.vocab_parallel_lm_head": False},
        "sequence_parallel_size train_batch_size",
    ),
    "context parallelism is Ulysses, and gradients travel as without": (
        *(GPU, (), Layout(context=4, data=4, zero_stage=3)),
        {"sequence_parallel_size": 4, "seq_parallel_communication_data_type": "bf16", "train_batch_size": 256},
        "tensor_parallel",
    ),
    "a script with a pipeline is told its stages": (
        *(GPU, (own_script("pipeline"),)),
        Layout(pipeline=4, data=4, micro_batch_size=2, zero_stage=1, recompute=RECOMPUTE_FULL),
        {"pipeline.stages": 4, "pipeline.activation_checkpoint_interval": 1, "train_batch_size": 256},
        "",
    ),
    "a script of the Trainer's": (GPU, (own_script("hugging-face"),), ZERO_3, {"train_batch_size": 256}, ""),
    "a script of one's own": (GPU, (own_script("own"),), ZERO_3, {"train_batch_size": 256}, "pipeline"),
}


@pytest.mark.parametrize(("name", "overrides", "layout", "said", "unsaid"), SETTINGS.values(), ids=SETTINGS)
def test_the_file_says_the_plan_exactly_with_a_reason_for_all(
    name: str, overrides: tuple[str, ...], layout: Layout, said: dict[str, object], unsaid: str
) -> None:
    recipe = recipe_of(name, *overrides)
    result, config = render(recipe, layout), ds_config(recipe, layout)
    assert {key: reduce(getitem, key.split("."), config) for key in said} == said
    assert list(result.settings) == sorted(dict(leaves(config)))
    assert not [key for key in result.settings for section in unsaid.split() if f"{key}.".startswith(f"{section}.")]
    micro, accumulated = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    assert micro == layout.micro_batch_size
    assert micro * accumulated * layout.data == recipe.workload.global_batch_size
    assert b'"auto"' not in result.files["ds_config.json"]
    assert set(result.environment) <= set(result.variables)
    words = command_words(result.arguments)
    assert words == result.program[-len(words) :]
    for reason in (*result.settings.values(), *(each.reason for each in result.arguments), *result.variables.values()):
        assert reason.keys or reason.why


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
    for recipe in (recipe_of(GPU, own_script("own")), recipe_of(CPU)):
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
        ("{base: falcon-h1-0.5b, family: nemotron_h}", "layers_block_type cannot be said"),
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
    assert not plain.attention.attention_scores_saved
    assert capped.attention.attention_scores_saved
    assert capped.loss.logit_bytes == plain.loss.logit_bytes + 2.0
    short, long = (DeepSpeed().facts(recipe_for("mistral-7b", f"training.sequence_length={n}")) for n in (4096, 8192))
    assert long.allocator.workspace_bytes == short.allocator.workspace_bytes + 3.0 * 8192**2
