"""Llama 2 to 3.3 (transformers/models/llama, 5.23)."""

from __future__ import annotations

from llmlaunch.documents.validate import BadKey
from llmlaunch.families.decoder import OLD_CLASS, biased_decoder, written_biases
from llmlaunch.families.family import DECODER, ConfigReader, Family
from llmlaunch.models.shape import ModelShape


def read(reader: ConfigReader) -> ModelShape:
    if reader.values.get("sliding_window") is not None:
        raise BadKey(("sliding_window",), "Llama has no sliding windows; remove it")
    return biased_decoder(reader)


FAMILY = Family(
    read=read,
    write=written_biases,
    keys=DECODER,
    defaults={**OLD_CLASS, "mlp_bias": False},
    mark=lambda shape: True,
    precedence=-1,
    whole_heads=True,
)
