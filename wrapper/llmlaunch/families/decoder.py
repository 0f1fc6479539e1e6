"""Reading a decoder that nearly every family has, and the defaults that most configuration classes share; its rotary
positions (transformers/modeling_rope_utils.py, 5.23), layers with a sliding window or of another kind at even distances
(`layer_types`), and mixtures whose experts are as wide as `intermediate_size`: read, and written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmlaunch.documents.validate import BadKey
from llmlaunch.families.family import (
    DECODER,
    LARGEST,
    MOST_LAYERS,
    ConfigKey,
    ConfigReader,
    as_number,
    read_keys,
    short,
)
from llmlaunch.models.shape import ModelShape, MoeShape, RopeScaling, Router, SlidingWindow

FULL, WINDOWED, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def no_window(reader: ConfigReader) -> None:
    """Raise BadKey if windows are on; Qwen has them off unless `use_sliding_window` is true, in no published model."""
    kinds = reader.values.get("layer_types") or []
    if not isinstance(kinds, list):
        raise BadKey(("layer_types",), f"must be a list, not {short(kinds)}")
    if reader.flag("use_sliding_window") or WINDOWED in kinds:
        raise BadKey(
            ("use_sliding_window",),
            "windows in some of the layers are not supported; set it to false for full attention",
        )


def whole_window(reader: ConfigReader) -> SlidingWindow | None:
    """Return the window of Mistral and Mixtral: all layers have it, or none."""
    if reader.get("sliding_window") is None:
        return None
    _remark(reader)
    return SlidingWindow(reader.size("sliding_window"))


def alternating_window(reader: ConfigReader, full_every: int, rotary_base: float | None) -> SlidingWindow | None:
    """Return the window of Gemma 2 and 3: every `full_every`-th layer attends to everything, unless `layer_types` lists
    each layer.
    """
    layers, kinds = reader.size("num_hidden_layers", largest=MOST_LAYERS), reader.get("layer_types")
    if kinds is not None:
        full_every = full_attention_period(kinds, layers, WINDOWED)
    if reader.get("sliding_window") is None or full_every == 1:
        return None
    _remark(reader)
    return SlidingWindow(reader.size("sliding_window"), full_every if full_every <= layers else 0, rotary_base)


def full_attention_period(kinds: Any, layers: int, other: str) -> int:
    """Return the period of layers with full attention among those of the `other` kind; 0 if there are none."""
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise BadKey(("layer_types",), f"must name a kind for each of {layers} layers, not {short(kinds)}")
    every = kinds.index(FULL) + 1 if FULL in kinds else 0
    expected = [FULL if every and not (i + 1) % every else other for i in range(layers)]
    if kinds != expected:
        inline = "; write the shape inline, without windows, for an estimate that is not too low"
        raise BadKey(
            ("layer_types",),
            f"layers of {FULL} must stand in even distances among {other}{inline if other == WINDOWED else ''}",
        )
    return every


def _remark(reader: ConfigReader) -> None:
    reader.remark(
        "layers with a window are timed by it with Megatron-LM, and as if they saw the whole sequence with DeepSpeed, "
        "where it is a mask; memory is the same with flash attention"
    )


def written_window(shape: ModelShape) -> dict[str, Any]:
    """Return the window that all layers have, or none."""
    return {"sliding_window": None if shape.sliding_window is None else shape.sliding_window.tokens}


def written_windows(shape: ModelShape) -> dict[str, Any]:
    """Return the window, which the class wants even where no layer has one, and the kind of each layer."""
    window = shape.sliding_window
    every = 1 if window is None else window.full_every
    kinds = [FULL if every and not (i + 1) % every else WINDOWED for i in range(shape.num_layers)]
    return {
        "sliding_window": shape.max_position_embeddings if window is None else window.tokens,
        "layer_types": kinds,
    }


_SCALINGS = ("linear", "llama3", "yarn")
_NAMES = {  # theirs -> ours
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "attention_factor": "attention_factor",
}


def rope(
    reader: ConfigReader, layers: str = FULL, of_windowed: str = "rope_local_base_freq"
) -> tuple[float, RopeScaling | None]:
    """(base, scaling) of the layers of kind `layers`. `rope_scaling` goes before `rope_parameters`, which may be one
    for each kind of layer; what neither says stands beside them, the base of windowed layers as `of_windowed`."""
    key = "rope_scaling" if reader.values.get("rope_scaling") else "rope_parameters"
    parameters: Mapping[str, Any] = reader.group(key) or {}
    nested = parameters.get(layers)
    if nested is not None or any(kind in parameters for kind in (FULL, WINDOWED)):
        parameters = nested if isinstance(nested, Mapping) else {}
    elif layers == WINDOWED:
        parameters = {}  # scaling changes the layers that see everything
    of_kind = of_windowed if layers == WINDOWED else "rope_theta"
    value = parameters["rope_theta"] if parameters.get("rope_theta") is not None else reader.get(of_kind)
    base = as_number(of_kind, value, above=0.0)
    return base, _scaling(key, parameters)


def rotary_percent(reader: ConfigReader) -> float:
    """Return the share of each head that is turned: among the rotary parameters, or beside them."""
    inside = {**(reader.group("rope_scaling") or {}), **(reader.group("rope_parameters") or {})}
    key = "partial_rotary_factor"
    share = as_number(key, inside[key] if key in inside else reader.get(key), above=0.0)
    if share > 1:
        raise BadKey((key,), f"must be at most 1, not {share:g}")
    return share


ROTARY_PERCENT = (ConfigKey("partial_rotary_factor", "rotary_percent", lambda reader, key: rotary_percent(reader)),)


def _scaling(key: str, parameters: Mapping[str, Any]) -> RopeScaling | None:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return None
    if kind not in _SCALINGS:
        supported = ", ".join(_SCALINGS)
        raise BadKey((key,), f"rotary scaling {short(kind)} is not supported, {supported} are; write the shape inline")
    if as_number(key, parameters.get("partial_rotary_factor", 1.0)) != 1.0:
        raise BadKey((key,), "partial_rotary_factor must be 1: positions turn the whole head here")
    values = {ours: as_number(key, parameters[name], 0.0) for name, ours in _NAMES.items() if parameters.get(name)}
    if "factor" not in values or values["factor"] < 1:
        raise BadKey((key,), f"factor must be a number of at least 1, not {short(parameters.get('factor'))}")
    longest = parameters.get("original_max_position_embeddings")
    if longest is not None and (type(longest) is not int or not 1 <= longest <= LARGEST):
        raise BadKey((key,), f"original_max_position_embeddings must be a whole number, not {short(longest)}")
    truncate = parameters.get("truncate", True)
    return RopeScaling(str(kind), original_max_position_embeddings=longest, truncate=bool(truncate), **values)


def windowed_base(reader: ConfigReader, key: str = "rope_local_base_freq") -> float:
    """Return the base of layers with a window, which stands in `key` beside the parameters. Raises BadKey where their
    positions are scaled."""
    base, scaled = rope(reader, WINDOWED, key)
    if scaled is not None:
        raise BadKey(("rope_parameters",), "scaled positions in windowed layers are not supported")
    return base


def local_base(shape: ModelShape) -> float:
    """Return the base of layers with a window in a shape."""
    window = shape.sliding_window
    return shape.rotary_base if window is None or window.rotary_base is None else window.rotary_base


def written_positions(shape: ModelShape) -> dict[str, Any]:
    """Return the keys of rotary positions that all layers have alike."""
    scaling = {} if shape.rope_scaling is None else {"rope_scaling": written_scaling(shape.rope_scaling)}
    return {"rope_theta": shape.rotary_base, **scaling}


def written_scaling(scaling: RopeScaling) -> dict[str, Any]:
    """Return the parameters of scaled positions, without those that are null."""
    of_kind: Mapping[str, dict[str, Any]] = {
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


NO_BIAS = "biases of attention alone are not supported: must be false"

COMMON: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
}
OLD_CLASS: Mapping[str, Any] = {
    **COMMON,
    "intermediate_size": 11008,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "head_dim": None,
    "attention_bias": False,
}
"""Defaults of the oldest classes, and of those that are made of them."""
WINDOWLESS: Mapping[str, Any] = {
    **COMMON,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
}
"""Defaults of classes that have windows in their files and in no published model."""


def without(values: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Return `values` without some keys, which a class does not have."""
    return {key: value for key, value in values.items() if key not in keys}


def decoder(reader: ConfigReader, activation: str = "hidden_act") -> ModelShape:
    """Return the shape that nearly all families begin with: gated MLPs, RMSNorm, rotary positions. Raises BadKey."""
    values = read_keys(reader, DECODER)
    base, scaling = rope(reader)
    if activation == "hidden_activation":
        reader.only(activation, "gelu_pytorch_tanh", why="only gelu_pytorch_tanh is supported")
    return ModelShape(name="", **values, rotary_base=base, rope_scaling=scaling)


def silu_decoder(reader: ConfigReader) -> ModelShape:
    """Return the same with SwiGLU. Raises BadKey for another activation."""
    reader.only("hidden_act", "silu", why="only silu (SwiGLU) is supported")
    return decoder(reader)


def biased_decoder(reader: ConfigReader) -> ModelShape:
    """Return a decoder with SwiGLU whose linear layers have biases, or none has. Raises BadKey."""
    bias = reader.flag("attention_bias")
    if bias != reader.flag("mlp_bias"):
        raise BadKey(("attention_bias",), "attention_bias and mlp_bias must be both true or both false here")
    return replace(silu_decoder(reader), linear_bias=bias)


def written_biases(shape: ModelShape) -> dict[str, Any]:
    """Return whether attention and MLP have biases."""
    return {"attention_bias": shape.linear_bias, "mlp_bias": shape.linear_bias}


def only_if_given(reader: ConfigReader, key: str, value: str | int | None) -> None:
    """Raise BadKey where `key` is written with another value."""
    if key in reader.values:
        reader.only(key, value, why=f"only {value} is supported")


def refuse_jitter(reader: ConfigReader) -> None:
    """Raise BadKey for noise on what a router sees."""
    if reader.number("router_jitter_noise") != 0:
        raise BadKey(("router_jitter_noise",), "noise on what the router sees is not supported; set it to 0")


TOPK = ConfigKey("num_experts_per_tok", "moe.topk")
LOCAL_EXPERTS = (
    ConfigKey("num_local_experts", "moe.num_experts"),
    TOPK,
    ConfigKey("intermediate_size", "moe.ffn_hidden_size"),
)


def local_experts(reader: ConfigReader, shape: ModelShape, router: Router) -> MoeShape:
    """Return a mixture in every layer of `shape`. Raises BadKey."""
    pattern = (1,) * shape.num_layers
    return MoeShape(**read_keys(reader, LOCAL_EXPERTS), layer_pattern=pattern, router=router)


def auxiliary(reader: ConfigReader) -> dict[str, Any]:
    """Return the keys of a router that say the class's auxiliary loss. Raises BadKey."""
    weight = coefficient(reader, "router_aux_loss_coef")
    return {"balancing": "aux_loss" if weight else "none", "aux_loss_coeff": weight}


def coefficient(reader: ConfigReader, key: str) -> float:
    """Return a weight that is no less than 0. Raises BadKey."""
    value = reader.number(key)
    if value < 0:
        raise BadKey((key,), f"must be at least 0, not {value}")
    return value


def mixture_of(shape: ModelShape) -> MoeShape:
    """Return the mixture of a shape that has one."""
    assert shape.moe is not None
    return shape.moe


def written_auxiliary(shape: ModelShape) -> dict[str, Any]:
    """Return the auxiliary loss of the classes that have one: computed where the router's logits are put out."""
    router = mixture_of(shape).router
    weight = router.aux_loss_coeff if router.balancing == "aux_loss" else 0.0
    return {"output_router_logits": weight > 0, "router_aux_loss_coef": weight}
