"""What a layer of each family keeps for its backward pass, counted in the real modules of transformers, as priced."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmlaunch.backends.deepspeed.facts import DeepSpeedOptions, deepspeed_facts, with_family
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.job import Job, all_ranks
from llmlaunch.memory.saved import saved_by_dense_layer, saved_by_mixture_layer
from llmlaunch.models.huggingface.written import config_of
from llmlaunch.models.presets import load_preset
from llmlaunch.models.shape import ModelShape
from llmlaunch.workload import Workload

pytestmark = pytest.mark.frameworks

SEQUENCES, LENGTH = 2, 128
# of each family one; router and masks aside, of which little models have much and large ones nothing
PRESETS = {
    "llama3-8b": 0.001,
    "mistral-7b": 0.001,
    "qwen2.5-7b": 0.001,
    "qwen3-8b": 0.001,
    "gemma-7b": 0.002,
    "gemma2-9b": 0.002,
    "gemma3-27b": 0.002,
    "gpt3-6.7b": 0.001,
    "mixtral-8x7b": 0.015,
    "qwen3-30b-a3b": 0.015,
    "qwen2-57b-a14b": 0.015,
    "deepseek-v2": 0.015,
    "deepseek-v3": 0.015,
}


def small(shape: ModelShape, layers: int) -> ModelShape:
    """The model with few small layers; what makes its family stays."""
    groups = max(1, 8 * shape.num_query_groups // shape.num_attention_heads)
    moe, mla = shape.moe, shape.mla
    if moe is not None:
        router = replace(moe.router, groups=None, group_topk=None)
        shared = 64 if moe.shared_expert_ffn_hidden_size else 0
        moe = replace(moe, num_experts=8, topk=2, ffn_hidden_size=64, layer_pattern=(1,) * layers, router=router)
        moe = replace(moe, shared_expert_ffn_hidden_size=shared)
    if mla is not None:
        mla = replace(mla, q_lora_rank=24, kv_lora_rank=32, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=24)
    return replace(
        shape,
        num_layers=layers,
        hidden_size=128,
        ffn_hidden_size=320,
        num_attention_heads=8,
        num_query_groups=groups,
        head_dim=16 if mla is None else 24,
        vocab_size=256,
        max_position_embeddings=512,
        attention_scale=None,
        moe=moe,
        mla=mla,
    )


def kept(shape: ModelShape) -> int:
    """Bytes of distinct storages autograd saves beside parameters and buffers, forward, in bf16."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    attention = "sdpa" if shape.attention_softcap is None else "eager"
    config = AutoConfig.for_model(**config_of(shape), bos_token_id=None, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.bfloat16).train()
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in own:
            saved[pointer] = tensor  # held, so that no other tensor comes to lie at its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(input_ids=torch.randint(0, 256, (SEQUENCES, LENGTH)), use_cache=False, output_router_logits=False)
        out.logits.float().sum()
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def priced(shape: ModelShape) -> float:
    facts = with_family(deepspeed_facts(DeepSpeedOptions(precision="bf16")), shape, LENGTH)
    job = Job(shape, Workload(LENGTH, SEQUENCES, "bf16"), facts)
    rows = all_ranks(job, LayoutColumns.of([Layout(micro_batch_size=SEQUENCES)]))
    layer = saved_by_dense_layer if shape.moe is None else saved_by_mixture_layer
    return float(layer(job, rows).total[0])


@pytest.mark.parametrize("preset", PRESETS)
def test_a_layer_keeps_what_is_priced(preset: str) -> None:
    """The difference of three layers and two: everything outside the layers is in both."""
    shape = load_preset(preset)
    measured = kept(small(shape, 3)) - kept(small(shape, 2))
    assert priced(small(shape, 3)) == pytest.approx(measured, rel=PRESETS[preset])
