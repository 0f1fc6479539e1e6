"""Parameter counts equal the published exact ones."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from llmlaunch.assets import asset
from llmlaunch.families.hub_ids import load_preset, preset_names
from llmlaunch.layers.parameters import ModelParameters, count_parameters


def count_of(name: str) -> ModelParameters:
    return count_parameters(load_preset(name))


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_has_exactly_the_published_parameters_and_states_their_source(name: str) -> None:
    data, count = json.loads(asset("recipes", "models", f"{name}.json").read_text("utf-8")), count_of(name)
    assert count.total == data["published_parameters"]
    assert "http" in data["source"] or "arXiv" in data["source"]


@pytest.mark.parametrize(
    ("name", "millions", "digits"),
    [("gpt3-125m", 125, 3), ("gpt3-2.7b", 2650, 3), ("gpt3-6.7b", 6660, 3), ("gpt3-13b", 12850, 4)],
)
def test_gpt_3_shapes_round_to_the_papers_counts(name: str, millions: int, digits: int) -> None:
    """Table D.1 of arXiv:2005.14165, in millions."""
    assert float(f"{count_of(name).total / 1e6:.{digits}g}") == millions


def test_a_mixture_uses_only_topk_experts_per_token() -> None:
    count = count_of("mixtral-8x7b")
    assert count.active == 12_879_925_248
    assert {(layer.experts, layer.active_experts) for layer in count.layers} == {(24 * 4096 * 14336, 6 * 4096 * 14336)}
    assert count_of("llama3-8b").active == 8_030_261_248


def test_tying_the_embedding_saves_one_vocabulary() -> None:
    shape = load_preset("llama3-8b")
    tied = count_parameters(replace(shape, tied_embeddings=True))
    assert count_parameters(shape).total - tied.total == shape.vocab_size * shape.hidden_size


def test_deepseek_v3_is_the_published_safetensors_without_the_routers_buffers() -> None:
    assert count_of("deepseek-v3").total == 671_026_419_200 - 58 * 256
    assert round(count_of("deepseek-v3").active / 1e9) == 38  # 37 B without the embedding


def test_multi_token_prediction_adds_a_layer_and_its_projection() -> None:
    """arXiv:2412.19437, section 4.2 and the model card: 14 B with embedding and head, which are shared here."""
    shape = load_preset("deepseek-v3")
    more = count_parameters(replace(shape, mtp_num_layers=1)).mtp
    assert more == count_parameters(shape).layers[-1].total + 2 * 7168**2 + 3 * 7168
