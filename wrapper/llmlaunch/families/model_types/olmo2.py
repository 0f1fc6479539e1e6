"""OLMo 2 (transformers/models/olmo2, 5.23): norms behind attention and MLP alone, and over all heads of queries and of
keys."""

from __future__ import annotations

from dataclasses import replace

from llmlaunch.families.decoder import NO_BIAS, OLD_CLASS, silu_decoder
from llmlaunch.families.family import DECODER, ConfigReader, Family
from llmlaunch.models.shape import ModelShape


def read(reader: ConfigReader) -> ModelShape:
    reader.only("attention_bias", False, why=NO_BIAS)
    return replace(silu_decoder(reader), qk_layernorm=True, qk_norm_of_all_heads=True, norms_after_alone=True)


FAMILY = Family(
    read=read,
    keys=DECODER,
    defaults={**OLD_CLASS, "vocab_size": 50304, "rms_norm_eps": 1e-5},
    wide_norms=True,
    has_plain_plan=False,
)
