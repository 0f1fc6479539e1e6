"""The families of models against transformers itself: defaults of the configuration classes, parameters of the real
modules on the meta device, and the way back from a shape to a configuration."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.models.huggingface.config import ALIASES, DEFAULTS, shape_from_config
from llmlaunch.models.huggingface.written import config_of, unsaid
from llmlaunch.models.parameters import count_parameters
from llmlaunch.models.presets import load_preset, preset_names
from llmlaunch.models.shape import FAMILIES

pytestmark = pytest.mark.frameworks

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
# in the class they stand inside rope_parameters, or arrive as a word of their own
ROPE = {"rope_theta", "rope_local_base_freq", "sliding_window_pattern"}
SMALL: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    **{"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10, "moe_intermediate_size": 24},
    **{"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 2},
}
GPT = {"n_embd": 96, "n_layer": 3, "n_head": 6, "n_positions": 64, "vocab_size": 300}
# each with what makes its parameters differ from the family's common case
VARIED = [
    {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 20},
    {"model_type": "llama", "tie_word_embeddings": True},
    {"model_type": "mistral", "head_dim": 20, "sliding_window": 8},
    {"model_type": "mixtral", "num_local_experts": 4, "head_dim": 20},
    {"model_type": "qwen2", "tie_word_embeddings": True},
    {"model_type": "qwen2", "head_dim": 20},
    {"model_type": "qwen3", "head_dim": 20},
    {"model_type": "qwen2_moe", **EXPERTS, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2},
    {"model_type": "qwen2_moe", **EXPERTS, "shared_expert_intermediate_size": 40, "qkv_bias": False},
    {"model_type": "qwen3_moe", **EXPERTS, "mlp_only_layers": [0, 3], "head_dim": 20},
    {"model_type": "qwen3_moe", **EXPERTS},
    {"model_type": "gemma", "head_dim": 20},
    {"model_type": "gemma2", "head_dim": 20, "tie_word_embeddings": False},
    {"model_type": "gemma3_text", "head_dim": 20},
    {"model_type": "deepseek_v2", **LATENT, "topk_method": "group_limited_greedy", "q_lora_rank": None},
    {"model_type": "deepseek_v2", **LATENT, "q_lora_rank": 12, "n_shared_experts": 3},
    {"model_type": "deepseek_v3", **LATENT, "q_lora_rank": 12},
    {"model_type": "gpt2", **GPT},
    {"model_type": "gpt2", **GPT, "n_inner": 100, "tie_word_embeddings": False},
]


def built(config: dict[str, Any]) -> Any:
    """The real model, without memory for its parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in config.items() if key != "quantization_config"}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))


def parameters(config: dict[str, Any]) -> int:
    return sum(parameter.numel() for parameter in built(config).parameters())


def published(preset: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CONFIGS / f"{preset}.json").read_text(encoding="utf-8"))
    return config


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_the_class(family: str) -> None:
    from transformers import AutoConfig

    real = AutoConfig.for_model(family)
    for key, value in DEFAULTS[family].items():
        if key not in ROPE and value is not None:
            assert getattr(real, key) == value, key
    shape, _ = shape_from_config({"model_type": family, "num_experts_per_tok": 2}, "defaults")
    rope = real.rope_parameters if hasattr(real, "rope_parameters") else {"rope_theta": shape.rotary_base}
    assert shape.rotary_base == rope.get("full_attention", rope)["rope_theta"]
    if shape.sliding_window is not None and shape.sliding_window.full_every:
        kinds = [
            "full_attention" if not (i + 1) % shape.sliding_window.full_every else "sliding_attention"
            for i in range(shape.num_layers)
        ]
        assert real.layer_types == kinds


@pytest.mark.parametrize("family", ALIASES)
def test_other_names_are_those_of_the_class(family: str) -> None:
    from transformers import AutoConfig

    theirs = type(AutoConfig.for_model(family)).attribute_map
    ours = {alias: key for alias, key in ALIASES[family].items() if key != "num_nextn_predict_layers"}
    assert {alias: theirs.get(alias, key) for alias, key in ours.items()} == ours


def test_every_preset_has_the_parameters_of_the_real_model() -> None:
    counted = {name: count_parameters(load_preset(name)).total for name in preset_names()}
    assert counted == {name: parameters(published(name)) for name in preset_names()}


@pytest.mark.parametrize("changes", VARIED, ids=lambda changes: changes["model_type"])
def test_counts_are_those_of_the_real_modules(changes: dict[str, Any]) -> None:
    config = changes if changes["model_type"] == "gpt2" else SMALL | changes
    shape, _ = shape_from_config(config, "small")
    assert count_parameters(shape).total == parameters(config)


@pytest.mark.parametrize("changes", VARIED, ids=lambda changes: changes["model_type"])
def test_a_shape_written_back_is_the_same_model(changes: dict[str, Any]) -> None:
    config = changes if changes["model_type"] == "gpt2" else SMALL | changes
    shape, _ = shape_from_config(config, "small")
    assert unsaid(shape) == ()
    assert parameters(config_of(shape)) == parameters(config)


def test_every_preset_can_be_written_back() -> None:
    """Few layers, all of the rest: the real class takes the words and has as many parameters as the shape."""
    for name in preset_names():
        whole = load_preset(name)
        moe = None if whole.moe is None else replace(whole.moe, layer_pattern=whole.moe.layer_pattern[:4])
        shape = replace(whole, num_layers=4, moe=moe)
        assert unsaid(whole) == (), name
        assert parameters(config_of(shape)) == count_parameters(shape).total, name
