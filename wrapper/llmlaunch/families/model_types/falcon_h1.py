"""Falcon-H1 (transformers/models/falcon_h1, 5.23): in every layer a Mamba-2 mixer beside attention, an MLP behind both,
and constants that multiply nearly every tensor."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

from llmlaunch.documents.validate import BadKey
from llmlaunch.families.decoder import COMMON, silu_decoder
from llmlaunch.families.family import DECODER, ConfigKey, ConfigReader, Family, constant, read_keys, short, up_to
from llmlaunch.models.sections import BESIDE_ATTENTION, Mamba
from llmlaunch.models.shape import ModelShape, Multipliers

BIASES = ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias")


def _inner_width(reader: ConfigReader) -> int:
    """Return the columns of all heads of a mixer."""
    return reader.size("mamba_d_ssm", otherwise=reader.size("mamba_expand") * reader.size("hidden_size"))


def _head_dim(reader: ConfigReader, key: str) -> int:
    """Return the width of a mixer's head, which all of them share with the columns there are."""
    inner, heads = _inner_width(reader), reader.size("mamba_n_heads")
    width = inner // heads if reader.get(key) in (None, "auto") else reader.size(key)
    if width * heads != inner:
        raise BadKey(("mamba_d_ssm",), f"must be mamba_n_heads x mamba_d_head, {heads} x {width}, not {inner}")
    return width


MIXERS = (
    ConfigKey("mamba_n_heads", "mamba.num_heads"),
    ConfigKey("mamba_d_head", "mamba.head_dim", _head_dim),
    ConfigKey("mamba_d_state", "mamba.state_size"),
    ConfigKey("mamba_n_groups", "mamba.groups"),
    ConfigKey("mamba_d_conv", "mamba.convolution_kernel", lambda reader, key: reader.size(key, least=2, largest=64)),
    ConfigKey("mamba_conv_bias", "mamba.convolution_bias", ConfigReader.flag),
    ConfigKey("mamba_chunk_size", "mamba.chunk", up_to(2**16)),
    ConfigKey("mamba_rms_norm", "mamba.gated_norm", ConfigReader.flag),
)
CONSTANTS = (
    ConfigKey("embedding_multiplier", "multipliers.embedding", constant),
    ConfigKey("lm_head_multiplier", "multipliers.logits", constant),
    ConfigKey("key_multiplier", "multipliers.keys", constant),
    ConfigKey("attention_in_multiplier", "multipliers.attention_input", constant),
    ConfigKey("attention_out_multiplier", "multipliers.attention_output", constant),
    ConfigKey("ssm_in_multiplier", "multipliers.mamba_input", constant),
    ConfigKey("ssm_out_multiplier", "multipliers.mamba_output", constant),
)


def read(reader: ConfigReader) -> ModelShape:
    """The class multiplies by 1, too. Its kernel norms behind the gate whatever `mamba_norm_before_gate` says."""
    for key in BIASES:
        reader.only(key, False, why="biases of linear layers are not supported: must be false")
    if reader.values.get("mamba_norm_before_gate") and reader.flag("mamba_rms_norm"):
        raise BadKey(("mamba_norm_before_gate",), "the kernel of mamba-ssm norms behind the gate: must be false")
    if reader.values.get("time_step_limit") not in (None, [0.0, inf]):
        raise BadKey(("time_step_limit",), "steps without a limit alone are supported; remove it")
    shape = silu_decoder(reader)
    gate, mlp_output = _constants(reader, "mlp_multipliers", 2)
    parts = _constants(reader, "ssm_multipliers", 5)
    constants = Multipliers(**read_keys(reader, CONSTANTS), mamba_parts=parts, gate=gate, mlp_output=mlp_output)
    mamba = Mamba(pattern=BESIDE_ATTENTION * shape.num_layers, **read_keys(reader, MIXERS))
    return replace(shape, mamba=mamba, multipliers=constants)


def _constants(reader: ConfigReader, key: str, count: int) -> tuple[float, ...]:
    """Return so many numbers above 0; ones where the file has none."""
    values = reader.get(key)
    if values is None:
        return (1.0,) * count
    if not isinstance(values, list) or len(values) != count:
        raise BadKey((key,), f"must be a list of {count} numbers, not {short(values)}")
    return tuple(constant(ConfigReader({key: value}, {}, {}), key) for value in values)


def write(shape: ModelShape) -> dict[str, Any]:
    mamba, constants = shape.mamba, shape.multipliers
    assert mamba is not None
    assert constants is not None
    return {
        "mamba_d_ssm": mamba.num_heads * mamba.head_dim,
        "mamba_norm_before_gate": False,
        "mlp_multipliers": [constants.gate, constants.mlp_output],
        "ssm_multipliers": None if constants.mamba_parts is None else list(constants.mamba_parts),
    }


FAMILY = Family(
    read=read,
    write=write,
    keys=(*DECODER, *MIXERS, *CONSTANTS),
    defaults={
        **COMMON,
        "vocab_size": 128000,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "head_dim": None,
        **dict.fromkeys(BIASES, False),
        "mamba_d_ssm": 1024,
        "mamba_expand": 2,
        "mamba_n_heads": 128,
        "mamba_d_head": None,
        "mamba_d_state": 256,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_conv_bias": True,
        "mamba_chunk_size": 256,
        "mamba_rms_norm": False,
        **dict.fromkeys((row.key for row in CONSTANTS), 1.0),
        "mlp_multipliers": None,
        "ssm_multipliers": None,
    },
    other_keys={
        "mamba.pattern": "num_hidden_layers",
        "multipliers.gate": "mlp_multipliers",
        "multipliers.mlp_output": "mlp_multipliers",
        "multipliers.mamba_parts": "ssm_multipliers",
    },
    needs=("mamba", "multipliers"),
    mark=lambda shape: shape.mamba is not None and BESIDE_ATTENTION in shape.mamba.pattern,
    precedence=240,
    has_plain_plan=False,
)
