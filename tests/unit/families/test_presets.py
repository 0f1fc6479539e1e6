"""A model named or written in the recipe: what follows from what is said, its family and kind, and what cannot be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmlaunch.documents.validate import BadKey
from llmlaunch.families.hub_ids import load_preset
from llmlaunch.families.lookup import find_model, resolve_model
from llmlaunch.families.registry import family_names, family_of
from llmlaunch.models.shape import (
    MlaShape,
    ModelShape,
    RopeScaling,
    Router,
    SlidingWindow,
    kind_of,
)

SIZES = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "vocab_size": 256}
MOE = {"num_experts": 8, "topk": 2, "ffn_hidden_size": 32}
MLA = {"kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8}

POOLING = {
    **{"ratios": [0, 4], "q_lora_rank": 16, "output_groups": 2, "output_rank": 8},
    **{"index_heads": 2, "index_head_dim": 8, "index_topk": 16},
}
VISION = {"depth": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4}
INDEXER = {"heads": 2, "head_dim": 8, "topk": 16}


def inline(**changes: Any) -> ModelShape:
    return resolve_model(SIZES | changes, default_positions=128)[0]


def test_latent_attention_and_its_router_are_written_as_they_are_named() -> None:
    router = {"score_function": "sigmoid", "groups": 4, "group_topk": 2, "scaling_factor": 2.5, "expert_bias": True}
    shape = inline(mla=MLA, moe=MOE | {"router": router}, mtp_num_layers=1)
    assert shape.mla == MlaShape(None, 16, 8, 4, 8)
    assert shape.moe is not None
    assert shape.moe.router == Router("sigmoid", 4, 2, 2.5, expert_bias=True)
    assert (shape.head_dim, shape.mtp_num_layers) == (12, 1)
    assert shape.family == "deepseek_v3"


def test_positions_and_windows_are_groups_of_their_own() -> None:
    shape = inline(
        rope_scaling={"kind": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
        sliding_window={"tokens": 64, "full_every": 2},
    )
    assert shape.rope_scaling == RopeScaling("llama3", 8.0, 8192)
    assert shape.sliding_window == SlidingWindow(64, 2)


def test_the_activation_follows_from_the_gate_unless_it_is_said() -> None:
    assert inline().activation == "silu"
    assert inline(gated_mlp=False).activation == "gelu"
    assert inline(activation="gelu").activation == "gelu"
    assert find_model({"base": "llama3-8b", "gated_mlp": False}).activation == "gelu"


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({}, "llama"),
        ({"qkv_bias": True}, "qwen2"),
        ({"qk_layernorm": True}, "qwen3"),
        ({"qk_layernorm": True, "moe": MOE}, "qwen3_moe"),
        ({"moe": MOE}, "mixtral"),
        ({"moe": MOE | {"shared_expert_ffn_hidden_size": 32}}, "qwen2_moe"),
        ({"mla": MLA, "moe": MOE}, "deepseek_v2"),
        ({"mla": MLA | {"q_lora_rank": 8}, "moe": MOE, "indexer": INDEXER}, "deepseek_v32"),
        ({"mla": MLA | {"q_lora_rank": 8}, "moe": MOE, "indexer": INDEXER | {"interleaved": True}}, "glm_moe_dsa"),
        ({"moe": MOE, "no_rope_every": 2}, "llama4_text"),
        ({"no_rope_every": 2}, "smollm3"),
        ({"zero_centered_norm": True}, "gemma"),
        ({"post_norms": True}, "gemma2"),
        ({"post_norms": True, "qk_layernorm": True}, "gemma3_text"),
        ({"position_embedding": "learned_absolute"}, "gpt2"),
        ({"sliding_window": {"tokens": 64}}, "mistral"),
        ({"linear_attention": {}}, "qwen3_5_text"),
        ({"compressed_attention": POOLING, "num_query_groups": 1}, "deepseek_v4"),
        ({"residual_streams": 2}, "deepseek_v4"),
        ({"value_norm": True}, "gemma4_text"),
        ({"short_convolution": {"attention_layers": [1]}, "qk_layernorm": True}, "lfm2"),
        ({"multipliers": {"residual": 0.22}}, "granite"),
        ({"mamba": {"pattern": "HH"}}, "falcon_h1"),
        ({"family": "mistral"}, "mistral"),
    ],
)
def test_the_family_follows_from_what_only_it_has(changes: dict[str, Any], family: str) -> None:
    assert inline(**changes).family == family
    assert family in family_names()


def test_a_shape_without_a_mark_has_the_family_that_all_of_them_would_give_it() -> None:
    assert inline().family == family_of(inline())


def test_a_base_keeps_its_family_while_only_its_size_is_changed() -> None:
    mixtral = find_model({"base": "mixtral-8x7b", "num_layers": 2})
    assert mixtral.family == "mixtral"
    assert family_of(load_preset("mixtral-8x7b")) == "mixtral"
    assert find_model({"base": "llama3-8b", "qkv_bias": True}).family == "qwen2"


def test_of_a_mixture_only_what_differs_from_the_base_is_written() -> None:
    base, shape = (
        load_preset("deepseek-v2-lite"),
        find_model({"base": "deepseek-v2-lite", "moe": {"capacity_factor": 1.5, "router": {"aux_loss_coeff": 0.1}}}),
    )
    assert base.moe is not None
    router = replace(base.moe.router, aux_loss_coeff=0.1)
    assert shape.moe == replace(base.moe, capacity_factor=1.5, router=router)
    assert find_model({"base": "deepseek-v2-lite", "moe": {}}).moe == base.moe
    assert find_model({"base": "deepseek-v3", "mla": {"q_lora_rank": 768}}).mla == MlaShape(768, 512, 128, 64, 128)


@pytest.mark.parametrize(
    ("base", "layers", "pattern"),
    [("deepseek-v3", 5, (0, 0, 0, 1, 1)), ("deepseek-v2-lite", 29, (0, *(1,) * 28)), ("mixtral-8x7b", 2, (1, 1))],
)
def test_dense_layers_before_the_mixtures_stay_where_a_base_is_cut_or_continued(
    base: str, layers: int, pattern: tuple[int, ...]
) -> None:
    shape = find_model({"base": base, "num_layers": layers})
    assert shape.moe is not None
    assert shape.moe.layer_pattern == pattern


def test_layers_that_pool_stay_where_a_base_is_cut() -> None:
    shape = find_model({"base": "deepseek-v4-flash", "num_layers": 4})
    assert shape.compressed_attention is not None
    assert shape.compressed_attention.ratios == (0, 0, 4, 128)
    with pytest.raises(BadKey, match="has 43 ratios for 44 layers"):
        find_model({"base": "deepseek-v4-flash", "num_layers": 44})


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"moe": {}}, "moe"),
        ({"moe": {"num_experts": 8, "topk": 2}}, "moe"),
        ({"mla": {"kv_lora_rank": 16}}, "mla"),
        ({"moe": MOE | {"shared_expert_gate": True}}, "moe.shared_expert_gate"),
        ({"moe": MOE | {"router": {"groups": 4}}}, "moe.router.group_topk"),
        ({"moe": MOE | {"router": {"group_topk": 1}}}, "moe.router.groups"),
        ({"moe": MOE | {"router": {"groups": 3, "group_topk": 1}}}, "moe.router.groups"),
        ({"moe": MOE | {"router": {"groups": 8, "group_topk": 1}}}, "moe.router.group_topk"),
        ({"position_embedding": "none", "rope_scaling": {"kind": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"sliding_window": {"tokens": 8, "full_every": 1}}, "sliding_window.full_every"),
        ({"linear_attention": {"full_every": 1}}, "linear_attention.full_every"),
        ({"linear_attention": {"num_value_heads": 24}}, "linear_attention.num_value_heads"),
        ({"linear_attention": {}, "sliding_window": {"tokens": 8}}, "sliding_window"),
        ({"linear_attention": {}, "qkv_bias": True}, "linear_bias"),
        ({"short_convolution": {"attention_layers": [1, 0]}}, "short_convolution.attention_layers"),
        ({"short_convolution": {"attention_layers": [1]}, "linear_attention": {}}, "short_convolution"),
        ({"short_convolution": {"attention_layers": [1]}, "sliding_window": {"tokens": 8}}, "sliding_window"),
        ({"qk_l2_norm": True, "qk_layernorm": True}, "qk_l2_norm"),
        ({"qk_l2_norm": True, "mla": MLA}, "qk_l2_norm"),
        ({"no_rope_every": 4, "mla": MLA}, "no_rope_every"),
        ({"temperature_tuning": True}, "temperature_tuning"),
        ({"indexer": INDEXER}, "indexer"),
        ({"indexer": INDEXER, "mla": MLA}, "indexer"),
        ({"indexer": INDEXER | {"head_dim": 2}, "mla": MLA | {"q_lora_rank": 8}}, "indexer.head_dim"),
        ({"moe": MOE | {"layer_pattern": [0, 1, 1]}}, "moe.layer_pattern"),  # two layers
        ({"compressed_attention": POOLING}, "num_query_groups"),
        (
            {"sliding_window": {"tokens": 8, "full_every": 2, "full_query_groups": 3}},
            "sliding_window.full_query_groups",
        ),
        ({"compressed_attention": POOLING | {"ratios": [4]}}, "compressed_attention.ratios"),
        ({"compressed_attention": POOLING | {"output_groups": 3}}, "compressed_attention.output_groups"),
        ({"compressed_attention": POOLING, "num_query_groups": 1, "mla": MLA}, "mla"),
        ({"activation_limit": 7.0, "gated_mlp": False}, "activation_limit"),
        ({"vision": {"depth": 2}}, "vision"),
        ({"vision": VISION | {"num_attention_heads": 5}}, "vision.num_attention_heads"),
        ({"vision": VISION | {"image_size": 100}}, "vision.image_size"),
        ({"vision": VISION | {"position_embeddings": 50}}, "vision.position_embeddings"),
        ({"vision": VISION | {"position_embeddings": 49}}, "vision.position_embeddings"),
        ({"vision": VISION | {"deepstack": [1, 1]}}, "vision.deepstack"),
        ({"vision": VISION | {"deepstack": [2]}}, "vision.deepstack"),
        ({"vision": VISION | {"depth": 9, "deepstack": [0, 1, 2]}}, "vision.deepstack"),
    ],
)
def test_what_contradicts_itself_is_one_sentence(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(BadKey) as caught:
        inline(**changes)
    assert ".".join(map(str, caught.value.key)) == key


def test_of_an_encoder_only_what_differs_from_the_base_is_written() -> None:
    base = load_preset("qwen3-vl-8b").vision
    shape = find_model({"base": "qwen3-vl-8b", "vision": {"images_per_sample": 4, "image_size": 448}})
    assert base is not None
    assert shape.vision == replace(base, images_per_sample=4, image_size=448)
    assert (shape.vision.patches_per_sample, shape.vision.tokens_per_sample) == (4 * 28 * 28, 4 * 14 * 14)
    assert shape.family == "qwen3"


def test_an_inline_shape_fills_in_what_follows_or_starts_from_a_preset() -> None:
    shape, mixture = inline(), inline(moe=MOE)
    assert (shape.num_query_groups, shape.head_dim, shape.max_position_embeddings) == (4, 16, 128)
    assert mixture.moe is not None
    assert mixture.moe.layer_pattern == (1, 1)
    small = find_model({"base": "llama3-8b", "num_layers": 2, "num_query_groups": 4})
    assert (small.num_layers, small.num_query_groups, small.hidden_size) == (2, 4, 4096)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama3-8b", "dense gated"),
        ("mixtral-8x7b", "mixture gated"),
        ("deepseek-v3", "latent-attention mixture gated"),
        ("gpt3-13b", "dense ungated"),
        ("glm-5", "sparse latent-attention mixture gated"),
        ("deepseek-v4-flash", "compressed-attention mixture gated"),
        ("qwen3-vl-8b", "vision dense gated"),
    ],
)
def test_a_model_is_of_one_kind_for_comparing_prediction_errors(name: str, kind: str) -> None:
    assert kind_of(load_preset(name)) == kind


def test_sections_are_written_over_those_of_the_base() -> None:
    base = load_preset("falcon-h1-34b")
    assert base.multipliers is not None
    changed = find_model({"base": "falcon-h1-34b", "multipliers": {"embedding": 2.0}})
    assert changed.multipliers == replace(base.multipliers, embedding=2.0)
    assert find_model({"base": "falcon-h1-34b", "mamba": None}).mamba == base.mamba


def test_layers_that_are_all_alike_are_as_many_as_are_asked_for() -> None:
    deeper = find_model({"base": "falcon-h1-34b", "num_layers": 80})
    assert deeper.mamba is not None
    assert set(deeper.mamba.pattern) == {"H"}
    assert len(deeper.mamba.pattern) == 80
    with pytest.raises(BadKey, match="52 entries for 80 layers"):
        find_model({"base": "nemotron-3-nano", "num_layers": 80})
