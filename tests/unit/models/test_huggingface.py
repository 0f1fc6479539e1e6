"""A Hugging Face config.json gives the same shape as the preset, and a bad one a sentence."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmlaunch.errors import UserError
from llmlaunch.models.huggingface import SUPPORTED, read_config
from llmlaunch.models.parameters import count_parameters
from llmlaunch.models.presets import find_model, load_preset, resolve_model

# the fields of the published files that describe the shape, as their authors wrote them
LLAMA2_7B = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
LLAMA2_70B = LLAMA2_7B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
}
LLAMA3_8B = {
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
LLAMA3_70B = LLAMA3_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
LLAMA3_405B = LLAMA3_8B | {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 128,
    "num_hidden_layers": 126,
    "rope_scaling": {"factor": 8.0, "rope_type": "llama3"},
}
MIXTRAL_8X7B = {
    "model_type": "mixtral",
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
PUBLISHED = {
    "llama2-7b": LLAMA2_7B,
    "llama2-70b": LLAMA2_70B,
    "llama3-8b": LLAMA3_8B,
    "llama3-70b": LLAMA3_70B,
    "llama3-405b": LLAMA3_405B,
    "mixtral-8x7b": MIXTRAL_8X7B,
}


def written(folder: Path, values: Any) -> Path:
    file = folder / "config.json"
    file.write_text(values if isinstance(values, str) else json.dumps(values), encoding="utf-8")
    return file


@pytest.mark.parametrize("preset", PUBLISHED)
def test_the_published_config_and_the_preset_are_the_same_shape(preset: str, tmp_path: Path) -> None:
    shape, _ = read_config(written(tmp_path, PUBLISHED[preset]))
    assert replace(shape, name=preset) == load_preset(preset)


def test_a_config_is_found_by_file_by_folder_and_relative_to_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    written(tmp_path / "model", LLAMA3_8B)
    by_folder = find_model("model", tmp_path)
    assert by_folder == find_model("./model/config.json", tmp_path)
    assert by_folder == find_model(str(tmp_path / "model"))
    assert by_folder.num_layers == 32


def test_absent_keys_take_the_defaults_of_the_class_and_the_notes_say_which(tmp_path: Path) -> None:
    shape, notes = read_config(written(tmp_path, {"model_type": "llama"}))
    assert (shape.hidden_size, shape.ffn_hidden_size, shape.vocab_size) == (4096, 11008, 32000)
    assert shape.num_query_groups == 32
    assert "intermediate_size=11008" in notes[0]
    assert "num_key_value_heads=32" in notes[0]
    given_layers, notes = read_config(written(tmp_path, {"model_type": "llama", "num_hidden_layers": 3}))
    assert given_layers.num_layers == 3
    assert "num_hidden_layers" not in notes[0]


@pytest.mark.frameworks
@pytest.mark.parametrize("model_type", SUPPORTED)
def test_defaults_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    shape, _ = read_config(written(tmp_path, {"model_type": model_type, "sliding_window": None}))
    config = AutoConfig.for_model(model_type)
    assert shape.vocab_size == config.vocab_size
    assert shape.hidden_size == config.hidden_size
    assert shape.ffn_hidden_size == config.intermediate_size
    assert shape.num_layers == config.num_hidden_layers
    assert shape.num_attention_heads == config.num_attention_heads
    assert shape.num_query_groups == config.num_key_value_heads
    assert shape.max_position_embeddings == config.max_position_embeddings
    assert shape.tied_embeddings == config.tie_word_embeddings
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": getattr(config, "rope_theta", None)}
    assert shape.rotary_base == rope["rope_theta"]


@pytest.mark.frameworks
@pytest.mark.parametrize("model_type", SUPPORTED)
def test_counts_are_those_of_the_real_modules(model_type: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "vocab_size": 300,
        "sliding_window": None,
        "attention_bias": True,
        "mlp_bias": True,
    }
    if model_type == "qwen2":  # its projections have the width hidden_size / heads whatever head_dim says
        sizes |= {"head_dim": 16, "tie_word_embeddings": True}
    shape, _ = read_config(written(tmp_path, sizes | {"model_type": model_type}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes))
    assert count_parameters(shape).total == sum(p.numel() for p in model.parameters())


def test_head_size_apart_from_the_hidden_size(tmp_path: Path) -> None:
    shape, _ = read_config(written(tmp_path, LLAMA3_8B | {"head_dim": 64}))
    assert (shape.head_dim, shape.query_width) == (64, 2048)


def test_tied_embeddings_biases_and_the_rotary_base_are_read(tmp_path: Path) -> None:
    changed = LLAMA3_8B | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
    changed |= {"rope_parameters": {"rope_theta": 1234.0}}
    shape, _ = read_config(written(tmp_path, changed))
    assert (shape.tied_embeddings, shape.linear_bias, shape.rotary_base) == (True, True, 1234.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt_neox"}, "supported: llama, mistral, mixtral, qwen2"),
        ({"model_type": None}, "model_type"),
        ({"hidden_size": "4096"}, 'hidden_size: must be a whole number from 1 to 268435456, not "4096"'),
        ({"hidden_size": -1}, "hidden_size"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_attention_heads": 33}, "not divisible by 33 heads"),
        ({"num_key_value_heads": 5}, "num_key_value_heads: 32 attention heads cannot be shared"),
        ({"hidden_act": "gelu"}, "only silu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {}}, "quantised"),
        ({"sliding_window": 4096}, "sliding-window"),
        ({"tie_word_embeddings": "no"}, "must be true or false"),
        ({"rope_theta": -5}, "rope_theta: must be above 0"),
    ],
)
def test_a_config_that_is_not_exact_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = written(tmp_path, LLAMA3_8B | change)
    with pytest.raises(UserError) as caught:
        read_config(file)
    assert str(caught.value).startswith(str(file))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "[1]",
        "",
        "{" * 100_000,
        "[" * 100_000,
        '{"model_type": "llama", "rope_theta": NaN}',
        '{"model_type": "llama", "rope_theta": 1e999}',
        '{"model_type": "llama", "vocab_size": ' + "9" * 10_000 + "}",
        '{"model_type": "llama", "model_type": "llama"}',
        '{"model_type": ["llama"]}',
    ],
    ids=range(10),
)
def test_a_hostile_file_is_a_sentence(text: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read_config(written(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_large_file_is_refused_unread(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with file.open("wb") as out:
        out.truncate(50 * 2**20)
    with pytest.raises(UserError, match=r"is 50\.0 MiB"):
        read_config(file)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.dictionaries(st.sampled_from([*LLAMA3_8B, *MIXTRAL_8X7B, "head_dim", "rope_parameters"]), JSON),
    model_type=st.sampled_from(SUPPORTED),
)
def test_any_config_is_a_shape_or_a_user_error(changes: dict[str, Any], model_type: str, tmp_path: Path) -> None:
    file = written(tmp_path, json.dumps(LLAMA3_8B | changes | {"model_type": model_type}))
    with contextlib.suppress(UserError):
        read_config(file)


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown model 'llama3-7b'; did you mean llama3-"):
        find_model("llama3-7b")


def test_an_inline_shape_may_start_from_a_preset() -> None:
    small = find_model({"base": "llama3-8b", "num_layers": 2, "num_query_groups": 4})
    assert (small.num_layers, small.num_query_groups, small.hidden_size) == (2, 4, 4096)
    fewer = find_model({"base": "mixtral-8x7b", "num_layers": 3})
    assert fewer.moe is not None
    assert fewer.moe.layer_pattern == (1, 1, 1)


def test_an_inline_shape_fills_in_what_follows() -> None:
    sizes = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "vocab_size": 256}
    shape, _ = resolve_model(sizes, default_positions=77)
    assert (shape.num_query_groups, shape.head_dim, shape.max_position_embeddings) == (4, 16, 77)
    mixture, _ = resolve_model(
        sizes | {"moe": {"num_experts": 4, "topk": 2, "ffn_hidden_size": 32}}, default_positions=77
    )
    assert mixture.moe is not None
    assert mixture.moe.layer_pattern == (1, 1)
