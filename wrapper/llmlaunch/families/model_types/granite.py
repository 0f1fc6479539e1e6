"""Granite 3 (transformers/models/granite, 5.23): Llama with constants that multiply the embedding, scores, what
attention and the MLP add to the residual stream, and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmlaunch.families.decoder import OLD_CLASS, biased_decoder, written_biases
from llmlaunch.families.family import DECODER, ConfigKey, ConfigReader, Family, constant, read_keys
from llmlaunch.models.shape import ModelShape, Multipliers

DIGITS = 9  # behind the point of a scale, so that its root and square are the same number

CONSTANTS = (
    ConfigKey("embedding_multiplier", "multipliers.embedding", constant),
    ConfigKey("residual_multiplier", "multipliers.residual", constant),
)


def read(reader: ConfigReader) -> ModelShape:
    """The class multiplies by 1, too, and divides logits."""
    shape = biased_decoder(reader)
    scale = round(constant(reader, "attention_multiplier") ** -2, DIGITS)
    constants = Multipliers(**read_keys(reader, CONSTANTS), logits=1.0 / constant(reader, "logits_scaling"))
    return replace(shape, attention_scale=None if scale == shape.head_dim else scale, multipliers=constants)


def write(shape: ModelShape) -> dict[str, Any]:
    constants = shape.multipliers or Multipliers()
    return {
        **written_biases(shape),
        "attention_multiplier": (shape.attention_scale or shape.head_dim) ** -0.5,
        "logits_scaling": 1.0 / (constants.logits or 1.0),
    }


FAMILY = Family(
    read=read,
    write=write,
    keys=(*DECODER, *CONSTANTS),
    defaults={
        **OLD_CLASS,
        "mlp_bias": False,
        "attention_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
    },
    other_keys={"attention_scale": "attention_multiplier", "multipliers.logits": "logits_scaling"},
    needs=("multipliers",),
    mark=lambda shape: shape.multipliers is not None and shape.multipliers.residual is not None,
    precedence=210,
)
