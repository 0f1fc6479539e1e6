"""The model that a Megatron-LM namespace describes, as a recipe writes it: the inverse of
frameworks/megatron/model_arguments.py."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from llmlaunch.errors import UserError
from llmlaunch.frameworks.megatron.namespace import Namespace, layer_pattern
from llmlaunch.frameworks.megatron.read_hybrid import PATTERN, mamba_section
from llmlaunch.models.hub_ids import hub_model
from llmlaunch.models.mamba import Mamba
from llmlaunch.models.presets import find_model, load_preset, preset_names
from llmlaunch.models.shape import (
    CLAMP,
    CLAMPED,
    SQUARED,
    Indexer,
    MlaShape,
    ModelShape,
    MoeShape,
    RopeScaling,
    SlidingWindow,
)
from llmlaunch.rundir.foreign_values import whole_number_in

__all__ = ["DELTA_NETS", "ModelReading", "linear_period", "read_model"]

DELTA_NETS = "gated_delta_net"  # the one --experimental-attention-variant that recipes describe


@dataclass
class ModelReading:
    """`model` is the recipe's key, a preset or a mapping; None where sizes are missing. `missing` and `notes` are those
    of a Reading."""

    model: str | dict[str, Any] | None = None
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


# Sizes that a trainer cannot do without, by `dest` and by the recipe's name.
SIZES = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
}
LLAMA3 = {"original_max_position_embeddings": 8192}
LATENT_POSITIONS = 4096  # MLATransformerConfig's own, without a flag

# Rows of the embedding that a tokenizer asks for, by its type or name: len(tokenizer), as build_tokenizer reads it. The
# first that fits decides.
TOKENIZERS: tuple[tuple[str, int], ...] = (
    (r"GPT2BPETokenizer|(^|/)gpt2(-\w+)?/?$", 50257),
    (r"llama[-_ ]?3", 128256),
    (r"codellama", 32016),
    (r"llama[-_ ]?2", 32000),
    (r"mi[sx]tral-8x7b|mistral-7b(-instruct)?(-v0\.1)?/?$", 32000),
    (r"gpt-neox-20b", 50277),
)
FEW_CHANGES = 4
NOT_COMPLETED = ("rope_scaling", "sliding_window", "indexer", "linear_attention", "mamba")  # by a base
PARTS = (Indexer, Mamba, MlaShape, MoeShape, RopeScaling, SlidingWindow)


def read_model(space: Namespace) -> ModelReading:
    """Return the model of these values; `missing` names each size that they do not tell."""
    reading = ModelReading()
    absent = [dest for dest in SIZES if not space.get(dest)]
    if absent:
        flags = ", ".join(f"--{dest.replace('_', '-')}" for dest in absent)
        reading.missing.append(
            f"model: {flags} {'are' if len(absent) > 1 else 'is'} not given; write the model's sizes"
        )
        return reading
    shape = dict(_shape(space))
    padded = space.get("padded_vocab_size")
    vocabulary, note = _vocabulary(space)
    if vocabulary is not None:
        shape["vocab_size"] = vocabulary
    elif not padded:
        reading.missing.append(
            "model.vocab_size: only the tokenizer tells how many tokens there are; write model.vocab_size"
        )
    longest = (
        {"max_position_embeddings": space["max_position_embeddings"]} if space.get("max_position_embeddings") else {}
    )
    reading.model = _named(
        shape, longest, int(padded) if padded else None, int(space.get("tensor_model_parallel_size") or 1)
    )
    reading.notes += [note] if note else []
    return reading


def _shape(space: Namespace) -> Iterator[tuple[str, Any]]:
    """Yield the keys of an inline shape whose values differ from their defaults, in the order of the gallery."""
    heads, latent = space["num_attention_heads"], bool(space.get("multi_latent_attention"))
    yield from ((key, space[dest]) for dest, key in SIZES.items())
    if space.get("num_query_groups") not in (None, heads) and not latent:
        yield "num_query_groups", space["num_query_groups"]
    if not latent and space.get("kv_channels") and space["kv_channels"] * heads != space["hidden_size"]:
        yield "head_dim", space["kv_channels"]
    longest, length = space.get("max_position_embeddings"), space.get("seq_length")
    if longest and longest != length:
        yield "max_position_embeddings", longest
    yield from _switches(space, latent)
    yield from _rates(space)
    if space.get("mtp_num_layers"):
        yield "mtp_num_layers", space["mtp_num_layers"]
    if space.get("mtp_num_layers") and space.get("mtp_use_repeated_layer"):
        yield "mtp_repeated", True
    if space.get(PATTERN):
        yield "mamba", mamba_section(space)
    if latent:
        yield "mla", _latent(space)
    if space.get("experimental_attention_variant") == "dsa":
        yield "indexer", _indexer(space)
    if space.get("num_experts"):
        yield "moe", _mixture(space)


def _switches(space: Namespace, latent: bool) -> Iterator[tuple[str, Any]]:
    clamped = bool(space.get("quick_geglu")) and space.get("activation_func_clamp_value") == CLAMP
    gated, biased = clamped or bool(space.get("swiglu")), space.get("add_bias_linear") is not False
    if not space.get("untie_embeddings_and_output_weights"):
        yield "tied_embeddings", True
    if not gated:
        yield "gated_mlp", False
    if clamped:
        yield "activation", CLAMPED
    if space.get("squared_relu"):
        yield "activation", SQUARED
    if biased:
        yield "linear_bias", True
    if space.get("add_qkv_bias") and not biased:
        yield "qkv_bias", True
    if space.get("normalization") != "RMSNorm":
        yield "normalization", space.get("normalization") or "LayerNorm"
    yield from _positions(space, latent)
    if space.get("qk_layernorm") and not latent:
        yield "qk_layernorm", True
    if space.get("qk_l2_norm"):
        yield "qk_l2_norm", True
    every = whole_number_in(str(space.get("no_rope_freq")))  # or a list of layers, which no key says
    if every:
        yield "no_rope_every", every
    if space.get("apply_layernorm_1p"):
        yield "zero_centered_norm", True
    if space.get("attention_output_gate"):
        yield "attention_gate", True
    if space.get("experimental_attention_variant") == DELTA_NETS:
        yield "linear_attention", _linear_attention(space)
    if space.get("softmax_type") == "learnable":
        yield "attention_sinks", True
    window = space.get("window_size")
    if isinstance(window, (tuple, list)) and len(window) == 2 and window[0] >= 0:
        skip = space.get("window_attn_skip_freq")
        whole = whole_number_in(str(skip)) or 0
        yield "sliding_window", {"tokens": window[0] + 1} | ({"full_every": whole} if whole else {})


def _linear_attention(space: Namespace) -> dict[str, Any]:
    names = {f"linear_{name}": name for name in ("key_head_dim", "value_head_dim")}
    names |= {f"linear_{name}": name for name in ("num_key_heads", "num_value_heads")}
    names |= {"linear_conv_kernel_dim": "conv_kernel"}
    sizes = {key: space[dest] for dest, key in names.items() if space.get(dest) is not None}
    return {"full_every": linear_period(space), **sizes}


def linear_period(space: Namespace) -> int | None:
    """Return N where every N-th layer has ordinary attention and all others linear, 0 where all have; None for any
    other pattern."""
    value = space.get("linear_attention_freq")
    if isinstance(value, str) and whole_number_in(value.strip()) is not None:
        value = int(value)
    if isinstance(value, int):
        return value if value > 1 else None
    pattern = layer_pattern(value, space["num_layers"])
    if pattern is None:
        return None
    every = pattern.index(0) + 1 if 0 in pattern else 0
    expected = tuple(int(not every or (layer + 1) % every > 0) for layer in range(len(pattern)))
    return every if pattern == expected and every != 1 else None


def _positions(space: Namespace, latent: bool) -> Iterator[tuple[str, Any]]:
    kind = space.get("position_embedding_type")
    rotary = kind in ("rope", "yarn", "mrope")
    if not rotary:
        yield "position_embedding", kind if kind in ("learned_absolute", "none") else "none"
        return
    if space.get("rotary_base") not in (None, 10000):
        yield "rotary_base", float(space["rotary_base"])
    if not latent and space.get("rotary_percent") not in (None, 1.0):
        yield "rotary_percent", space["rotary_percent"]
    scaling = _scaling(space, latent, str(kind))
    if scaling is not None:
        yield "rope_scaling", scaling


def _scaling(space: Namespace, latent: bool, kind: str) -> dict[str, Any] | None:
    if latent and space.get("rope_type") == "rope":
        return None
    if latent or kind == "yarn":
        factor = float(space.get("rotary_scaling_factor") or 1.0)
        before = LATENT_POSITIONS if latent else space.get("yarn_original_max_position_embeddings")
        scaling: dict[str, Any] = {"kind": "yarn", "factor": factor}
        scaling |= {"original_max_position_embeddings": before} if before else {}
        if not latent:
            fast, slow = space.get("yarn_beta_fast"), space.get("yarn_beta_slow")
            scaling |= {"beta_fast": fast} if fast not in (None, 32.0) else {}
            scaling |= {"beta_slow": slow} if slow not in (None, 1.0) else {}
            scaling |= {"truncate": False} if space.get("yarn_correction_range_round_to_int") is False else {}
        weights = space.get("mscale"), space.get("mscale_all_dim")
        return scaling | ({"mscale": weights[0], "mscale_all_dim": weights[1]} if weights != (1.0, 0.0) else {})
    if space.get("use_rope_scaling"):
        return {"kind": "llama3", "factor": float(space.get("rope_scaling_factor") or 8.0), **LLAMA3}
    whole = space.get("rotary_seq_len_interpolation_factor")
    return {"kind": "linear", "factor": float(whole)} if whole and whole > 1 else None


def _rates(space: Namespace) -> Iterator[tuple[str, Any]]:
    for name in ("attention_dropout", "hidden_dropout"):
        if space.get(name):
            yield name, space[name]
    epsilon = space.get("layernorm_epsilon", space.get("norm_epsilon"))
    if epsilon not in (None, 1e-5):
        yield "norm_epsilon", epsilon


def _latent(space: Namespace) -> dict[str, Any]:
    names = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    return {name: space[name] for name in names if space.get(name) is not None}


def _indexer(space: Namespace) -> dict[str, Any]:
    names = {"heads": "n_heads", "head_dim": "head_dim", "topk": "topk"}
    indexer: dict[str, Any] = {name: space[f"dsa_indexer_{theirs}"] for name, theirs in names.items()}
    indexer |= {"interleaved": True} if space.get("dsa_indexer_rope_interleaved") else {}
    weight = space.get("dsa_indexer_loss_coeff")
    return indexer | ({"loss_coeff": weight} if weight not in (None, 0.001) else {})


def _mixture(space: Namespace) -> dict[str, Any]:
    moe: dict[str, Any] = {
        "num_experts": space["num_experts"],
        "topk": space.get("moe_router_topk") or 2,
        "ffn_hidden_size": space["moe_ffn_hidden_size"],
    }
    if space.get("moe_shared_expert_intermediate_size"):
        moe["shared_expert_ffn_hidden_size"] = space["moe_shared_expert_intermediate_size"]
        moe |= {"shared_expert_gate": True} if space.get("moe_shared_expert_gate") else {}
    if space.get("moe_latent_size"):
        moe["latent_size"] = space["moe_latent_size"]
    pattern = space.get("moe_layer_freq")
    if pattern is not None and not all(pattern) and not space.get(PATTERN):
        moe["layer_pattern"] = list(pattern)
    if space.get("moe_expert_capacity_factor"):
        moe["capacity_factor"] = space["moe_expert_capacity_factor"]
    router = dict(_router(space))
    return moe | ({"router": router} if router else {})


def _router(space: Namespace) -> Iterator[tuple[str, Any]]:
    score = space.get("moe_router_score_function")
    if score in ("sigmoid", "sqrtsoftplus"):
        yield "score_function", score
    elif space.get("moe_router_pre_softmax") and (space.get("moe_router_topk") or 2) > 1:
        yield "normalize_topk", False
    if space.get("moe_router_num_groups"):
        yield "groups", space["moe_router_num_groups"]
        yield "group_topk", space.get("moe_router_group_topk") or space["moe_router_num_groups"]
    if space.get("moe_router_topk_scaling_factor") not in (None, 1.0):
        yield "scaling_factor", space["moe_router_topk_scaling_factor"]
    if space.get("moe_router_enable_expert_bias"):
        yield "expert_bias", True
    if space.get("moe_apply_probs_on_input"):
        yield "weighted_inputs", True
    balancing = space.get("moe_router_load_balancing_type")
    if balancing in ("seq_aux_loss", "none"):
        yield "balancing", balancing
    coefficient = space.get("moe_aux_loss_coeff")
    if balancing != "none" and isinstance(coefficient, float) and coefficient != 0.01:
        yield "aux_loss_coeff", coefficient


def _vocabulary(space: Namespace) -> tuple[int | None, str | None]:
    """Return the tokens before padding, and where they are taken from if not from --vocab-size."""
    kind, name = space.get("tokenizer_type"), str(space.get("tokenizer_model") or "")
    size, extra = space.get("vocab_size"), space.get("extra_vocab_size")
    if size:
        return int(size) + int(extra or 0), None
    if space.get("padded_vocab_size"):
        return None, None
    hub = hub_model(name)
    if hub is not None:
        rows = int(hub.changes.get("vocab_size", load_preset(hub.preset).vocab_size))
        return rows, f"model.vocab_size: {rows}, as the model {name} has; the script names no number"
    for pattern, tokens in TOKENIZERS:
        if re.search(pattern, name, re.IGNORECASE) or re.search(pattern, str(kind or "")):
            source = name or str(kind)
            return (
                tokens,
                f"model.vocab_size: {tokens}, as {ascii(source)[1:-1]} has tokens; the script names no number",
            )
    return None, None


def _named(shape: dict[str, Any], longest: dict[str, int], padded: int | None, tensor: int) -> str | dict[str, Any]:
    """Return the preset that this shape is, or a preset with the few keys that differ, or the shape itself."""
    if "vocab_size" not in shape and padded is None:
        return shape
    for name, preset in _presets().items():
        if any(getattr(preset, key) != shape[key] for key in SIZES.values()):
            continue
        own = shape | longest
        if "vocab_size" not in own:
            matches = padded is not None and preset.padded_vocab_size(tensor) == padded
            own["vocab_size"] = preset.vocab_size if matches else padded
        changed = _over_preset(preset, own)
        if changed is not None:
            return {"base": name} | changed if changed else name
    return shape if "vocab_size" in shape else {**shape, "vocab_size": padded}


@functools.cache
def _presets() -> Mapping[str, ModelShape]:
    return {name: load_preset(name) for name in preset_names()}


def _over_preset(preset: ModelShape, shape: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what must be written over a preset to make it this shape; None where that is much."""
    try:
        wanted = find_model({"max_position_embeddings": preset.max_position_embeddings, **shape})
    except UserError:
        return None
    modules = wanted.mtp_num_layers > 0
    changed = _differences(_comparable(preset, modules), _comparable(wanted, modules))
    for name in NOT_COMPLETED:
        if name in changed:
            changed[name] = _comparable(wanted, modules)[name]
    if changed.get("activation") not in (CLAMPED, SQUARED):
        changed.pop("activation", None)
    parts = any(
        value is None or isinstance(value, Mapping) != isinstance(getattr(preset, key), PARTS)
        for key, value in changed.items()
    )
    if len(changed) > FEW_CHANGES or parts:
        return None
    if not changed:
        return {}
    try:
        again = find_model({"base": preset.name, **changed})
    except UserError:
        return None
    return changed if _comparable(again, modules) == _comparable(wanted, modules) else None


def _comparable(shape: ModelShape, modules: bool) -> dict[str, Any]:
    """The keys of a shape that a recipe may write, plain; without `modules` also without their layers."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(shape)))
    (values["moe"] or {}).pop("grouped_gemm", None)
    if not modules:
        (values["mamba"] or {}).pop("mtp_pattern", None)
    return {key: value for key, value in values.items() if key not in ("name", "family")}


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _differences(before[key], value)
        if isinstance(value, Mapping) and isinstance(before.get(key), Mapping)
        else value
        for key, value in after.items()
        if value != before.get(key)
    }
