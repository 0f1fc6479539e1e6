"""Seed-OSS (transformers/models/seed_oss, 5.23): biases on queries, keys and values, and dropout on what attention and
the MLP add to the residual stream. The embedding has no dropout, and is priced as if it had."""

from __future__ import annotations

from dataclasses import replace

from llmlaunch.families.decoder import COMMON, silu_decoder
from llmlaunch.families.family import DECODER, ConfigKey, ConfigReader, Family, read_keys
from llmlaunch.models.shape import ModelShape

KEYS = (
    ConfigKey("attention_bias", "qkv_bias", ConfigReader.flag),
    ConfigKey("residual_dropout", "hidden_dropout", ConfigReader.rate),
)


def read(reader: ConfigReader) -> ModelShape:
    for key in ("attention_out_bias", "mlp_bias"):
        reader.only(key, False, why="only queries, keys and values have biases here: must be false")
    return replace(silu_decoder(reader), **read_keys(reader, KEYS))


FAMILY = Family(
    read=read,
    keys=(*DECODER, *KEYS),
    defaults={
        **COMMON,
        "vocab_size": 155136,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 80,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "attention_bias": True,
        "attention_out_bias": False,
        "attention_dropout": 0.1,
        "residual_dropout": 0.1,
        "mlp_bias": False,
    },
)
