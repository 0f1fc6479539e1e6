"""Data as a recipe says it: one source, and what belongs to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmlaunch.assets import asset
from llmlaunch.errors import UserError
from llmlaunch.recipe.datasets import BlendPart, Data
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.types import Recipe
from support.recipes import recipe_of


def with_data(data: str, name: str = "llama3-70b") -> Recipe:
    return recipe_of(name, f"data={data}")


def test_a_blend_is_paths_and_weights() -> None:
    data = with_data("{blend: [{path: /a, weight: 7}, {path: /b, weight: 0.5}]}").data
    assert data == Data(blend=(BlendPart("/a", 7.0), BlendPart("/b", 0.5)))
    assert data.datasets == ("/a", "/b")


def test_places_start_where_the_recipe_lies_and_names_stay(tmp_path: Path) -> None:
    text = asset("recipes", "llama3-70b.yaml").read_text()
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    blend = "data={blend: [{path: a, weight: 1}], cache_path: cache, tokenizer: meta-llama/Llama-3}"
    data = load_recipe(file, (blend,)).data
    assert data.blend == (BlendPart(str(tmp_path / "a"), 1.0),)
    assert data.cache_path == str(tmp_path / "cache")
    assert data.tokenizer == "meta-llama/Llama-3"
    read = "data={path: a, tokenizer: t.model, tokenizer_type: SentencePieceTokenizer}"
    assert load_recipe(file, (read,)).data.tokenizer == str(tmp_path / "t.model")


def test_what_is_not_said_does_not_change_a_digest() -> None:
    assert with_data("{path: /a}").digest != with_data("{path: /a, cache_path: /c}").digest
    assert with_data("{mock: true}").digest == recipe_of("llama3-70b").digest


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ("{path: /a, blend: [{path: /b, weight: 1}]}", "give exactly one of mock: true, path"),
        ("{mock: true, cache_path: /c}", "cache_path belongs to path or blend"),
        ("{mock: true, tokenizer: x}", "tokenizer belongs to path or blend"),
        ("{path: /a, tokenizer_type: TikTokenizer}", "TikTokenizer needs tokenizer"),
        ("{path: /a, tokenizer: x, tokenizer_type: NullTokenizer}", "NullTokenizer reads no tokenizer"),
        ("{path: /a, tokenizer_type: BertWordPieceCase}", "tokenizer_type"),
        ("{path: /a, split: '0,0,0'}", "data.split"),
        ("{path: /a, split: '90,10'}", "data.split"),
        ("{blend: []}", "data.blend"),
        ("{blend: [{path: /a, weight: 0}]}", "weight"),
    ],
)
def test_a_contradiction_is_said(data: str, why: str) -> None:
    with pytest.raises(UserError) as refused:
        with_data(data)
    assert why in str(refused.value)


@pytest.mark.parametrize("key", ["split: '9,1,0'", "cache_path: /c", "tokenizer_type: NullTokenizer"])
def test_words_of_megatron_are_refused_for_deepspeed(key: str) -> None:
    with pytest.raises(UserError, match=r"data\.\w+: is a word of megatron-lm; remove it for deepspeed"):
        with_data(f"{{path: /a, {key}}}", "quickstart")
