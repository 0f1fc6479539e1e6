"""Rotary positions of config.json (transformers/modeling_rope_utils.py, 5.23): read, and written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmlaunch.documents.validate import BadKey
from llmlaunch.families.config_keys import ConfigKey
from llmlaunch.families.reader import LARGEST, ConfigReader, as_number, short
from llmlaunch.families.windows import FULL, WINDOWED
from llmlaunch.models.shape import ModelShape, RopeScaling

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
