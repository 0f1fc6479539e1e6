"""What a config.json of Gemma 4's text models means (transformers/models/gemma4, 5.23)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmlaunch.documents.validate import BadKey
from llmlaunch.models.huggingface.decoder import NO_BIAS, decoder
from llmlaunch.models.huggingface.keys import GEMMA4_KEYS, read_keys
from llmlaunch.models.huggingface.reader import FULL, WINDOWED, ConfigReader, alternating_window, as_number, rope, short
from llmlaunch.models.shape import ModelShape

__all__ = ["gemma4"]


PROPORTIONAL = "proportional"  # turns the first columns of a head by the frequencies of all of it
FULL_EVERY, FULL_TURNED = 6, 0.25  # where a file does not say
NONE_OF = {
    "hidden_size_per_layer_input": "embeddings of every layer are not supported",
    "num_kv_shared_layers": "layers that share keys and values are not supported",
}


def gemma4(reader: ConfigReader) -> ModelShape:
    """Layers that see everything have wider heads, fewer keys and, where `attention_k_eq_v`, no values of their own.
    Scores are not scaled; norms multiply by their weight."""
    reader.only("attention_bias", False, why=NO_BIAS)
    reader.only("enable_moe_block", False, None, why="experts beside a dense MLP are not supported: must be false")
    if reader.get("use_bidirectional_attention") == "all":
        raise BadKey(("use_bidirectional_attention",), "only causal attention is supported; set it to null")
    for key, why in NONE_OF.items():
        if reader.get(key):
            raise BadKey((key,), f"{why}: must be 0, not {short(reader.get(key))}")
    turned, positions = _full_positions(reader)
    reader.values = {**reader.values, **positions}
    local, scaled = rope(reader, WINDOWED)
    if scaled is not None:
        raise BadKey(("rope_parameters",), "scaled positions in windowed layers are not supported")
    shape, window = decoder(reader, "hidden_activation"), alternating_window(reader, FULL_EVERY, local)
    if window is None or not window.full_every or shape.num_layers % window.full_every:
        raise BadKey(("layer_types",), f"the last layer must be of {FULL}, and others in even distances before it")
    values = read_keys(reader, GEMMA4_KEYS)
    width, groups = _full_heads(reader)
    window = replace(
        window,
        full_head_dim=width,
        full_query_groups=groups if values["keys_are_values"] else None,
        full_rotary_percent=turned,
    )
    return replace(
        shape,
        activation="gelu",
        qk_layernorm=True,
        value_norm=True,
        **values,
        post_norms=True,
        scaled_embedding=True,
        attention_scale=1.0,
        sliding_window=window,
    )


def _full_heads(reader: ConfigReader) -> tuple[int, int | None]:
    """Return the width and the key/value heads of layers that see everything, also where the file has them layer by
    layer, as the class writes it."""
    layers = reader.group("per_layer_config")
    if layers is None:
        groups = reader.get("num_global_key_value_heads")
        return reader.size("global_head_dim"), None if groups is None else reader.size("num_global_key_value_heads")
    each = list(layers.values())
    if not isinstance(each[0], Mapping) or any(one != each[0] for one in each):
        raise BadKey(("per_layer_config",), "all layers that see everything must have the same heads")
    heads = ConfigReader(each[0], {}, {})
    groups = heads.get("num_key_value_heads")
    return heads.size("head_dim"), None if groups is None else heads.size("num_key_value_heads")


def _full_positions(reader: ConfigReader) -> tuple[float, dict[str, Any]]:
    """Return the share of a head that is turned in layers that see everything, and the rest of their parameters."""
    parameters = reader.group("rope_parameters")
    if parameters is None:
        return FULL_TURNED, {}
    full = parameters.get(FULL) or {}
    if not isinstance(full, Mapping) or full.get("rope_type", "default") not in ("default", PROPORTIONAL):
        raise BadKey(("rope_parameters",), f"layers of {FULL} must have positions of {PROPORTIONAL} or default")
    share = as_number("partial_rotary_factor", full.get("partial_rotary_factor", 1.0), above=0.0)
    plain = {name: value for name, value in full.items() if name not in ("rope_type", "partial_rotary_factor")}
    return min(share, 1.0), {"rope_parameters": {**parameters, FULL: plain}}
