"""Real Megatron core 0.19.2 takes what we render of FSDP, overlap, data and checkpoints, and refuses with us."""

from __future__ import annotations

from dataclasses import replace

import pytest
from judges import MegatronJudge
from megatron_cases import Case, refusals

from llmlaunch.assets import asset
from llmlaunch.layout import Layout
from llmlaunch.recipe.load import load_recipe

pytestmark = pytest.mark.frameworks

SMALL_DENSE = (
    "model={num_layers: 4, hidden_size: 64, ffn_hidden_size: 96, num_attention_heads: 8, num_query_groups: 4, "
    "vocab_size: 512}"
)
SMALL_MIXTURE = SMALL_DENSE[:-1] + ", moe: {num_experts: 4, topk: 2, ffn_hidden_size: 32}}"
SHORT = ("nodes=1", "training={sequence_length: 64, global_batch_size: 16, steps: 10}")
SAVING = ("training.save_interval=5", "training.checkpoint_path=/ckpt")
HIDDEN = "layout.overlap_expert_communication=true"


def case(layout: Layout, *overrides: str, mixture: bool = False) -> Case:
    words = (SMALL_MIXTURE if mixture else SMALL_DENSE, *SHORT, *overrides)
    recipe = load_recipe(asset("recipes", "llama3-8b.yaml"), words)
    assert recipe.world_size == layout.world_size
    return Case(recipe, layout)


def sharded(stage: int, layout: Layout, *overrides: str, mixture: bool = False) -> Case:
    return case(replace(layout, zero_stage=stage), f"layout.zero_stage={stage}", *overrides, mixture=mixture)


SPLIT = Layout(2, context=2, data=2, sequence_parallel=1)
TAKEN = {
    "stage 2": sharded(2, Layout(data=8)),
    "stage 3": sharded(3, Layout(data=8), *SAVING),
    "stage 3, split": sharded(3, SPLIT, "training.gradient_dtype=bf16"),
    "stage 2, split": sharded(2, SPLIT),
    "stage 3, mixture": sharded(3, Layout(data=8, expert=4), mixture=True),
    "stage 3, mixture, hidden": sharded(3, Layout(data=8, expert=4), HIDDEN, mixture=True),
    "stage 3 in fp16": sharded(3, Layout(data=8), "training.precision=fp16"),
    "user buffers": case(replace(SPLIT, zero_stage=1), "layout.tp_comm_overlap=true"),
    "hidden exchange": case(Layout(data=8, expert=4, zero_stage=1), HIDDEN, mixture=True),
    "hidden exchange, interleaved": case(
        Layout(pipeline=2, virtual_pipeline=2, data=4, expert=4, zero_stage=1), HIDDEN, mixture=True
    ),
    "all-to-all": case(Layout(context=4, data=2, zero_stage=1), "layout.context_comm=a2a"),
    "a blend": case(
        Layout(data=8), "data={blend: [{path: /a, weight: 1}, {path: /b, weight: 2.5}], cache_path: /c, split: '9,1,0'}"
    ),
    "a tokenizer": case(Layout(data=8), "data={path: /a, tokenizer: /t.model, tokenizer_type: SentencePieceTokenizer}"),
    "old checkpoints": case(Layout(data=8), *SAVING, "training.checkpoint_format=torch", "layout.zero_stage=0"),
    "tensorboard": case(Layout(data=8), "training.tensorboard=/tb"),
}
REFUSED = {
    "user buffers without sequence parallelism": (
        case(Layout(2, data=4, zero_stage=1), "layout.tp_comm_overlap=true"),
        "hidden-tensor-sequence",
        "sequence parallelism is enabled",
    ),
    "hidden exchange without experts apart": (
        case(Layout(data=8, zero_stage=1), HIDDEN, mixture=True),
        "hidden-exchange-experts",
        "expert model parallelism",
    ),
    "hidden exchange in plain stages": (
        case(Layout(pipeline=2, data=4, expert=4, zero_stage=1), HIDDEN, mixture=True),
        "hidden-exchange-interleaved",
        "virtual_pipeline_model_parallel_size",
    ),
    "hidden exchange by allgather": (
        case(Layout(data=8, expert=4, zero_stage=1), HIDDEN, "layout.token_dispatcher=allgather", mixture=True),
        "hidden-exchange-needs-alltoall",
        "alltoall/flex",
    ),
    "torch_dcp": (
        case(Layout(data=8), *SAVING, "training.checkpoint_format=torch_dcp"),
        "no-torch-dcp",
        "torch_dcp is only tested with FSDP",
    ),
    "fsdp_dtensor without its implementation": (
        case(Layout(data=8), *SAVING, "training.checkpoint_format=fsdp_dtensor"),
        "format-of-sharded",
        "only tested with Megatron FSDP",
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_we_accept_is_taken(megatron: MegatronJudge, name: str) -> None:
    one = TAKEN[name]
    assert refusals(one) == []
    told = megatron(one.layout.world_size, one.words, one.environment, until="stages")
    assert told.accepted, (told, one.words)


@pytest.mark.parametrize("name", REFUSED)
def test_what_we_refuse_is_refused_for_that_reason(megatron: MegatronJudge, name: str) -> None:
    one, key, why = REFUSED[name]
    assert refusals(one) == [key]
    told = megatron(one.layout.world_size, one.words, one.environment, until="stages")
    assert why in told.error, told


def test_one_connection_is_refused_where_parameters_are_gathered(megatron: MegatronJudge) -> None:
    one = TAKEN["stage 3, split"]
    told = megatron(8, one.words, {**one.environment, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}, until="stages")
    assert "FSDP requires CUDA_DEVICE_MAX_CONNECTIONS > 1 or unset" in told.error


def test_megatron_itself_would_begin_with_sharded_stages(
    megatron: MegatronJudge,
) -> None:
    one = sharded(3, Layout(pipeline=2, data=4))
    assert refusals(one) == ["sharded-one-stage"]
    assert megatron(8, one.words, one.environment, until="stages").accepted
