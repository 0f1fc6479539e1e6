"""The families of models against transformers itself: defaults of the configuration classes, parameters of the real
modules on the meta device, the way back from a shape to a configuration, and what a layer keeps for its backward pass,
as priced."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from judges import deepspeed_versions

import llmlaunch
from llmlaunch.families.hub_ids import load_preset, preset_names
from llmlaunch.families.registry import all_families, family_named, family_names, same_family
from llmlaunch.families.written import config_of, shape_from_config, unsaid
from llmlaunch.frameworks.deepspeed.facts import DeepSpeedOptions, deepspeed_facts, script_facts
from llmlaunch.frameworks.deepspeed.family_facts import with_family
from llmlaunch.layers import model as layered
from llmlaunch.layers.parameters import count_parameters
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.job import Job, all_ranks
from llmlaunch.memory.layer_bytes import layers_of
from llmlaunch.memory.vision import PIXEL_BYTES, encoder_activations
from llmlaunch.models.shape import ModelShape, ShortConvolutionShape
from llmlaunch.techniques import NO_TECHNIQUES, Techniques
from llmlaunch.techniques.requests import Adapters
from llmlaunch.workload import Workload
from support.changed_facts import changed
from support.recorded import Recorded, recorded
from support.soak import share

pytestmark = pytest.mark.frameworks

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
# in the class they stand inside rope_parameters, or arrive as a word of their own
ROPE = {"rope_theta", "rope_local_base_freq", "sliding_window_pattern", "rope_parameters", "partial_rotary_factor"}
ROPE |= {"full_attention_interval", "global_head_dim"}
# the class's own heads do not divide its width; embeddings of every layer are not supported; it has layers for no shape
NEEDED = {
    "glm4_moe": {"head_dim": 128},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "nemotron_h": {"hybrid_override_pattern": "M"},
}
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
POOLED = {
    **{"num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 12, "o_groups": 3, "o_lora_rank": 10},
    **{"index_n_heads": 3, "index_head_dim": 8, "n_routed_experts": 8, "moe_intermediate_size": 24},
    **{"num_experts_per_tok": 2, "intermediate_size": 24},
}
FULL = {"num_hidden_layers": 6, "head_dim": 16, "global_head_dim": 24, "hidden_size_per_layer_input": 0}
STATE_SPACES = {
    **{"head_dim": 20, "mamba_num_heads": 8, "mamba_head_dim": 6, "ssm_state_size": 10, "n_groups": 2},
    **{"n_routed_experts": 4, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40},
}
MIXERS = {"mamba_d_ssm": 48, "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 10, "ssm_out_multiplier": 0.5}
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
    {"model_type": "glm4_moe", **LATENT, "head_dim": 16, "attention_bias": True, "use_qk_norm": True},
    {"model_type": "glm4_moe", **LATENT, "head_dim": 20, "n_shared_experts": 2, "partial_rotary_factor": 1.0},
    {"model_type": "minimax_m2", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 20, "rotary_dim": 10},
    {"model_type": "olmo3", "sliding_window": 8, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    {"model_type": "lfm2", "block_ff_dim": 200, "conv_L_cache": 4, "conv_bias": True, "full_attn_idxs": [1, 3]},
    {
        "model_type": "lfm2",
        "head_dim": 20,
        "tie_embedding": False,
        "layer_types": ["conv", "full_attention"] + ["conv"] * 3,
    },
    {"model_type": "lfm2", "block_auto_adjust_ff_dim": False},
    {"model_type": "seed_oss", "attention_bias": False, "head_dim": 20, "residual_dropout": 0.0},
    {"model_type": "seed_oss", "tie_word_embeddings": True},
    {"model_type": "granite", "attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.1},
    {"model_type": "granite", "head_dim": 20, "tie_word_embeddings": True, "logits_scaling": 6.0},
    {"model_type": "falcon_h1", **MIXERS, "head_dim": 20},
    {"model_type": "falcon_h1", **MIXERS, "mamba_rms_norm": True, "mamba_conv_bias": False, "mamba_d_conv": 3},
    {"model_type": "smollm3", "no_rope_layer_interval": 2, "pad_token_id": None},
    {
        "model_type": "smollm3",
        "attention_bias": True,
        "mlp_bias": True,
        "no_rope_layers": [1] * 5,
        "pad_token_id": None,
    },
    {"model_type": "phi3", "partial_rotary_factor": 0.75, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "pad_token_id": None},
    {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 20, "sliding_window": 8},
    {"model_type": "qwen3_next", **EXPERTS, "head_dim": 20, "mlp_only_layers": [0], "full_attention_interval": 2},
    {"model_type": "qwen3_next", **EXPERTS, "linear_num_key_heads": 2, "linear_num_value_heads": 6},
    {"model_type": "qwen3_5_text", "head_dim": 20, "full_attention_interval": 3},
    {"model_type": "qwen3_5_moe_text", **EXPERTS, "linear_num_key_heads": 2, "linear_num_value_heads": 6},
    {"model_type": "gemma", "head_dim": 20},
    {"model_type": "gemma2", "head_dim": 20, "tie_word_embeddings": False},
    {"model_type": "gemma3_text", "head_dim": 20},
    {"model_type": "deepseek_v2", **LATENT, "topk_method": "group_limited_greedy", "q_lora_rank": None},
    {"model_type": "deepseek_v2", **LATENT, "q_lora_rank": 12, "n_shared_experts": 3},
    {"model_type": "deepseek_v3", **LATENT, "q_lora_rank": 12},
    {"model_type": "deepseek_v32", **LATENT, "q_lora_rank": 12, "index_n_heads": 3, "index_head_dim": 6},
    {"model_type": "glm_moe_dsa", **LATENT, "q_lora_rank": 12, "index_topk": 7},
    {"model_type": "llama4_text", "head_dim": 20, "num_local_experts": 4, "interleave_moe_layer_step": 2},
    {"model_type": "llama4_text", "intermediate_size_mlp": 80, "use_qk_norm": False, "attention_chunk_size": None},
    {"model_type": "deepseek_v4", **POOLED, "compress_ratios": [0, 4, 128, 4, 4, 0], "num_hash_layers": 2},
    {"model_type": "deepseek_v4", **POOLED, "scoring_func": "sigmoid", "hc_mult": 2, "qk_rope_head_dim": 8},
    {"model_type": "gemma4_text", **FULL, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    {
        "model_type": "gemma4_text",
        **FULL,
        "tie_word_embeddings": False,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    {"model_type": "nemotron_h", **STATE_SPACES, "hybrid_override_pattern": "M*ME-"},
    {"model_type": "nemotron_h", **STATE_SPACES, "hybrid_override_pattern": "M*EMM", "moe_latent_size": 20},
    {"model_type": "gpt2", **GPT},
    {"model_type": "gpt2", **GPT, "n_inner": 100, "tie_word_embeddings": False},
]
VARIED += [{"model_type": name} for name in family_names() if name not in {each["model_type"] for each in VARIED}]


def built(config: dict[str, Any]) -> Any:
    """The real model, without memory for its parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    values = {key: value for key, value in config.items() if key != "quantization_config"}
    values["model_type"] = same_family(config["model_type"])
    models = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    with torch.device("meta"):
        return models.from_config(AutoConfig.for_model(**values))


@pytest.fixture(scope="module")
def real() -> Iterator[Recorded]:
    """What Transformers' own models have and keep."""
    with recorded("transformers", deepspeed_versions()) as record:
        yield record


def parameters(real: Recorded, config: dict[str, Any]) -> int:
    def count() -> int:
        return sum(parameter.numel() for parameter in built(config).parameters())

    counted: int = real.answer(f"parameters of {json.dumps(config)}", count)
    return counted


def published(preset: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CONFIGS / f"{preset}.json").read_text(encoding="utf-8"))
    return config


@pytest.mark.parametrize("family", family_names())
def test_defaults_are_those_of_the_class(family: str) -> None:
    from transformers import AutoConfig

    real = AutoConfig.for_model(family)
    for key, value in family_named(family).defaults.items():
        if key not in ROPE and value is not None:
            theirs = vars(real)[key] if key in vars(real) else getattr(real, key)  # of all layers, or by another name
            assert theirs == value, key
    shape, _ = shape_from_config({"model_type": family, "num_experts_per_tok": 2, **NEEDED.get(family, {})}, "defaults")
    rope = real.rope_parameters if hasattr(real, "rope_parameters") else {"rope_theta": shape.rotary_base}
    full = rope.get("full_attention", rope.get("main", rope))
    assert shape.rotary_base == full["rope_theta"]
    window = shape.sliding_window
    turned = window.full_rotary_percent if window and layered.model_of(shape).heads_differ else shape.rotary_percent
    assert turned == full.get("partial_rotary_factor", 1.0)
    assert (shape.rope_scaling is None) == (full.get("rope_type", "default") in ("default", "proportional"))
    for key, value in (family_named(family).defaults.get("rope_parameters") or {}).items():
        assert full[key] == value, key
    if shape.sliding_window is not None and shape.sliding_window.full_every:
        local = "chunked_attention" if shape.sliding_window.chunked else "sliding_attention"
        kinds = [
            "full_attention" if not (i + 1) % shape.sliding_window.full_every else local
            for i in range(shape.num_layers)
        ]
        assert real.layer_types == kinds


@pytest.mark.parametrize("family", [name for name, family in all_families() if family.aliases])
def test_other_names_are_those_of_the_class(family: str) -> None:
    from transformers import AutoConfig

    theirs = type(AutoConfig.for_model(family)).attribute_map
    ours = {alias: key for alias, key in family_named(family).aliases.items() if key != "num_nextn_predict_layers"}
    assert {alias: theirs.get(alias, key) for alias, key in ours.items()} == ours


def test_every_preset_has_the_parameters_of_the_real_model(real: Recorded) -> None:
    counted = {name: count_parameters(load_preset(name)).total for name in preset_names()}
    assert counted == {name: parameters(real, published(name)) for name in preset_names()}


@pytest.mark.parametrize("changes", VARIED, ids=lambda changes: changes["model_type"])
def test_counts_are_those_of_the_real_modules(changes: dict[str, Any], real: Recorded) -> None:
    config = changes if changes["model_type"] == "gpt2" else SMALL | changes
    shape, _ = shape_from_config(config, "small")
    assert count_parameters(shape).total == parameters(real, config)


@pytest.mark.parametrize("changes", VARIED, ids=lambda changes: changes["model_type"])
def test_a_shape_written_back_is_the_same_model(changes: dict[str, Any], real: Recorded) -> None:
    config = changes if changes["model_type"] == "gpt2" else SMALL | changes
    shape, _ = shape_from_config(config, "small")
    assert unsaid(shape) == ()
    assert parameters(real, config_of(shape)) == parameters(real, config)


def cut(whole: ModelShape) -> ModelShape:
    """The model with its first four layers."""
    moe, compressed, window = whole.moe, whole.compressed_attention, whole.sliding_window
    if window is not None and window.full_head_dim is not None:
        whole = replace(whole, sliding_window=replace(window, full_every=2))
    moe = None if moe is None else replace(moe, layer_pattern=moe.layer_pattern[:4])
    compressed = None if compressed is None else replace(compressed, ratios=compressed.ratios[:4])
    mamba = None if whole.mamba is None else replace(whole.mamba, pattern=whole.mamba.pattern[:4])
    return replace(whole, num_layers=4, moe=moe, compressed_attention=compressed, mamba=mamba)


def test_every_preset_can_be_written_back(real: Recorded) -> None:
    """Few layers, all of the rest: the real class takes the words and has as many parameters as the shape."""
    for name in preset_names():
        whole = load_preset(name)
        shape = cut(whole)
        assert unsaid(whole) == (), name
        assert parameters(real, config_of(shape)) == count_parameters(shape).total, name


SEQUENCES, LENGTH, RANK = 2, 128, 4
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
    "gpt-oss-20b": 0.015,
    "glm-4.5": 0.015,
    "minimax-m2": 0.015,
    "phi-4": 0.001,
    "olmo3-7b": 0.002,
}
# Layers of several kinds, with tests of their own, and attention that the shipped script refuses.
APART = (
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "gemma4_text", "nemotron_h", "llama4_text"),
    *("deepseek_v32", "deepseek_v4", "glm_moe_dsa", "falcon_h1"),
)


def priced_presets() -> dict[str, float]:
    """One preset of each family, those listed and the first of any other, with how far its price may be off."""
    listed = {load_preset(name).family for name in PRESETS} | set(APART)
    others = [shape for shape in map(load_preset, preset_names()) if shape.family not in listed]
    first = {shape.family: shape for shape in reversed(others)}
    tolerances = {True: 0.015, False: 0.002}
    return PRESETS | {shape.name: tolerances[shape.moe is not None] for shape in first.values()}


PRICED = priced_presets()


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
        attention_dropout=0.0,  # with which a CPU keeps all scores, and wide factors in place of masks
        hidden_dropout=0.0,
        attention_scale=None,
        moe=moe,
        mla=mla,
    )


def test_layers_with_heads_of_their_own_keep_what_is_priced(real: Recorded) -> None:
    """Two layers of each kind less one: Gemma 4's norms keep a mean square more, which counts in small models alone."""
    whole = load_preset("gemma4-31b")
    assert whole.sliding_window is not None
    window = replace(whole.sliding_window, full_every=2, full_head_dim=32, full_query_groups=1)
    four, two = (replace(small(whole, layers), sliding_window=window, attention_scale=1.0) for layers in (4, 2))
    measured = (kept_of(real, four) - kept_of(real, two)) / 2
    statistics = 4 * SEQUENCES * LENGTH * (4 + 8 + (4 + 1) / 2)
    assert priced(four) == pytest.approx(measured - statistics, rel=0.002)


def convolved(layers: int) -> ModelShape:
    """LFM2 with few small layers, every second of which has attention."""
    whole = small(load_preset("lfm2-1.2b"), layers)
    return replace(whole, short_convolution=ShortConvolutionShape(tuple(range(1, layers, 2))))


def test_layers_with_convolutions_keep_what_is_priced(real: Recorded) -> None:
    """Two layers of each kind less one."""
    measured = (kept_of(real, convolved(4)) - kept_of(real, convolved(2))) / 2
    assert priced(convolved(4)) == pytest.approx(measured, rel=0.002)


def model_of(shape: ModelShape, attention: str = "sdpa") -> Any:
    """The model of Transformers in bf16."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    attention = attention if shape.attention_softcap is None and not shape.attention_sinks else "eager"
    config = AutoConfig.for_model(**config_of(shape), bos_token_id=None, eos_token_id=None)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.bfloat16).train()


def kept_of(real: Recorded, shape: ModelShape, attention: str = "sdpa", adapters: Adapters | None = None) -> int:
    """Bytes that the model keeps, with the adapters that peft makes."""
    targets: Any = None if adapters is None else sorted(adapters.targets) if adapters.target_modules else "all-linear"
    frozen_down = adapters is not None and adapters.frozen_down
    asked = {"config": config_of(shape), "attention": attention, "targets": targets, "frozen_down": frozen_down}
    asked |= {"sequences": SEQUENCES, "length": LENGTH}
    counted: int = real.answer(
        f"bytes kept by {json.dumps(asked)}", lambda: kept(adapted(model_of(shape, attention), targets, frozen_down))
    )
    return counted


def adapted(model: Any, targets: Any, frozen_down: bool) -> Any:
    from peft import LoraConfig, get_peft_model

    if targets is None:
        return model
    model = get_peft_model(model, LoraConfig(r=RANK, target_modules=targets, task_type="CAUSAL_LM")).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = parameter.requires_grad and not (frozen_down and ".lora_A." in name)
    return model


def kept(model: Any) -> int:
    import torch

    def forward() -> Any:
        tokens = torch.randint(0, 256, (SEQUENCES, LENGTH))
        return model(input_ids=tokens, use_cache=False, output_router_logits=False).logits.float().sum()

    return saved_bytes(model, forward)


def saved_bytes(model: Any, forward: Callable[[], Any]) -> int:
    """Bytes of distinct storages autograd saves beside parameters and buffers."""
    import torch

    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in own:
            saved[pointer] = tensor  # held, so that no other tensor comes to lie at its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    del result
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def priced(shape: ModelShape, techniques: Techniques = NO_TECHNIQUES, eager: bool = False) -> float:
    options = DeepSpeedOptions(precision="bf16", eager_attention=eager)
    facts = with_family(script_facts(deepspeed_facts(options), "own"), shape, LENGTH)
    facts = changed(facts, adapter_dropout=False)  # whose mask is a byte on a GPU and a wide factor on a CPU
    job = Job(shape, Workload(LENGTH, SEQUENCES, "bf16"), facts, techniques=techniques)
    rows = all_ranks(job, LayoutColumns.of([Layout(micro_batch_size=SEQUENCES)]))
    layers = layers_of(job, rows)
    return float(np.mean([layers.totals[kind][0] for kind in layers.model.order]))


@pytest.mark.parametrize("preset", PRICED)
def test_a_layer_keeps_what_is_priced(preset: str, real: Recorded) -> None:
    """The difference of three layers and two: everything outside the layers is in both."""
    shape = load_preset(preset)
    measured = kept_of(real, small(shape, 3)) - kept_of(real, small(shape, 2))
    assert priced(small(shape, 3)) == pytest.approx(measured, rel=PRICED[preset])


def test_eager_attention_keeps_a_softmax_in_fp32_beside_the_probabilities(real: Recorded) -> None:
    shape = load_preset("llama2-7b")
    measured = kept_of(real, small(shape, 3), "eager") - kept_of(real, small(shape, 2), "eager")
    assert priced(small(shape, 3), eager=True) == pytest.approx(measured, rel=0.005)


@pytest.mark.parametrize(
    ("changes", "attention"),
    [({}, "sdpa"), ({"frozen": True}, "sdpa"), ({"deepstack": ()}, "sdpa"), ({"depth": 4}, "eager")],
)
def test_a_vision_encoder_keeps_what_is_priced(changes: dict[str, Any], attention: str, real: Recorded) -> None:
    """Qwen3-VL's with few narrow blocks and two images; the images themselves are no saved tensors."""
    whole = load_preset("qwen3-vl-8b")
    assert whole.vision is not None
    sizes = {"depth": 6, "hidden_size": 128, "ffn_hidden_size": 480, "num_attention_heads": 4, "image_size": 256}
    vision = replace(whole.vision, **{"images_per_sample": 2, "deepstack": (1, 3), **sizes, **changes})
    shape = replace(small(whole, 2), vision=vision)
    asked = {"config": config_of(shape), "attention": attention, "frozen": vision.frozen}
    measured = real.answer(f"bytes kept by an encoder, {json.dumps(asked)}", lambda: kept_of_images(shape, attention))
    options = DeepSpeedOptions(precision="bf16", eager_attention=attention == "eager")
    facts = with_family(deepspeed_facts(options), shape, LENGTH)
    job = Job(shape, Workload(LENGTH, 1, "bf16"), facts)
    rows = all_ranks(job, LayoutColumns.of([Layout()]))
    images = PIXEL_BYTES * vision.patches_per_sample * vision.patch_width
    counted = float(encoder_activations(job, rows)[0]) - images
    assert counted == pytest.approx(measured, rel=0.02)


def kept_of_images(shape: ModelShape, attention: str) -> int:
    import torch
    from transformers import AutoConfig, AutoModel

    vision = shape.vision
    assert vision is not None
    config = AutoConfig.for_model(**config_of(shape)).vision_config
    model = AutoModel.from_config(config, attn_implementation=attention, dtype=torch.bfloat16).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "merger" in name or not vision.frozen
    side = vision.image_size // vision.patch_size
    grid, pixels = torch.tensor([[1, side, side]] * 2), torch.rand(vision.patches_per_sample, vision.patch_width)

    def encoded() -> Any:
        result = model(pixels, grid_thw=grid)
        return sum(tokens.float().sum() for tokens in (result.pooler_output, *result.deepstack_features))

    return saved_bytes(model, encoded)


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.parametrize(
    ("preset", "adapters"),
    [
        ("llama3-8b", Adapters(RANK)),
        ("llama3-8b", Adapters(RANK, frozen_down=True)),
        ("llama3-8b", Adapters(RANK, target_modules=("q_proj", "v_proj"))),
        ("llama3-8b", Adapters(RANK, target_modules=("linear_proj", "linear_fc2"))),
        ("mixtral-8x7b", Adapters(RANK, target_modules=ATTENTION)),
    ],
)
def test_each_linear_keeps_its_input_in_the_type_of_the_adapters_that_peft_makes(
    preset: str, adapters: Adapters, real: Recorded
) -> None:
    three, two = (kept_of(real, small(load_preset(preset), layers), adapters=adapters) for layers in (3, 2))
    counted = priced(small(load_preset(preset), 3), Techniques(adapters=adapters))
    assert counted == pytest.approx(three - two, rel=PRESETS[preset] + 0.004)


@pytest.mark.parametrize("names", [(), ("q_proj", "v_proj")])
def test_adapters_beside_convolutions_keep_what_is_priced(names: tuple[str, ...], real: Recorded) -> None:
    """A third layer behind two has a convolution."""
    adapters = Adapters(RANK, target_modules=names)
    three, two = (kept_of(real, convolved(layers), adapters=adapters) for layers in (3, 2))
    alone = replace(convolved(2), short_convolution=ShortConvolutionShape(()))
    assert priced(alone, Techniques(adapters=adapters)) == pytest.approx(three - two, rel=0.002)


def test_the_script_finds_the_adapted_layers_of_every_kind_of_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of attention, and with dense MLPs all linear layers of the blocks."""
    import torch

    monkeypatch.syspath_prepend(str(Path(llmlaunch.__file__).parent / "trainers" / "deepspeed"))
    from adapters import TARGETS, targets_in

    presets = ("llama3-8b", "mixtral-8x7b", "phi-4", "gpt3-6.7b", "deepseek-v3", "lfm2-1.2b")
    for preset in share(presets, ("mixtral-8x7b", "gpt3-6.7b")):
        shape = small(load_preset(preset), 2)
        with torch.device("meta"):
            model = model_of(shape)
        linears = {name for name, module in model.named_modules() if type(module).__name__ in ("Linear", "Conv1D")}
        linears -= {"lm_head"}

        def matched(names: Sequence[str], model: Any = model, linears: set[str] = linears) -> set[str]:
            ends = tuple(f".{end}" for end in targets_in(model, list(names)))
            return {name for name in linears if name.endswith(ends)}

        assert matched(ATTENTION) == {name for name in linears if "attn" in name or ".conv." in name}, preset
        assert shape.moe is not None or matched(list(TARGETS)) == linears, preset


def test_a_plain_linear_holds_the_storage_of_its_weight_and_deepspeeds_own_does_not() -> None:
    """So that without `memory_efficient_linear` every weight that ZeRO 3 gathers lives until its backward pass."""
    import torch
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    weight = torch.nn.Parameter(torch.randn(24, 16))
    tokens = torch.randn(2, 8, 16, requires_grad=True)
    for linear, holds in ((torch.nn.functional.linear, True), (zero3_linear_wrap, False)):
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor):
            linear(tokens, weight)
        others = [tensor for tensor in saved if tensor is not weight]
        assert any(tensor.untyped_storage().data_ptr() == weight.data_ptr() for tensor in others) == holds


def test_a_single_rank_copies_parameters_from_the_host_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's own handle, with torch's "meta" as the device."""
    import torch
    from deepspeed.runtime.zero import partition_parameters as zero

    class Accelerator:
        def current_device_name(self) -> str:
            return "meta"

    monkeypatch.setattr(zero, "get_accelerator", Accelerator)
    shard = torch.ones(6, dtype=torch.bfloat16)
    resting = SimpleNamespace(ds_status=zero.ZeroParamStatus.INFLIGHT, ds_tensor=shard, ds_shape=(2, 3), data=None)
    zero.NoGatherHandle(resting)
    assert (resting.data.device.type, tuple(resting.data.shape)) == ("meta", (2, 3))
    assert shard.device.type == "cpu"
