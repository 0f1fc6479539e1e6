"""What a config.json of Gemma 4's text models means (transformers/models/gemma4, 5.23)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmlaunch.documents.validate import BadKey
from llmlaunch.families.decoder import (
    COMMON,
    FULL,
    NO_BIAS,
    WINDOWED,
    alternating_window,
    decoder,
    windowed_base,
    written_windows,
)
from llmlaunch.families.family import DECODER, ConfigKey, ConfigReader, Family, as_number, read_keys, short
from llmlaunch.families.gemma_norms import ACTIVATION, CAPPED_LOGITS
from llmlaunch.models.shape import ModelShape

KEYS = (ConfigKey("attention_k_eq_v", "keys_are_values", ConfigReader.flag), CAPPED_LOGITS)
PROPORTIONAL = "proportional"  # turns the first columns of a head by the frequencies of all of it
FULL_EVERY, FULL_TURNED = 6, 0.25  # where a file does not say
NONE_OF = {
    "hidden_size_per_layer_input": "embeddings of every layer are not supported",
    "num_kv_shared_layers": "layers that share keys and values are not supported",
}


def read(reader: ConfigReader) -> ModelShape:
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
    local = windowed_base(reader)
    shape, window = decoder(reader, "hidden_activation"), alternating_window(reader, FULL_EVERY, local)
    if window is None or not window.full_every or shape.num_layers % window.full_every:
        raise BadKey(("layer_types",), f"the last layer must be of {FULL}, and others in even distances before it")
    values = read_keys(reader, KEYS)
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


def write(shape: ModelShape) -> dict[str, Any]:
    window, full = shape.sliding_window, {"rope_type": PROPORTIONAL, "rope_theta": shape.rotary_base}
    config = {
        **written_windows(shape),
        "hidden_activation": ACTIVATION,
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


FAMILY = Family(
    read=read,
    write=write,
    keys=(*DECODER, *KEYS),
    defaults={
        **COMMON,
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": ACTIVATION,
        "hidden_act": None,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "attention_bias": False,
        "sliding_window": 512,
        "layer_types": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": None,
        "hidden_size_per_layer_input": 256,
        "attention_k_eq_v": False,
        "num_kv_shared_layers": 0,
        "enable_moe_block": False,
        "global_head_dim": 512,
        "num_global_key_value_heads": None,
    },
    mark=lambda shape: shape.value_norm or shape.keys_are_values,
    precedence=170,
    wide_norms=True,
    has_plain_plan=False,
)
