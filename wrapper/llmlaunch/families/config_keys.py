"""Keys of config.json that are one field of a shape: one row each, by which the key is read and written (transformers
4.53 to 5.23), and the rows that most decoders have.

What several keys say together, such as the layers with a window, is a pair of functions beside the families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from llmlaunch.documents.validate import BadKey
from llmlaunch.families.reader import ConfigReader
from llmlaunch.frozen import frozen
from llmlaunch.models.shape import ModelShape

MOST_LAYERS = 10_000
LEAST_CONSTANT, LARGEST_CONSTANT = 1e-4, 1e4


@frozen
class ConfigKey:
    """A key of config.json that is one field of a shape, dotted below its part: "mla.kv_lora_rank". `read` returns the
    field's value from a reader and the key; what is written is the field as it is."""

    key: str
    field: str
    read: Callable[[ConfigReader, str], Any] = ConfigReader.size


def read_keys(reader: ConfigReader, rows: Iterable[ConfigKey]) -> dict[str, Any]:
    """Return what the keys of some rows say, by the fields of their part. Raises BadKey."""
    return {row.field.rpartition(".")[2]: row.read(reader, row.key) for row in rows}


def written_keys(shape: ModelShape, rows: Iterable[ConfigKey]) -> dict[str, Any]:
    """Return the keys of some rows with their values in a shape; none of a part that the shape does not have."""
    values = {}
    for row in rows:
        part: Any = shape
        *parts, name = row.field.split(".")
        for each in parts:
            part = None if part is None else getattr(part, each)
        if part is not None:
            values[row.key] = getattr(part, name)
    return values


def keys_by_field(rows: Iterable[ConfigKey]) -> dict[str, str]:
    """Return the key of each field that has a row."""
    return {row.field: row.key for row in rows}


def up_to(largest: int) -> Callable[[ConfigReader, str], int]:
    """Return what reads a whole number from 1 to `largest`."""
    return lambda reader, key: reader.size(key, largest=largest)


def if_any(reader: ConfigReader, key: str) -> int | None:
    """Return a whole number, or None for null."""
    return None if reader.get(key) is None else reader.size(key)


def positive(reader: ConfigReader, key: str) -> float:
    """Return a number above 0."""
    return reader.number(key, above=0.0)


def constant(reader: ConfigReader, key: str) -> float:
    """Return a number that tensors are multiplied by, or divided by."""
    value = reader.number(key)
    if not LEAST_CONSTANT <= value <= LARGEST_CONSTANT:
        raise BadKey((key,), f"must be a number from {LEAST_CONSTANT:g} to {LARGEST_CONSTANT:g}, not {value:g}")
    return value


def query_groups(reader: ConfigReader, key: str) -> int:
    """Return the key/value heads: as many as query heads where the file has none."""
    return reader.size(key, otherwise=reader.size("num_attention_heads"))


def head_dim(reader: ConfigReader, key: str) -> int:
    """Return the width of a head: its own key's, else a head's share of the width."""
    if reader.get(key) is not None:
        return reader.size(key)
    hidden, heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    if hidden % heads:
        raise BadKey(
            ("num_attention_heads",),
            f"hidden_size {hidden} is not divisible by {heads} heads; give head_dim, or a number that divides it",
        )
    return hidden // heads


SIZES = (
    ConfigKey("hidden_size", "hidden_size"),
    ConfigKey("num_attention_heads", "num_attention_heads"),
    ConfigKey("intermediate_size", "ffn_hidden_size"),
    ConfigKey("num_key_value_heads", "num_query_groups", query_groups),
    ConfigKey("vocab_size", "vocab_size"),
    ConfigKey("max_position_embeddings", "max_position_embeddings"),
    ConfigKey("attention_dropout", "attention_dropout", ConfigReader.rate),
)
LAYERS = ConfigKey("num_hidden_layers", "num_layers", up_to(MOST_LAYERS))
DECODER = (
    *SIZES,
    ConfigKey("head_dim", "head_dim", head_dim),
    LAYERS,
    ConfigKey("tie_word_embeddings", "tied_embeddings", ConfigReader.flag),
    ConfigKey("rms_norm_eps", "norm_epsilon", positive),
)
QKV_BIAS = (ConfigKey("qkv_bias", "qkv_bias", ConfigReader.flag),)
NORMALIZED = ConfigKey("norm_topk_prob", "moe.router.normalize_topk", ConfigReader.flag)
SCALED = ConfigKey("routed_scaling_factor", "moe.router.scaling_factor", positive)


def decoder_without(*keys: str) -> tuple[ConfigKey, ...]:
    """Return the rows of a decoder but for those of keys that have another meaning in a family, or one value alone."""
    return tuple(row for row in DECODER if row.key not in keys)


MIXTURE_DECODER = decoder_without("intermediate_size")
"""Rows of a decoder whose intermediate_size is the width of an expert."""
