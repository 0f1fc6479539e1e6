"""Llama 2 to 3.3 (transformers/models/llama, 5.23)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmlaunch.documents.validate import BadKey
from llmlaunch.families.config_keys import DECODER
from llmlaunch.families.decoder import OLD_CLASS, silu_decoder
from llmlaunch.families.family import Family
from llmlaunch.families.reader import ConfigReader
from llmlaunch.models.shape import ModelShape


def read(reader: ConfigReader) -> ModelShape:
    if reader.values.get("sliding_window") is not None:
        raise BadKey(("sliding_window",), "Llama has no sliding windows; remove it")
    bias = reader.flag("attention_bias")
    if bias != reader.flag("mlp_bias"):
        raise BadKey(("attention_bias",), "attention_bias and mlp_bias must be both true or both false here")
    return replace(silu_decoder(reader), linear_bias=bias)


def write(shape: ModelShape) -> dict[str, Any]:
    return {"attention_bias": shape.linear_bias, "mlp_bias": shape.linear_bias}


FAMILY = Family(
    read=read,
    write=write,
    keys=DECODER,
    defaults={**OLD_CLASS, "mlp_bias": False},
    mark=lambda shape: True,
    precedence=-1,
    whole_heads=True,
)
