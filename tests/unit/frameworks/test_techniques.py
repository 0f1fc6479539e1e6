"""Techniques become the flags they stand for, or are refused with the reason and the backend that has one."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from llmlaunch.errors import UserError
from llmlaunch.frameworks.deepspeed.backend import DeepSpeed
from llmlaunch.frameworks.framework import backend_for
from llmlaunch.frameworks.megatron.backend import MegatronLM
from llmlaunch.frameworks.megatron.parser import core_parser
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_SELECTIVE, Layout
from llmlaunch.planner.changes import judge_layouts
from llmlaunch.planner.planning import make_plan
from llmlaunch.planner.setting import setting_of
from llmlaunch.recipe.types import Recipe
from llmlaunch.techniques import Techniques
from llmlaunch.techniques.technique import declarations
from llmlaunch.trainers import TRAINER
from support.backend_output import ds_config, refused_by, render, words_of
from support.recipes import recipe_of
from support.technique_list import TECHNIQUE_LIST

DENSE, MIXTURE, DEEPSPEED = "llama3-8b", "mixtral-8x7b", "llama2-7b-deepspeed"
OWN = "backend={name: deepspeed, script: train.py}"
GPUS = Layout(4, 1, data=8, sequence_parallel=1, zero_stage=1)
EXPERTS = Layout(2, 1, data=32, expert=8, sequence_parallel=1, zero_stage=1)
FULL, SELECTIVE = replace(GPUS, recompute=RECOMPUTE_FULL), replace(GPUS, recompute=RECOMPUTE_SELECTIVE)
INTERLEAVED = replace(FULL, pipeline=4, virtual_pipeline=2, data=2)  # 4 layers a chunk
ZERO_3 = Layout(data=16, zero_stage=3)


def command(name: str, layout: Layout, *overrides: str) -> str:
    return " ".join(words_of(recipe_of(name, *overrides), layout))


OFFLOADED = "--fine-grained-activation-offloading --offload-modules core_attn attn_proj"
HALF = "--optimizer-cpu-offload --optimizer-offload-fraction 0.5 --use-precision-aware-optimizer"
RENDERED = [
    (FULL, "recompute: full", "full --recompute-method uniform --recompute-num-layers 1"),
    (replace(FULL, recompute_layers=4), "recompute: full", "--recompute-method uniform --recompute-num-layers 4"),
    (FULL, "recompute: full, recompute_method: block", "--recompute-method block --recompute-num-layers 32"),
    (INTERLEAVED, "recompute: full, recompute_method: block", "--recompute-method block --recompute-num-layers 4"),
    (SELECTIVE, "recompute: selective", "--recompute-granularity selective --recompute-modules core_attn"),
    (SELECTIVE, "recompute: selective, recompute_modules: [layernorm, mlp]", "--recompute-modules layernorm mlp"),
    (GPUS, "offload_modules: [core_attn, attn_proj]", OFFLOADED),
    (GPUS, "offload_modules: [core_attn], offload_fraction: 0.5", "core_attn --activation-offload-fraction 0.5"),
    (replace(GPUS, offload_layers=3), "offload_layers: auto", "--cpu-offloading-num-layers 3"),
    (GPUS, "offload_optimizer: 0.5", HALF),
    (GPUS, "optimizer_instances: 4", "--num-distributed-optimizer-instances 4"),
    (GPUS, "loss: native", "--cross-entropy-loss-fusion --cross-entropy-fusion-impl native"),
    (GPUS, "mlp_chunks: 8", "--mlp-chunks-for-training 8"),
    (EXPERTS, "delay_weight_gradients: true", "--overlap-moe-expert-parallel-comm --delay-wgrad-compute"),
    (EXPERTS, "delay_weight_gradients: true", "--moe-token-dispatcher-type alltoall"),
    (EXPERTS, "token_dispatcher: allgather", "--moe-token-dispatcher-type allgather"),
]


@pytest.mark.parametrize(("layout", "asked", "flags"), RENDERED, ids=[flags for _, _, flags in RENDERED])
def test_megatron_is_told(layout: Layout, asked: str, flags: str) -> None:
    assert f" {flags} " in command(MIXTURE if layout is EXPERTS else DENSE, layout, f"layout={{{asked}}}")


def test_megatron_reduces_gradients_in_their_own_format() -> None:
    assert " --grad-reduce-in-bf16 " in command(DENSE, GPUS, "training.gradient_dtype=bf16")


def test_offloaded_activations_need_a_variable_and_nothing_else_does() -> None:
    offloading = "layout={offload_modules: [core_attn]}"
    assert render(recipe_of(DENSE, offloading), GPUS).environment["NVTE_CPU_OFFLOAD_V1"] == "1"
    assert "NVTE_CPU_OFFLOAD_V1" not in render(recipe_of(DENSE), GPUS).environment
    with pytest.raises(UserError, match="NVTE_CPU_OFFLOAD_V1"):
        render(recipe_of(DENSE, offloading, "environment={NVTE_CPU_OFFLOAD_V1: '0'}"), GPUS)


def test_a_fixed_number_of_rows_makes_one_kernel_of_all_experts_and_may_have_pages() -> None:
    rows = "token_dispatcher: flex, flex_backend: hybridep, expert_rank_capacity_factor: 1.5"
    blackwell, layout = ("cluster=b200-x8", "training.fp8=mxfp8"), replace(EXPERTS, expert_tensor=1)
    fixed = "--moe-expert-rank-capacity-factor 1.5 --use-transformer-engine-op-fuser --moe-mlp-glu-interleave-size 32 "
    assert fixed in command(MIXTURE, layout, *blackwell, f"layout={{{rows}}}")
    assert "--moe-paged-stash" not in command(MIXTURE, layout, *blackwell, f"layout={{{rows}}}")
    paged = recipe_of(MIXTURE, *blackwell, f"layout={{{rows}, paged_stash: {{host_factor: 0.5}}}}")
    pages = "--moe-paged-stash --moe-paged-stash-page-size 64 --moe-paged-stash-buffer-size-factor-cuda 1.1 "
    assert f"{fixed}{pages}--moe-paged-stash-buffer-size-factor-cpu 0.5 " in " ".join(words_of(paged, layout))
    rendered = render(paged, layout)
    assert rendered.environment["NVTE_CUTEDSL_FUSED_GROUPED_MLP"] == "1"
    assert "nvidia-cudnn-frontend" in " ".join(rendered.notes)
    assert MegatronLM().facts(paged).mixture.experts_fused
    one = {"tensor": 1, "pipeline": 1, "context": 1, "expert": 8, "micro_batch_size": 1, "recompute": "none"}
    plan = make_plan(setting_of(replace(paged, pins=one, technique_limit="asked"), MegatronLM()))
    assert any("1.5 times an equal share of tokens, or whose experts save more than 1.6" in n for n in plan.assumptions)


def test_a_share_of_the_optimizer_is_kept_by_cutting_the_shard_into_groups() -> None:
    zero = ds_config(recipe_of(DEEPSPEED, OWN, "layout={offload_optimizer: 0.5}"), ZERO_3)["zero_optimization"]
    shard = 6_738_415_616 / 16
    assert zero["offload_optimizer"]["ratio"] == 0.5
    assert 19 <= shard / zero["sub_group_size"] <= 21


SCRIPT_FLAGS = [
    ("layout={mlp_chunks: 8}", "--mlp-chunks 8"),
    ("layout={loss: tiled}", "--loss-tiles 8"),
    ("layout={loss: tiled, loss_tiles: 32}", "--loss-tiles 32"),
    ("training.adapters={rank: 16}", "--adapter-rank 16"),
    ("training.adapters={rank: 16, frozen_down: true}", "--adapter-rank 16 --frozen-adapter-down"),
    (
        "training.adapters={rank: 16, target_modules: [o_proj, linear_fc1]}",
        "--adapter-rank 16 --adapter-targets o_proj gate_proj up_proj",
    ),
    ("training.trained_layers=4", "--trained-layers 4"),
]


@pytest.mark.parametrize(("override", "flags"), SCRIPT_FLAGS, ids=[flags for _, flags in SCRIPT_FLAGS])
def test_the_script_is_told_words_it_knows(override: str, flags: str) -> None:
    assert flags in command(DEEPSPEED, ZERO_3, override)
    assert all(f'"{flag}"' in TRAINER.read_text() for flag in re.findall(r"--[\w-]+", flags))
    assert flags.split()[0] not in command(DEEPSPEED, ZERO_3)


def test_checkpoints_on_the_host_are_told_to_the_script() -> None:
    layout, override = replace(ZERO_3, recompute=RECOMPUTE_FULL), "layout={recompute: full, offload_checkpoints: true}"
    assert "--gradient-checkpointing --offload-checkpoints" in command(DEEPSPEED, layout, override)


def test_a_script_of_ones_own_does_what_it_likes_but_not_to_deepspeed() -> None:
    recipe = recipe_of(DEEPSPEED, OWN, "layout={offload_modules: [core_attn], mlp_chunks: 4, loss: fused_linear}")
    assert DeepSpeed().rules(recipe)
    assert "--mlp-chunks" not in words_of(recipe, ZERO_3)


@pytest.mark.parametrize(("precision", "refused"), [("fp32", True), ("bf16", False), ("fp16", False)])
def test_megatron_offloads_no_optimizer_of_fp32(precision: str, refused: bool) -> None:
    recipe = recipe_of(DENSE, f"training.precision={precision}", "layout={offload_optimizer: 0.5}")
    assert ("offload-optimizer-half" in refused_by(recipe, GPUS)) is refused


def test_the_planner_keeps_to_them() -> None:
    recipe = recipe_of(DENSE, "layout={offload_layers: 2}")
    plan = make_plan(setting_of(recipe, backend_for(recipe)))
    assert (plan.layout.pipeline, plan.layout.recompute) == (1, 0)
    assert plan.refused["offload-layers-one-stage"] > 0


@pytest.mark.parametrize("name", [DENSE, DEEPSPEED])
@pytest.mark.parametrize("what", ["swapped_share: 0.5", "sampled_share: 0.5", "weight_versions: 2"])
def test_what_no_backend_runs_is_planned_and_never_rendered(name: str, what: str) -> None:
    recipe = recipe_of(name, f"what_if={{{what}}}")
    backend = backend_for(recipe)
    layout = FULL if name == DENSE else ZERO_3
    assert judge_layouts(setting_of(recipe, backend), [layout])[0].device_bytes
    with pytest.raises(UserError, match=rf"what_if\.{what.split(':')[0]}: no backend runs it"):
        backend.render(recipe, layout)


def test_the_table_lists_every_key_and_no_flag_the_parser_lacks() -> None:
    listed = [key.rpartition(".")[2] for entry in TECHNIQUE_LIST for key in entry.keys]
    numbers = ["recompute", "recompute_layers", "offload_layers", "gradient_dtype"]
    assert sorted(listed) == sorted([*declarations(Techniques), *numbers])
    flags = set(core_parser("0.19").flags)
    for entry in TECHNIQUE_LIST:
        assert entry.saves
        assert entry.costs
        assert set(re.findall(r"--[\w-]+", entry.megatron or "")) <= flags
        assert all(f'"{flag}"' in TRAINER.read_text() for flag in re.findall(r"--[\w-]+", entry.deepspeed or ""))


BIG = "llama3-70b"
SPLIT = Layout(8, 4, data=16, sequence_parallel=1, zero_stage=1)
SPARSE = "qwen3-30b-a3b"
EXCHANGING = Layout(1, 1, data=64, expert=8, zero_stage=1)
HIDDEN = "layout.overlap_expert_communication=true"


def priced(layout: Layout, recipe: Recipe) -> tuple[float, int]:
    verdict = judge_layouts(setting_of(recipe, MegatronLM()), [layout])[0]
    assert verdict.step_seconds is not None
    assert verdict.device_bytes is not None
    return verdict.step_seconds, verdict.device_bytes


def test_tensor_parallelism_beside_products_is_faster_and_takes_buffers() -> None:
    silent, asking = recipe_of(BIG), recipe_of(BIG, "layout.tp_comm_overlap=true")
    assert "--tp-comm-overlap" in words_of(asking, SPLIT)
    plain, hidden = priced(SPLIT, silent), priced(SPLIT, asking)
    assert hidden[0] < plain[0]
    assert hidden[1] > plain[1]


def test_the_exchange_of_experts_may_be_hidden_without_delaying_gradients() -> None:
    program = words_of(recipe_of(MIXTURE, HIDDEN), EXCHANGING)
    assert "--overlap-moe-expert-parallel-comm" in program
    assert "--delay-wgrad-compute" not in program
    both = recipe_of(MIXTURE, "layout={overlap_expert_communication: true, delay_weight_gradients: true}")
    assert words_of(both, EXCHANGING).count("--overlap-moe-expert-parallel-comm") == 1
    plain, hidden = priced(EXCHANGING, recipe_of(MIXTURE)), priced(EXCHANGING, recipe_of(MIXTURE, HIDDEN))
    assert hidden[0] > plain[0]  # inside a node, products lose more to what sends than is hidden
    assert hidden[1] > plain[1]  # one more micro-batch is under way
    far = Layout(1, 1, data=32, expert=32, zero_stage=1)
    assert priced(far, recipe_of(SPARSE, HIDDEN))[0] < priced(far, recipe_of(SPARSE))[0]


def test_all_to_all_attention_takes_more_memory() -> None:
    silent, asking = recipe_of(BIG), recipe_of(BIG, "layout.context_comm=a2a")
    fits = Layout(1, 4, context=8, data=16, zero_stage=1)  # 64 heads, 8 query groups
    assert "--cp-comm-type" in words_of(asking, fits)
    assert MegatronLM().facts(asking).attention.context_all_to_all
    several = replace(fits, micro_batch_size=8)  # so that activations are the peak
    assert priced(several, asking)[1] > priced(several, silent)[1]
