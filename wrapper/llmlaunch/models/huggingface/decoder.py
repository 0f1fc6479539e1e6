"""What config.json says of a decoder in nearly every family."""

from __future__ import annotations

from typing import Any

from llmlaunch.documents.validate import BadKey
from llmlaunch.models.huggingface.keys import DECODER, read_keys
from llmlaunch.models.huggingface.reader import ConfigReader, rope
from llmlaunch.models.shape import ModelShape

__all__ = ["NO_BIAS", "auxiliary", "coefficient", "decoder", "only_if_given", "silu_decoder"]

NO_BIAS = "biases of attention alone are not supported: must be false"


def decoder(reader: ConfigReader, activation: str = "hidden_act") -> ModelShape:
    """Return the shape that all families but GPT-2 begin with: gated MLPs, RMSNorm, rotary positions. Raises BadKey."""
    values = read_keys(reader, DECODER)
    base, scaling = rope(reader)
    if activation == "hidden_activation":
        reader.only(activation, "gelu_pytorch_tanh", why="only gelu_pytorch_tanh is supported")
    return ModelShape(name="", **values, rotary_base=base, rope_scaling=scaling)


def silu_decoder(reader: ConfigReader) -> ModelShape:
    """The same, with SwiGLU alone."""
    reader.only("hidden_act", "silu", why="only silu (SwiGLU) is supported")
    return decoder(reader)


def auxiliary(reader: ConfigReader) -> dict[str, Any]:
    """Return the keys of a router that say the class's auxiliary loss."""
    weight = coefficient(reader, "router_aux_loss_coef")
    return {"balancing": "aux_loss" if weight else "none", "aux_loss_coeff": weight}


def coefficient(reader: ConfigReader, key: str) -> float:
    """Return a weight that is no less than 0. Raises BadKey."""
    value = reader.number(key)
    if value < 0:
        raise BadKey((key,), f"must be at least 0, not {value}")
    return value


def only_if_given(reader: ConfigReader, key: str, value: str | int | None) -> None:
    """Raise BadKey where `key` is written with another value."""
    if key in reader.values:
        reader.only(key, value, why=f"only {value} is supported")
