"""Names of models on the Hugging Face hub: known ones are answered from what is shipped, others with what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.assets import asset
from llmlaunch.errors import UserError
from llmlaunch.families.hub_ids import hub_model, is_hub_id, load_preset, preset_names
from llmlaunch.families.lookup import find_model, resolve_model
from llmlaunch.families.registry import family_names
from llmlaunch.layers.parameters import count_parameters


def preset_file(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(asset("recipes", "models", f"{name}.json").read_text("utf-8"))
    return values


ENTRIES: list[dict[str, Any]] = [
    *({"preset": name, "ids": ids} for name in preset_names() if (ids := preset_file(name).get("ids"))),
    *json.loads(asset("recipes", "hub_ids.json").read_text("utf-8"))["models"],
]


@pytest.mark.parametrize("entry", ENTRIES, ids=[entry["ids"][0] for entry in ENTRIES])
def test_a_known_id_has_the_published_number_of_parameters(entry: dict[str, Any]) -> None:
    """The presets themselves are held to theirs (test_parameters.py); what differs from one, here."""
    assert entry["preset"] in preset_names()
    published = entry.get("published_parameters", preset_file(entry["preset"])["published_parameters"])
    for hub_id in entry["ids"]:
        assert count_parameters(find_model(hub_id)).total == published


def test_ids_of_a_presets_own_shape_are_in_its_file() -> None:
    listed = json.loads(asset("recipes", "hub_ids.json").read_text("utf-8"))["models"]
    assert [entry["ids"] for entry in listed if not entry.get("changes")] == []


def test_every_preset_names_its_family() -> None:
    assert {preset_file(name)["shape"]["family"] for name in preset_names()} == set(family_names())


def test_no_id_stands_twice() -> None:
    ids = [hub_id.lower() for entry in ENTRIES for hub_id in entry["ids"]]
    assert len(ids) == len(set(ids))


def test_a_known_id_is_its_preset_and_a_note_says_so() -> None:
    shape, notes = resolve_model("meta-llama/Llama-3.1-8B-Instruct")
    assert shape == load_preset("llama3.1-8b")
    assert notes == ("meta-llama/Llama-3.1-8B-Instruct is the preset llama3.1-8b",)
    assert resolve_model("META-LLAMA/llama-3.1-8b")[0] == shape


def test_what_differs_from_the_preset_is_named() -> None:
    shape, notes = resolve_model("mistralai/Mistral-7B-v0.3")
    assert (shape.vocab_size, shape.sliding_window) == (32768, None)
    assert notes == (
        "mistralai/Mistral-7B-v0.3 is the preset mistral-7b with another sliding_window, rotary_base, vocab_size",
    )


def test_an_id_may_be_the_base_of_a_shape() -> None:
    assert find_model({"base": "gpt2", "num_layers": 6}).num_layers == 6


def test_a_folder_goes_before_an_id_of_the_same_name(tmp_path: Path) -> None:
    folder = tmp_path / "meta-llama" / "Llama-3.1-8B"
    folder.mkdir(parents=True)
    config = {"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    assert find_model("meta-llama/Llama-3.1-8B", tmp_path).num_layers == 3


@pytest.mark.parametrize(
    ("hub_id", "told"),
    [
        ("meta-llama/Llama-3.1-9B", "llama3.1-8b"),
        ("someone/Mixtral-8x22B-tuned", "mixtral-8x22b"),
        ("someone/unheard-of", "no preset is near"),
        ("EleutherAI/pythia-6.9b", "gpt_neox"),
    ],
)
def test_another_id_says_how_its_configuration_is_had(hub_id: str, told: str) -> None:
    with pytest.raises(UserError) as caught:
        find_model(hub_id)
    message = str(caught.value)
    assert told in message
    assert "gpt_neox" in told or f"hf download {hub_id} config.json" in message


@pytest.mark.parametrize("path", ["./model", "models/config.json", "/a/b", "a/b/c", "..", "~/model"])
def test_a_path_is_no_id(path: str) -> None:
    assert not is_hub_id(path)
    assert hub_model(path) is None
