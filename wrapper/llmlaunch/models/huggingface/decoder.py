"""What config.json says of a decoder in nearly every family."""

from __future__ import annotations

from typing import Any

from llmlaunch.documents.validate import BadKey
from llmlaunch.models.huggingface.reader import ConfigReader, rope
from llmlaunch.models.shape import ModelShape

__all__ = ["MOST_LAYERS", "NO_BIAS", "auxiliary", "coefficient", "decoder", "only_if_given", "silu_decoder"]

MOST_LAYERS = 10_000
NO_BIAS = "biases of attention alone are not supported: must be false"


def decoder(reader: ConfigReader, activation: str = "hidden_act") -> ModelShape:
    """Return the shape that all families but GPT-2 begin with: gated MLPs, RMSNorm, rotary positions. Raises BadKey."""
    hidden, heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    base, scaling = rope(reader)
    tanh = activation == "hidden_activation"
    if tanh:
        reader.only(activation, "gelu_pytorch_tanh", why="only gelu_pytorch_tanh is supported")
    return ModelShape(
        name="",
        num_layers=reader.size("num_hidden_layers", largest=MOST_LAYERS),
        hidden_size=hidden,
        ffn_hidden_size=reader.size("intermediate_size"),
        num_attention_heads=heads,
        num_query_groups=reader.size("num_key_value_heads", otherwise=heads),
        head_dim=_head_dim(reader, hidden, heads),
        vocab_size=reader.size("vocab_size"),
        max_position_embeddings=reader.size("max_position_embeddings"),
        tied_embeddings=reader.flag("tie_word_embeddings"),
        rotary_base=base,
        rope_scaling=scaling,
        attention_dropout=reader.rate("attention_dropout"),
        norm_epsilon=reader.number("rms_norm_eps", above=0.0),
    )


def silu_decoder(reader: ConfigReader) -> ModelShape:
    """The same, with SwiGLU alone."""
    reader.only("hidden_act", "silu", why="only silu (SwiGLU) is supported")
    return decoder(reader)


def _head_dim(reader: ConfigReader, hidden: int, heads: int) -> int:
    if reader.get("head_dim") is not None:
        return reader.size("head_dim")
    if hidden % heads:
        raise BadKey(
            ("num_attention_heads",),
            f"hidden_size {hidden} is not divisible by {heads} heads; give head_dim, or a number that divides it",
        )
    return hidden // heads


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
