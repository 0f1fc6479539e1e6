"""A shape as the `config.json` of its family, and what of it that family cannot say (transformers 4.53 to 5.23)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from llmlaunch.documents.validate import BadKey
from llmlaunch.models.huggingface.config import shape_from_config
from llmlaunch.models.huggingface.deepseek_v4 import HASHED, POOLED, SCORED
from llmlaunch.models.huggingface.keys import KEYS_OF, written_keys
from llmlaunch.models.huggingface.nemotron import LETTERS
from llmlaunch.models.huggingface.reader import FULL, LINEAR, WINDOWED
from llmlaunch.models.huggingface.vision import DECODERS, config_with_vision
from llmlaunch.models.shape import MlaShape, ModelShape, MoeShape, RopeScaling

__all__ = ["config_of", "unsaid"]

Json = dict[str, Any]

SPARSE = ("deepseek_v32", "glm_moe_dsa")
LATENT = ("deepseek_v2", "deepseek_v3", *SPARSE)
MIXTURES = (
    *("mixtral", "qwen2_moe", "qwen3_moe", *LATENT, "gpt_oss", "glm4_moe", "minimax_m2"),
    *("llama4_text", "qwen3_next", "qwen3_5_moe_text", "deepseek_v4"),
)
WITHOUT_ROTARY = ("gpt2", "nemotron_h")
UNBALANCED = (*LATENT, "glm4_moe", "nemotron_h")  # their classes have nothing that keeps experts evenly used
# of training, not of the model: a configuration says none of it
_NOT_OF_THE_MODEL = ("capacity_factor", "grouped_gemm")
_NOT_OF_THE_ENCODER = ("image_size", "images_per_sample", "frozen")


def config_of(shape: ModelShape) -> Json:
    """The values of the configuration class of `shape.family`. Says what the family can say; `unsaid` tells the rest.

    Raises ValueError where the family has experts or latent attention and `shape` has none.
    """
    if missing := _needed(shape):
        raise ValueError(f"the family {shape.family} needs {missing[0]}")
    rows = KEYS_OF[shape.family]
    config = {"model_type": shape.family} | written_keys(shape, rows) | _positions(shape)
    more = _OF_FAMILY.get(shape.family)
    config |= more(shape) if more is not None else {}
    return config if shape.vision is None else config_with_vision(config, shape, shape.vision)


def unsaid(shape: ModelShape) -> tuple[str, ...]:
    """Return the fields of `shape` that its family cannot express: those that differ when its config is read back."""
    if missing := _needed(shape):
        return missing
    try:
        back, _ = shape_from_config(config_of(shape), shape.name)
    except BadKey as error:
        return (".".join(map(str, error.key)),)
    return tuple(_differences(_comparable(shape), _comparable(back), ""))


def _needed(shape: ModelShape) -> tuple[str, ...]:
    needs = {
        "moe": shape.family in MIXTURES and shape.moe is None,
        "mla": shape.family in LATENT and shape.mla is None,
        "indexer": shape.family in SPARSE and shape.indexer is None,
        "compressed_attention": shape.family == "deepseek_v4" and shape.compressed_attention is None,
        "mamba": shape.family == "nemotron_h" and shape.mamba is None,
        "vision": shape.vision is not None and shape.family not in DECODERS.values(),
    }
    return tuple(name for name, missing in needs.items() if missing)


def _comparable(shape: ModelShape) -> Json:
    """Without loss there is no weight of it, without dense layers no width of theirs, and a distance beyond the last
    layer is none."""
    values = asdict(replace(shape, name=""))
    if shape.indexer is not None:
        del values["indexer"]["loss_coeff"]  # of training, as those below are
    if shape.compressed_attention is not None:
        del values["compressed_attention"]["index_loss_coeff"]
    if shape.sliding_window is not None and shape.sliding_window.full_every > shape.num_layers:
        values["sliding_window"]["full_every"] = 0
    if shape.linear_attention is not None and shape.linear_attention.full_every > shape.num_layers:
        values["linear_attention"]["full_every"] = 0
    if values["vision"] is not None:
        for name in _NOT_OF_THE_ENCODER:
            del values["vision"][name]
    if values["moe"] is not None:
        for name in _NOT_OF_THE_MODEL:
            del values["moe"][name]
        if all(values["moe"]["layer_pattern"]):
            del values["ffn_hidden_size"]
        router = values["moe"]["router"]
        router["hash_layers"] = min(router["hash_layers"], shape.num_layers)
        if router["balancing"] == "none" or router["aux_loss_coeff"] == 0:
            router |= {"balancing": "none", "aux_loss_coeff": 0.0}
    return values


def _differences(mine: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str) -> list[str]:
    """Return the names in which the two differ. A width of dense layers that one alone has follows from its layer
    pattern, which is named."""
    differences = []
    for name, value in mine.items():
        if name not in theirs:
            continue
        other = theirs[name]
        if isinstance(value, dict) and isinstance(other, dict):
            differences += _differences(value, other, f"{prefix}{name}.")
        elif value != other:
            differences.append(prefix + name)
    return differences


def _positions(shape: ModelShape) -> Json:
    """Rotary positions, in the families that have them."""
    if shape.family in WITHOUT_ROTARY:
        return {}
    scaling = {} if shape.rope_scaling is None else {"rope_scaling": _scaling(shape.rope_scaling)}
    return {"rope_theta": shape.rotary_base, **scaling}


def _scaling(scaling: RopeScaling) -> Json:
    of_kind: Mapping[str, Json] = {
        "linear": {},
        "llama3": {
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
        },
        "yarn": {
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "mscale": scaling.mscale,
            "mscale_all_dim": scaling.mscale_all_dim,
            "attention_factor": scaling.attention_factor,
            "truncate": None if scaling.truncate else False,
        },
    }
    parameters = {"rope_type": scaling.kind, "factor": scaling.factor, **of_kind[scaling.kind]}
    if scaling.kind != "linear":
        parameters["original_max_position_embeddings"] = scaling.original_max_position_embeddings
    return {key: value for key, value in parameters.items() if value is not None}


def _llama(shape: ModelShape) -> Json:
    return {"attention_bias": shape.linear_bias, "mlp_bias": shape.linear_bias}


def _mistral(shape: ModelShape) -> Json:
    return {"sliding_window": None if shape.sliding_window is None else shape.sliding_window.tokens}


def _balanced(moe: MoeShape) -> Json:
    """The auxiliary loss of the classes that have one: computed where the router's logits are put out."""
    weight = moe.router.aux_loss_coeff if moe.router.balancing == "aux_loss" else 0.0
    return {"output_router_logits": weight > 0, "router_aux_loss_coef": weight}


def _mixtral(shape: ModelShape) -> Json:
    moe = _moe(shape)
    return _mistral(shape) | _balanced(moe)


def _gpt_oss(shape: ModelShape) -> Json:
    moe = _moe(shape)
    scaling = {"rope_scaling": {"rope_type": "default"}} if shape.rope_scaling is None else {}
    return _windows(shape) | scaling | _balanced(moe)


def _llama4(shape: ModelShape) -> Json:
    moe, window = _moe(shape), shape.sliding_window
    return _balanced(moe) | {
        "interleave_moe_layer_step": (*moe.layer_pattern, 1).index(1) + 1,
        "no_rope_layer_interval": shape.no_rope_every or shape.num_layers + 1,
        "attention_chunk_size": None if window is None else window.tokens,
    }


def _glm(shape: ModelShape) -> Json:
    return _routed_as_deepseek(_moe(shape))


def _minimax(shape: ModelShape) -> Json:
    return {key: value for key, value in _mixtral(shape).items() if key != "sliding_window"}


def _phi(shape: ModelShape) -> Json:
    """The class pads with a token that not every vocabulary has."""
    dropout = {"resid_pdrop": shape.hidden_dropout, "embd_pdrop": shape.hidden_dropout}
    return _mistral(shape) | dropout | {"pad_token_id": None}


def _olmo(shape: ModelShape) -> Json:
    """The class takes one base for layers of both kinds, and another for those with a window among its parameters."""
    window, full = shape.sliding_window, {"rope_type": "default"}
    if shape.rope_scaling is not None:
        full = _scaling(shape.rope_scaling)
    local = shape.rotary_base if window is None or window.rotary_base is None else window.rotary_base
    parameters = {
        FULL: full | {"rope_theta": shape.rotary_base},
        WINDOWED: {"rope_type": "default", "rope_theta": local},
    }
    return _windows(shape) | {"rope_parameters": parameters, "rope_scaling": None}


def _lfm2(shape: ModelShape) -> Json:
    """The width of an MLP as it is, which the class would round, and all layers where none has a convolution."""
    convolution = shape.short_convolution
    layers = range(shape.num_layers) if convolution is None else convolution.attention_layers
    return {"block_auto_adjust_ff_dim": False, "full_attn_idxs": list(layers)}


def _windows(shape: ModelShape) -> Json:
    """The class wants a window even where no layer has one."""
    window = shape.sliding_window
    every = 1 if window is None else window.full_every
    kinds = [FULL if every and not (i + 1) % every else WINDOWED for i in range(shape.num_layers)]
    return {
        "sliding_window": shape.max_position_embeddings if window is None else window.tokens,
        "layer_types": kinds,
    }


def _qwen_moe(shape: ModelShape) -> Json:
    moe = _moe(shape)
    dense = [i for i, mixture in enumerate(moe.layer_pattern) if not mixture]
    return {"mlp_only_layers": dense, "norm_topk_prob": moe.router.normalize_topk} | _balanced(moe)


def _qwen_next(shape: ModelShape) -> Json:
    kinds: Json = {"layer_types": [LINEAR if each else FULL for each in shape.linear_pattern]}
    if shape.family == "qwen3_5_moe_text":  # whose class has no width of a dense MLP
        kinds |= {"intermediate_size": shape.ffn_hidden_size}
    return kinds | (_qwen_moe(shape) if shape.family in MIXTURES else {})


def _gemma(shape: ModelShape) -> Json:
    return {"hidden_act": "gelu_pytorch_tanh"}


def _gemma2(shape: ModelShape) -> Json:
    scale = shape.attention_scale or float(shape.head_dim)
    return _windows(shape) | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": int(scale),
    }


def _gemma3(shape: ModelShape) -> Json:
    window = shape.sliding_window
    base = shape.rotary_base if window is None or window.rotary_base is None else window.rotary_base
    return _gemma2(shape) | {"rope_local_base_freq": base}


def _gemma4(shape: ModelShape) -> Json:
    window, full = shape.sliding_window, {"rope_type": "proportional", "rope_theta": shape.rotary_base}
    config = _windows(shape) | {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
    }
    if window is None:
        return config
    parameters = {
        FULL: full | {"partial_rotary_factor": window.full_rotary_percent},
        WINDOWED: {"rope_type": "default", "rope_theta": window.rotary_base or shape.rotary_base},
    }
    return config | {
        "rope_parameters": parameters,
        "global_head_dim": window.full_head_dim or shape.head_dim,
        "num_global_key_value_heads": window.full_query_groups,
    }


def _deepseek(shape: ModelShape) -> Json:
    """The class works head_dim out of the others, and would take another for the width of its rotary positions."""
    moe, mla = _moe(shape), _mla(shape)
    config = _routed_as_deepseek(moe) | {
        "head_dim": mla.qk_pos_emb_head_dim,
        "num_key_value_heads": shape.num_query_groups,
    }
    if shape.family == "deepseek_v2":
        return config | {"topk_method": "greedy" if moe.router.groups is None else "group_limited_greedy"}
    return config


def _routed_as_deepseek(moe: MoeShape) -> Json:
    router, grouped = moe.router, moe.router.groups is not None
    config: Json = {
        "n_shared_experts": moe.shared_expert_ffn_hidden_size // moe.ffn_hidden_size,
        "first_k_dense_replace": (*moe.layer_pattern, 1).index(1),
        "n_group": router.groups if grouped else 1,
        "topk_group": router.group_topk if grouped else 1,
        "norm_topk_prob": router.normalize_topk,
    }
    if router.balancing != "none":  # for other code than transformers', which has no such loss
        config |= {"aux_loss_alpha": router.aux_loss_coeff, "seq_aux": router.balancing == "seq_aux_loss"}
    return config


def _deepseek_v4(shape: ModelShape) -> Json:
    """Keys that other families have as well, and their own; `topk_method` and the like have no other value."""
    moe, compressed = _moe(shape), shape.compressed_attention
    assert compressed is not None
    kinds, layers, hashed = {ratio: kind for kind, ratio in POOLED.items()}, shape.num_layers, moe.router.hash_layers
    return _balanced(moe) | {
        "intermediate_size": moe.ffn_hidden_size,
        "num_key_value_heads": shape.num_query_groups,
        "n_shared_experts": moe.shared_expert_ffn_hidden_size // moe.ffn_hidden_size,
        "scoring_func": moe.router.score_function,
        "norm_topk_prob": moe.router.normalize_topk,
        "mlp_layer_types": ([HASHED] * hashed + [SCORED] * layers)[:layers],
        "layer_types": [kinds[ratio] for ratio in compressed.ratios],
        "partial_rotary_factor": shape.rotary_percent,
    }


def _gpt2(shape: ModelShape) -> Json:
    return {"activation_function": "gelu_new", "embd_pdrop": shape.hidden_dropout}


def _nemotron(shape: ModelShape) -> Json:
    assert shape.mamba is not None
    mamba = shape.mamba
    config: Json = {"layers_block_type": [LETTERS[letter] for letter in mamba.pattern]}
    if mamba.mtp_pattern is not None:
        config["mtp_layers_block_type"] = [LETTERS[letter] for letter in mamba.mtp_pattern]
    if shape.moe is None:
        return config
    routed = _routed_as_deepseek(replace(shape.moe, shared_expert_ffn_hidden_size=0))
    unsaid_there = ("n_shared_experts", "first_k_dense_replace", "aux_loss_alpha", "seq_aux")
    return config | {name: value for name, value in routed.items() if name not in unsaid_there}


def _moe(shape: ModelShape) -> MoeShape:
    assert shape.moe is not None
    return shape.moe


def _mla(shape: ModelShape) -> MlaShape:
    assert shape.mla is not None
    return shape.mla


_OF_FAMILY: Mapping[str, Callable[[ModelShape], Json]] = {
    "gpt2": _gpt2,
    "nemotron_h": _nemotron,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
    "glm4_moe": _glm,
    "llama4_text": _llama4,
    "minimax_m2": _minimax,
    "phi3": _phi,
    "olmo3": _olmo,
    "lfm2": _lfm2,
    "qwen2_moe": _qwen_moe,
    "qwen3_moe": _qwen_moe,
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _qwen_next),
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gemma4_text": _gemma4,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "deepseek_v32": _deepseek,
    "glm_moe_dsa": _deepseek,
    "deepseek_v4": _deepseek_v4,
}
