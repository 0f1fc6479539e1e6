"""Parameter counts equal the published exact ones."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from llmlaunch.assets import asset
from llmlaunch.models.parameters import count_parameters
from llmlaunch.models.presets import load_preset, preset_names
from llmlaunch.models.shape import MlaShape, ModelShape, MoeShape

# sums over the published safetensors; GPT-3: Table D.1 of arXiv:2005.14165 says 174,600 million
PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "gpt3-175b": 174_604_259_328,
}


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_a_preset_has_exactly_the_published_parameters(name: str, published: int) -> None:
    assert count_parameters(load_preset(name)).total == published


def test_every_preset_states_its_source_and_the_count_it_is_checked_against() -> None:
    assert set(preset_names()) == set(PUBLISHED)
    for name in preset_names():
        data = json.loads(asset("recipes", "models", f"{name}.json").read_text(encoding="utf-8"))
        assert "http" in data["source"] or "arXiv" in data["source"]
        assert data["published_parameters"] == PUBLISHED[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_parts_sum_to_the_total(name: str) -> None:
    count = count_parameters(load_preset(name))
    assert sum(count.by_part().values()) == count.total


def test_a_mixture_uses_only_topk_experts_per_token() -> None:
    count = count_parameters(load_preset("mixtral-8x7b"))
    assert count.active == 12_879_925_248
    assert count.by_part()["router"] == 32 * 4096 * 8
    assert count_parameters(load_preset("llama3-8b")).active == 8_030_261_248


def test_a_llama_layer_by_part() -> None:
    layer = count_parameters(load_preset("llama3-8b")).layers[0]
    assert layer.attention == 4096 * (4096 + 2 * 1024) + 4096 * 4096
    assert layer.mlp == 3 * 4096 * 14336
    assert layer.norms == 2 * 4096


def test_tying_the_embedding_saves_one_vocabulary() -> None:
    shape = load_preset("llama3-8b")
    tied = count_parameters(replace(shape, tied_embeddings=True))
    assert count_parameters(shape).total - tied.total == shape.vocab_size * shape.hidden_size


def test_biases_on_queries_keys_and_values_alone() -> None:
    """Qwen2.5-0.5B: 494,032,768 parameters (its safetensors)."""
    shape = ModelShape("qwen2.5-0.5b", 24, 896, 4864, 14, 2, 64, 151936, 32768, tied_embeddings=True, qkv_bias=True)
    assert count_parameters(shape).total == 494_032_768


def test_latent_attention_and_shared_experts() -> None:
    """DeepSeek-V3: 671,026,419,200, less the 58 x 256 correction biases of the router, which are buffers."""
    shape = ModelShape(
        name="deepseek-v3",
        num_layers=61,
        hidden_size=7168,
        ffn_hidden_size=18432,
        num_attention_heads=128,
        num_query_groups=128,
        head_dim=192,
        vocab_size=129280,
        max_position_embeddings=163840,
        mla=MlaShape(1536, 512, 128, 64, 128),
        moe=MoeShape(256, 8, 2048, 2048, (0,) * 3 + (1,) * 58),
    )
    assert count_parameters(shape).total == 671_026_419_200 - 58 * 256
