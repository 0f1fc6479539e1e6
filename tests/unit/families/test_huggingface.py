"""A Hugging Face config.json gives the same shape as the preset, and a bad one a sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.errors import UserError
from llmlaunch.families.hub_ids import load_preset, preset_names
from llmlaunch.families.lookup import find_model
from llmlaunch.families.registry import family_names
from llmlaunch.families.written import read_config
from llmlaunch.models.shape import ModelShape, RopeScaling, SlidingWindow

CONFIGS = Path(__file__).parents[2] / "data" / "configs"  # the fields of published files that say what a model is
(
    LLAMA,
    MIXTRAL_8X7B,
    GEMMA3,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    QWEN3_MOE,
    GPT3,
    QWEN_NEXT,
    DEEPSEEK_V4,
    GEMMA4,
    QWEN_VL,
    LFM2,
    GRANITE,
    FALCON,
    SMOLLM,
) = (
    json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    for name in (
        *("llama3-8b", "mixtral-8x7b", "gemma3-27b", "deepseek-v2", "deepseek-v3", "qwen3-30b-a3b", "gpt3-6.7b"),
        *("qwen3-next-80b-a3b", "deepseek-v4-flash", "gemma4-31b", "qwen3-vl-8b", "lfm2-1.2b"),
        *("granite-3.3-8b", "falcon-h1-34b", "smollm3-3b"),
    )
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}


def written(folder: Path, values: Any) -> Path:
    file = folder / "config.json"
    file.write_text(values if isinstance(values, str) else json.dumps(values), encoding="utf-8")
    return file


def shape_of(folder: Path, values: Any) -> ModelShape:
    return read_config(written(folder, values))[0]


@pytest.mark.parametrize("preset", preset_names())
def test_the_published_config_and_the_preset_are_the_same_shape(preset: str) -> None:
    shape, _ = read_config(CONFIGS / f"{preset}.json")
    assert replace(shape, name=preset) == load_preset(preset)


def test_every_family_has_a_published_model() -> None:
    assert {load_preset(preset).family for preset in preset_names()} == set(family_names())


def test_a_config_is_found_by_file_by_folder_and_relative_to_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    written(tmp_path / "model", LLAMA)
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


def test_head_size_tied_embeddings_biases_and_the_rotary_base_are_read(tmp_path: Path) -> None:
    changed = LLAMA | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
    shape = shape_of(tmp_path, changed | {"rope_parameters": {"rope_theta": 1234.0}, "head_dim": 64})
    assert (shape.head_dim, shape.query_width) == (64, 2048)
    assert (shape.tied_embeddings, shape.linear_bias, shape.rotary_base) == (True, True, 1234.0)


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (LLAMA, {"model_type": "gpt_neox"}, "supported: deepseek_v2, deepseek_v3, "),
        (
            LLAMA,
            {"model_type": "gemma3", "text_config": {}},
            "give its text_config as a file of its own; supported",
        ),
        (LLAMA, {"model_type": None}, "model_type"),
        (DEEPSEEK_V4, {"compress_ratios": [4, 8] * 22}, "compress_ratios: each must be one of 0, 4, 128, not 8"),
        (DEEPSEEK_V4, {"compress_ratios": [4]}, "compress_ratios: must name one for each of 43 layers"),
        (DEEPSEEK_V4, {"compress_rates": {"compressed_sparse_attention": 8}}, "compress_rates: compressed_sparse_att"),
        (
            DEEPSEEK_V4,
            {"mlp_layer_types": ["moe"] * 42 + ["hash_moe"]},
            "mlp_layer_types: must be hash_moe in the first",
        ),
        (DEEPSEEK_V4, {"num_hash_layers": -1}, "num_hash_layers: must be a whole number"),
        (DEEPSEEK_V4, {"num_key_value_heads": 2}, "num_key_value_heads: all heads share one key"),
        (DEEPSEEK_V4, {"rope_parameters": {"main": 1}, "rope_scaling": None}, "rope_parameters: main and compress"),
        (GEMMA4, {"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input: embeddings of every layer"),
        (GEMMA4, {"num_kv_shared_layers": 20}, "num_kv_shared_layers: layers that share keys"),
        (GEMMA4, {"enable_moe_block": True}, "enable_moe_block: experts beside a dense MLP"),
        (GEMMA4, {"use_bidirectional_attention": "all"}, "use_bidirectional_attention: only causal"),
        (
            GEMMA4,
            {"num_hidden_layers": 59, "layer_types": None},
            "layer_types: the last layer must be of full_attention",
        ),
        (QWEN_VL, {"text_config": None}, "text_config: must be an object, not null"),
        (QWEN_VL, {"vision_config": []}, "vision_config: must be an object, not []"),
        (QWEN_VL, {"text_config": {"hidden_act": "gelu"}}, "text_config.hidden_act: only silu"),
        (
            QWEN_VL,
            {"vision_config": {"depth": 0, "out_hidden_size": 4096}},
            "vision_config.depth: must be a whole number from 1",
        ),
        (QWEN_VL, {"vision_config": {}}, "vision_config.out_hidden_size: projectors put out what the decoder"),
        (QWEN_VL, {"vision_config": {"out_hidden_size": 4096, "in_channels": 4}}, "images have three channels"),
        (
            QWEN_VL,
            {"vision_config": {"out_hidden_size": 4096, "deepstack_visual_indexes": [27]}},
            "vision_config.deepstack_visual_indexes: must name different blocks from 0 to 26",
        ),
        (
            QWEN_VL,
            {"vision_config": {"out_hidden_size": 4096, "deepstack_visual_indexes": [0.5]}},
            "vision_config.deepstack_visual_indexes: must be a list of blocks, not [0.5]",
        ),
        (
            QWEN_VL,
            {"model_type": "qwen3_5"},
            "vision_config.deepstack_visual_indexes: only [] is supported",
        ),
        (QWEN_VL, {"quantization_config": {"quant_method": "awq"}}, "a quantised checkpoint is not trained"),
        (LLAMA, {"hidden_size": "4096"}, 'hidden_size: must be a whole number from 1 to 268435456, not "4096"'),
        (LLAMA, {"hidden_size": -1}, "hidden_size"),
        (LLAMA, {"num_hidden_layers": 10**30}, "num_hidden_layers"),
        (LLAMA, {"num_hidden_layers": True}, "num_hidden_layers"),
        (LLAMA, {"num_attention_heads": 33}, "not divisible by 33 heads"),
        (LLAMA, {"num_key_value_heads": 5}, "num_key_value_heads: 32 attention heads cannot be shared"),
        (LLAMA, {"hidden_act": "gelu"}, "only silu"),
        (LLAMA, {"attention_bias": True}, "attention_bias"),
        (LLAMA, {"quantization_config": {}}, "quantised"),
        (LLAMA, {"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        (LLAMA, {"sliding_window": 4096}, "Llama has no sliding windows"),
        (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 'rotary scaling "dynamic" is not supported'),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, "factor must be a number of at least 1"),
        (LLAMA, {"rope_scaling": YARN | {"original_max_position_embeddings": "8k"}}, "must be a whole number"),
        (
            LLAMA,
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
            "must be 1",
        ),
        (LLAMA, {"rope_scaling": 8}, "rope_scaling: must be an object, not 8"),
        (LLAMA, {"rms_norm_eps": 0}, "rms_norm_eps: must be above 0"),
        (LLAMA, {"tie_word_embeddings": "no"}, "must be true or false"),
        (LLAMA, {"rope_theta": -5}, "rope_theta: must be above 0"),
        (MIXTRAL_8X7B, {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        (MIXTRAL_8X7B, {"num_experts_per_tok": 9}, "num_experts_per_tok: must be at most"),
        (QWEN3_MOE, {"use_sliding_window": True}, "use_sliding_window"),
        (QWEN3_MOE, {"layer_types": ["sliding_attention"]}, "use_sliding_window"),
        (QWEN3_MOE, {"attention_bias": True}, "attention_bias: biases of attention alone"),
        (QWEN3_MOE, {"mlp_only_layers": "all"}, "mlp_only_layers"),
        (QWEN_NEXT, {"layer_types": ["linear_attention"] * 46 + ["full_attention"] * 2}, "even distances"),
        (LFM2, {"full_attn_idxs": "all"}, "full_attn_idxs: must be a list of layer numbers"),
        (LFM2, {"full_attn_idxs": [-1]}, "full_attn_idxs: must be a list of layer numbers"),
        (LFM2, {"layer_types": ["conv"]}, "layer_types: must name full_attention or conv for each of 16 layers"),
        (LFM2, {"layer_types": ["sliding_attention"] * 16}, "layer_types: must name full_attention or conv"),
        (LFM2, {"conv_L_cache": 65}, "conv_L_cache: must be a whole number from 1 to 64"),
        (LFM2, {"block_ffn_dim_multiplier": 0}, "block_ffn_dim_multiplier: must be above 0"),
        (QWEN_NEXT, {"linear_num_value_heads": 24}, "linear_num_value_heads: must be a multiple of num_key_heads (16)"),
        (GEMMA3, {"use_bidirectional_attention": True}, "only causal"),
        (GEMMA3, {"hidden_activation": "gelu"}, "hidden_activation: only gelu_pytorch_tanh"),
        (GEMMA3, {"layer_types": ["full_attention"]}, "layer_types"),
        (GEMMA3, {"layer_types": ["full_attention"] + ["sliding_attention"] * 61}, "even distances"),
        (DEEPSEEK_V2, {"norm_topk_prob": True}, "norm_topk_prob"),
        (DEEPSEEK_V2, {"topk_method": "noaux_tc"}, "topk_method: must be greedy or group_limited_greedy"),
        (DEEPSEEK_V2, {"n_group": 7}, "n_group: must divide the 160 experts"),
        (DEEPSEEK_V3, {"moe_layer_freq": 2}, "moe_layer_freq"),
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func"),
        (DEEPSEEK_V3, {"qk_rope_head_dim": 63}, "qk_rope_head_dim: must be even"),
        (DEEPSEEK_V3, {"num_experts_per_tok": None}, "num_experts_per_tok"),
        (GPT3, {"embd_pdrop": 0.1}, "embd_pdrop: must be equal to resid_pdrop"),
        (GPT3, {"activation_function": "relu"}, "activation_function"),
        (GPT3, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        (GPT3, {"n_head": 33}, "n_head: n_embd 4096 is not divisible by 33"),
        (GRANITE, {"attention_multiplier": 1e-300}, "attention_multiplier: must be a number from 0.0001 to 10000"),
        (GRANITE, {"attention_multiplier": 1e5}, "attention_multiplier: must be a number from 0.0001 to 10000"),
        (GRANITE, {"logits_scaling": 1e-320}, "logits_scaling: must be a number from 0.0001 to 10000"),
        (FALCON, {"ssm_multipliers": [1e12, 1, 1, 1, 1]}, "ssm_multipliers: must be a number from 0.0001 to 10000"),
        (FALCON, {"mamba_d_conv": 1}, "mamba_d_conv: must be a whole number from 2 to 64"),
        (FALCON, {"mamba_norm_before_gate": True}, "mamba_norm_before_gate: the kernel of mamba-ssm norms behind"),
        (FALCON, {"time_step_limit": [0.0, 0.1]}, "time_step_limit: steps without a limit alone"),
        (SMOLLM, {"no_rope_layers": "x"}, "no_rope_layers: must list a 0 or a 1 for each of 36 layers"),
        (SMOLLM, {"num_hidden_layers": 3}, "no_rope_layers: must list a 0 or a 1 for each of 3 layers"),
        (SMOLLM, {"use_sliding_window": True}, "windows in some of the layers are not supported"),
    ],
)
def test_what_is_not_exact_or_what_a_shape_cannot_say_is_refused_by_its_key(
    config: dict[str, Any], change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = written(tmp_path, config | change)
    with pytest.raises(UserError) as caught:
        read_config(file)
    assert str(caught.value).startswith(str(file))
    assert message in str(caught.value)


def test_positions_of_a_config_by_old_and_new_names(tmp_path: Path) -> None:
    old = shape_of(tmp_path, LLAMA | {"rope_scaling": YARN})
    inside = YARN | {"rope_theta": 500000.0}
    new = shape_of(tmp_path, LLAMA | {"rope_theta": 1.0, "rope_parameters": inside})
    assert old == new
    assert old.rope_scaling == RopeScaling("yarn", 4.0, 8192)
    assert old.rotary_base == 500000.0


def test_windows_of_gemma_3_by_old_and_new_names(tmp_path: Path) -> None:
    old, notes = read_config(written(tmp_path, GEMMA3))
    kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(62)]
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    without = {key: value for key, value in GEMMA3.items() if key != "rope_scaling"}
    new = shape_of(tmp_path, without | {"layer_types": kinds, "rope_parameters": rope})
    assert old == new
    assert old.sliding_window == SlidingWindow(1024, 6, 10000.0)
    assert any("layers with a window are timed by it with Megatron-LM" in note for note in notes)


def test_layers_with_linear_attention_by_each_key(tmp_path: Path) -> None:
    def full_every(**change: Any) -> int | None:
        linear = shape_of(tmp_path, QWEN_NEXT | {"num_hidden_layers": 6} | change).linear_attention
        return None if linear is None else linear.full_every

    assert full_every() == 4
    assert full_every(full_attention_interval=3) == 3
    assert full_every(full_attention_interval=8) == 0
    assert full_every(layer_types=["linear_attention", "full_attention"] * 3) == 2
    assert full_every(layer_types=["full_attention"] * 6) is None
    with pytest.raises(UserError, match="layers of full_attention must stand in even distances"):
        full_every(layer_types=["full_attention"] + ["linear_attention"] * 5)


def test_layers_with_convolutions_by_each_key(tmp_path: Path) -> None:
    def attention(**change: Any) -> tuple[int, ...] | None:
        convolution = shape_of(tmp_path, LFM2 | {"num_hidden_layers": 4} | change).short_convolution
        return None if convolution is None else convolution.attention_layers

    assert attention() == (2, 5, 8, 10, 12, 14)
    assert attention(layer_types=["conv", "full_attention"] * 2) == (1, 3)
    assert attention(full_attn_idxs=[]) == ()
    assert attention(full_attn_idxs=None) is None
    assert attention(layer_types=["full_attention"] * 4) is None


def test_the_width_of_an_mlp_is_rounded_where_the_class_rounds_it(tmp_path: Path) -> None:
    def width(**change: Any) -> int:
        return shape_of(tmp_path, LFM2 | change).ffn_hidden_size

    assert width() == 8192  # two thirds of 12288
    assert width(block_ff_dim=6656) == 4608  # 4437, to the next multiple of 256
    assert width(block_ff_dim=6656, block_ffn_dim_multiplier=2.0) == 8960
    assert width(block_ff_dim=6656, block_ffn_dim_multiplier=None) == 4437
    assert width(block_ff_dim=6656, block_multiple_of=1) == 4437
    assert width(block_auto_adjust_ff_dim=False, intermediate_size=1) == 12288  # block_ff_dim goes before


def test_dense_layers_among_mixtures_by_each_familys_keys(tmp_path: Path) -> None:
    def pattern(config: dict[str, Any], **change: Any) -> tuple[int, ...]:
        shape = shape_of(tmp_path, config | {"num_hidden_layers": 6} | change)
        assert shape.moe is not None
        return shape.moe.layer_pattern

    assert pattern(QWEN3_MOE, decoder_sparse_step=2) == (0, 1, 0, 1, 0, 1)
    assert pattern(QWEN3_MOE, mlp_only_layers=[0, 5]) == (0, 1, 1, 1, 1, 0)
    assert pattern(DEEPSEEK_V3) == (0, 0, 0, 1, 1, 1)


def test_a_decoder_beside_an_encoder_is_read_with_the_defaults_of_its_own_class(tmp_path: Path) -> None:
    vision = {"out_hidden_size": 2048}
    experts = {"model_type": "qwen3_vl_moe", "text_config": {"num_local_experts": 8}, "vision_config": vision}
    shape, notes = read_config(written(tmp_path, experts))
    assert shape.moe is not None
    assert (shape.family, shape.hidden_size, shape.num_layers) == ("qwen3_moe", 2048, 24)
    assert (shape.moe.num_experts, shape.moe.topk, shape.moe.router.normalize_topk) == (8, 4, True)
    assert shape.vision is not None
    assert shape.vision.deepstack == (8, 16, 24)
    assert "moe_intermediate_size=1408" in notes[0]
    assert any("each sequence is taken to have one image" in note for note in notes)
    dense = {"model_type": "qwen3_5", "text_config": {"hidden_size": 2048}, "vision_config": vision}
    with_delta_nets = shape_of(tmp_path, dense | {"tie_word_embeddings": True})
    assert with_delta_nets.vision is not None
    assert (with_delta_nets.family, with_delta_nets.vision.deepstack) == ("qwen3_5_text", ())
    assert with_delta_nets.tied_embeddings
    rotated = {"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}
    turned = shape_of(tmp_path, QWEN_VL | {"text_config": rotated | {"hidden_size": 4096}})
    assert turned.rotary_base == 7.0


def test_what_a_published_file_says_beside_the_model_is_a_note(tmp_path: Path) -> None:
    shape, notes = read_config(written(tmp_path, DEEPSEEK_V3))
    assert shape.mtp_num_layers == 0
    assert any("num_nextn_predict_layers=1 is left out" in note for note in notes)
    assert any("quantization_config" in note for note in notes)


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
