"""Rotary positions and sliding windows of a config.json (transformers/modeling_rope_utils.py, 5.23)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmlaunch.documents.validate import BadKey
from llmlaunch.models.huggingface.reader import LARGEST, Reader, as_number, short
from llmlaunch.models.shape import RopeScaling, SlidingWindow

__all__ = ["alternating_window", "no_window", "rope", "whole_window"]

FULL, WINDOWED = "full_attention", "sliding_attention"
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


def rope(reader: Reader, layers: str = FULL) -> tuple[float, RopeScaling | None]:
    """(base, scaling) of the layers of kind `layers`. `rope_scaling` goes before `rope_parameters`, which may be one
    for each kind of layer; what neither says stands beside them."""
    key = "rope_scaling" if reader.values.get("rope_scaling") else "rope_parameters"
    told: Mapping[str, Any] = reader.group(key) or {}
    nested = told.get(layers)
    if nested is not None or any(kind in told for kind in (FULL, WINDOWED)):
        told = nested if isinstance(nested, Mapping) else {}
    elif layers == WINDOWED:
        told = {}  # scaling changes the layers that see everything
    of_kind = "rope_local_base_freq" if layers == WINDOWED else "rope_theta"
    value = told["rope_theta"] if told.get("rope_theta") is not None else reader.get(of_kind)
    base = as_number(of_kind, value, above=0.0)
    return base, _scaling(key, told)


def _scaling(key: str, told: Mapping[str, Any]) -> RopeScaling | None:
    kind = told.get("rope_type", told.get("type", "default"))
    if kind == "default":
        return None
    if kind not in _SCALINGS:
        known = ", ".join(_SCALINGS)
        raise BadKey((key,), f"rotary scaling {short(kind)} is not supported, {known} are; write the shape inline")
    if as_number(key, told.get("partial_rotary_factor", 1.0)) != 1.0:
        raise BadKey((key,), "partial_rotary_factor must be 1: positions turn the whole head here")
    values = {ours: as_number(key, told[name], 0.0) for name, ours in _NAMES.items() if told.get(name)}
    if "factor" not in values or values["factor"] < 1:
        raise BadKey((key,), f"factor must be a number of at least 1, not {short(told.get('factor'))}")
    longest = told.get("original_max_position_embeddings")
    if longest is not None and (not isinstance(longest, int) or not 1 <= longest <= LARGEST):
        raise BadKey((key,), f"original_max_position_embeddings must be a whole number, not {short(longest)}")
    truncate = told.get("truncate", True)
    return RopeScaling(str(kind), original_max_position_embeddings=longest, truncate=bool(truncate), **values)


def no_window(reader: Reader) -> None:
    """Qwen: windows are off unless `use_sliding_window` says so, which no published model does."""
    kinds = reader.values.get("layer_types") or []
    if reader.flag("use_sliding_window") or WINDOWED in kinds:
        raise BadKey(
            ("use_sliding_window",),
            "windows in some of Qwen's layers are not supported; set it to false for full attention",
        )


def whole_window(reader: Reader) -> SlidingWindow | None:
    """Mistral and Mixtral: all layers are windowed, or none."""
    if reader.get("sliding_window") is None:
        return None
    _remark(reader)
    return SlidingWindow(reader.size("sliding_window"))


def alternating_window(reader: Reader, full_every: int, rotary_base: float | None) -> SlidingWindow | None:
    """Gemma 2 and 3: every `full_every`-th layer attends to everything; `layer_types` may say so layer by layer."""
    layers, kinds = reader.size("num_hidden_layers", largest=10_000), reader.get("layer_types")
    if kinds is not None:
        full_every = _every(kinds, layers)
    if reader.get("sliding_window") is None or full_every == 1:
        return None
    _remark(reader)
    return SlidingWindow(reader.size("sliding_window"), full_every if full_every <= layers else 0, rotary_base)


def _every(kinds: Any, layers: int) -> int:
    """The period of layers with full attention; 0 = there are none."""
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise BadKey(("layer_types",), f"must name a kind for each of {layers} layers, not {short(kinds)}")
    every = kinds.index(FULL) + 1 if FULL in kinds else 0
    expected = [FULL if every and not (i + 1) % every else WINDOWED for i in range(layers)]
    if kinds != expected:
        raise BadKey(
            ("layer_types",),
            f"layers of {FULL} must stand in even distances among {WINDOWED}; write the shape inline, without windows, "
            "for an estimate that is not too low",
        )
    return every


def _remark(reader: Reader) -> None:
    reader.remark(
        "windowed layers are priced as if they attended to the whole sequence: no step is slower than said, and memory "
        "is the same with flash attention"
    )
