"""Typed access to the values of a config.json, with the defaults of its class; rotary positions and sliding windows
(transformers/modeling_rope_utils.py, 5.23)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from llmlaunch.documents.validate import BadKey
from llmlaunch.models.shape import RopeScaling, SlidingWindow
from llmlaunch.rundir.values import shortened

__all__ = [
    "ConfigReader",
    "alternating_window",
    "linear_layers",
    "no_window",
    "rope",
    "rotary_percent",
    "short",
    "whole_window",
]

LARGEST = 2**28


class ConfigReader:
    """Values by key, checked; remembers which defaults were taken and what was left out, for the notes.

    Every method raises `BadKey` naming the key whose value is not of its kind.
    """

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], aliases: Mapping[str, str]) -> None:
        named = {key: values[alias] for alias, key in aliases.items() if alias in values}
        self.values: Mapping[str, Any] = {**named, **values}
        self.defaults = defaults
        self.taken: dict[str, Any] = {}
        self.remarks: list[str] = []

    def get(self, key: str) -> Any:
        """Return the value as it stands, or the default."""
        if key in self.values:
            return self.values[key]
        default = self.defaults.get(key)
        if default is not None:
            self.taken[key] = default
        return default

    def size(self, key: str, otherwise: int | None = None, least: int = 1, largest: int = LARGEST) -> int:
        """Return a whole number; `otherwise` if the value is null."""
        value = self.get(key)
        if value is None and otherwise is not None:
            self.taken[key] = otherwise
            return otherwise
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= largest:
            raise BadKey((key,), f"must be a whole number from {least} to {largest}, not {short(value)}")
        return value

    def number(self, key: str, above: float = -math.inf) -> float:
        return as_number(key, self.get(key), above)

    def optional_number(self, key: str) -> float | None:
        """Return a number above 0, or None for null."""
        return None if self.get(key) is None else self.number(key, above=0.0)

    def rate(self, key: str) -> float:
        value = 0.0 if self.get(key) is None else self.number(key)
        if not 0 <= value < 1:
            raise BadKey((key,), f"must be at least 0 and below 1, not {short(value)}")
        return value

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool):
            raise BadKey((key,), f"must be true or false, not {short(value)}")
        return value

    def only(self, key: str, *allowed: Any, why: str) -> None:
        """Raise BadKey for any value that is not in `allowed`."""
        value = self.get(key)
        if not any(value == choice and type(value) is type(choice) for choice in allowed):
            raise BadKey((key,), f"{why}, not {short(value)}")

    def group(self, key: str) -> Mapping[str, Any] | None:
        """Return a mapping; None if it is absent, null or empty."""
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise BadKey((key,), f"must be an object, not {short(value)}")
        return value or None

    def remark(self, sentence: str) -> None:
        """Add a note about what this config means here."""
        self.remarks.append(sentence)

    def notes(self) -> tuple[str, ...]:
        if not self.taken:
            return tuple(self.remarks)
        listed = ", ".join(f"{key}={value}" for key, value in sorted(self.taken.items()))
        first = f"absent from config.json, taken from the defaults of its class in transformers: {listed}"
        return (first, *self.remarks)


def as_number(key: str, value: Any, above: float = -math.inf) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) <= 1e15:
        raise BadKey((key,), f"must be a finite number, not {short(value)}")
    if value <= above:
        raise BadKey((key,), f"must be above {above:g}, not {short(value)}")
    return float(value)


def short(value: Any) -> str:
    """Return a value as it stands in the file, cut to a length that fits a sentence."""
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError):
        text = "what it is"
    return shortened(text)


FULL, WINDOWED, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LINEAR = "linear_attention"
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


def no_window(reader: ConfigReader) -> None:
    """Raise BadKey if windows are on; Qwen has them off unless `use_sliding_window` is true, in no published model."""
    kinds = reader.values.get("layer_types") or []
    if not isinstance(kinds, list):
        raise BadKey(("layer_types",), f"must be a list, not {short(kinds)}")
    if reader.flag("use_sliding_window") or WINDOWED in kinds:
        raise BadKey(
            ("use_sliding_window",),
            "windows in some of Qwen's layers are not supported; set it to false for full attention",
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
    layers, kinds = reader.size("num_hidden_layers", largest=10_000), reader.get("layer_types")
    if kinds is not None:
        full_every = _every(kinds, layers, WINDOWED)
    if reader.get("sliding_window") is None or full_every == 1:
        return None
    _remark(reader)
    return SlidingWindow(reader.size("sliding_window"), full_every if full_every <= layers else 0, rotary_base)


def linear_layers(reader: ConfigReader) -> int:
    """Return the period of layers with full attention among those with linear attention; 0 if there are none."""
    layers, kinds = reader.size("num_hidden_layers", largest=10_000), reader.get("layer_types")
    every = reader.size("full_attention_interval") if kinds is None else _every(kinds, layers, LINEAR)
    return every if every <= layers else 0


def _every(kinds: Any, layers: int, other: str) -> int:
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
