"""A model family of Hugging Face: how its config.json is read and written, how its class differs from others; typed
access to the values of a config.json; and keys that are one field of a shape: one row each, by which the key is read
and written (transformers 4.53 to 5.23), and the rows that most decoders have.

What several keys say together, such as the layers with a window, is a pair of functions beside the families.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Any

from llmlaunch.documents.validate import BadKey
from llmlaunch.frozen import frozen
from llmlaunch.models.shape import ModelShape
from llmlaunch.rundir.values import shortened

LARGEST = 2**28


class ConfigReader:
    """Values by key, checked; remembers which defaults were taken and what was left out, for the notes.

    Every method raises `BadKey` naming the key whose value is not of its kind.
    """

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], aliases: Mapping[str, str]) -> None:
        named = {key: values[alias] for alias, key in aliases.items() if alias in values}
        self.values: Mapping[str, Any] = {**named, **values}
        self.defaults = defaults
        self.taken: dict[str, Any] = {}
        self.remarks: list[str] = []

    def get(self, key: str) -> Any:
        """Return the value as it stands, or the default."""
        if key in self.values:
            return self.values[key]
        default = self.defaults.get(key)
        if default is not None:
            self.taken[key] = default
        return default

    def size(self, key: str, otherwise: int | None = None, least: int = 1, largest: int = LARGEST) -> int:
        """Return a whole number; `otherwise` if the value is null."""
        value = self.get(key)
        if value is None and otherwise is not None:
            self.taken[key] = otherwise
            return otherwise
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= largest:
            raise BadKey((key,), f"must be a whole number from {least} to {largest}, not {short(value)}")
        return value

    def number(self, key: str, above: float = -math.inf) -> float:
        return as_number(key, self.get(key), above)

    def optional_number(self, key: str) -> float | None:
        """Return a number above 0, or None for null."""
        return None if self.get(key) is None else self.number(key, above=0.0)

    def rate(self, key: str) -> float:
        value = 0.0 if self.get(key) is None else self.number(key)
        if not 0 <= value < 1:
            raise BadKey((key,), f"must be at least 0 and below 1, not {short(value)}")
        return value

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool):
            raise BadKey((key,), f"must be true or false, not {short(value)}")
        return value

    def only(self, key: str, *allowed: Any, why: str) -> None:
        """Raise BadKey for any value that is not in `allowed`."""
        value = self.get(key)
        if not any(value == choice and type(value) is type(choice) for choice in allowed):
            raise BadKey((key,), f"{why}, not {short(value)}")

    def group(self, key: str) -> Mapping[str, Any] | None:
        """Return a mapping; None if it is absent, null or empty."""
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise BadKey((key,), f"must be an object, not {short(value)}")
        return value or None

    def remark(self, sentence: str) -> None:
        """Add a note about what this config means here."""
        self.remarks.append(sentence)

    def notes(self) -> tuple[str, ...]:
        if not self.taken:
            return tuple(self.remarks)
        listed = ", ".join(f"{key}={value}" for key, value in sorted(self.taken.items()))
        first = f"absent from config.json, taken from the defaults of its class in transformers: {listed}"
        return (first, *self.remarks)


def as_number(key: str, value: Any, above: float = -math.inf) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) <= 1e15:
        raise BadKey((key,), f"must be a finite number, not {short(value)}")
    if value <= above:
        raise BadKey((key,), f"must be above {above:g}, not {short(value)}")
    return float(value)


def short(value: Any) -> str:
    """Return a value as it stands in the file, cut to a length that fits a sentence."""
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError):
        text = "what it is"
    return shortened(text)


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


@frozen
class VisionClass:
    """A class of models with a vision encoder before the decoder of a family, by its `model_type`."""

    model_type: str
    deepstack: bool = False
    """Whether blocks in the middle of the encoder have projectors into the decoder's first layers."""
    text_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `text_config` whose defaults are not those of the family."""
    text_values: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the family that this class has one value for, and no key."""


@frozen
class Family:
    """A family of Transformers: models of one `model_type` (transformers 4.53 to 5.23)."""

    read: Callable[[ConfigReader], ModelShape]
    """Returns the shape of a config.json. Raises BadKey for anything that is not exactly so."""
    keys: tuple[ConfigKey, ...]
    """Keys of config.json that are one field of a shape."""
    defaults: Mapping[str, Any]
    """What the configuration class takes for a key that a config.json leaves out; None for a value that follows from
    others. Keys that decide neither shape nor arithmetic (special tokens, initializer_range, caches) are not here."""
    write: Callable[[ModelShape], dict[str, Any]] | None = None
    """Returns what a config.json has beside the rows of `keys` and the rotary positions."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of keys that the class takes (its attribute_map)."""
    other_keys: Mapping[str, str] = field(default_factory=dict)
    """The key that messages name for a field of a shape that has no row."""
    needs: tuple[str, ...] = ()
    """Sections of a shape without which the family cannot be written."""
    same: tuple[str, ...] = ()
    """Other model_types whose classes are this one to the letter."""
    vision: VisionClass | None = None
    """The class with a vision encoder before this decoder."""
    mark: Callable[[ModelShape], bool] | None = None
    """Whether a shape that names no family is taken for one of this family; None = never."""
    precedence: int = 0
    """Among families whose `mark` a shape has, the one with the highest precedence is taken."""
    has_rotary: bool = True
    balances_experts: bool = True
    """Whether the class has a loss or a bias update that keeps experts evenly used."""
    fuses_linears: bool = False
    """Whether the class has one linear for queries, keys and values, and one for gate and up."""
    gathered_mixture: bool = False
    """Whether DeepSpeed gathers the mixture of the class as one module (deepspeed/runtime/zero/leaf_module_config.py
    DEFAULT_LEAF_MODULE_CLASSES, 0.19.8)."""
    wide_norms: bool = False
    """Whether norms of the class keep what they normalized in fp32, before they multiply by their weight."""
    torch_norms: bool = False
    """Whether norms of the class are torch's own, which keep nothing beside their input, and its activation is written
    out."""
    one_projection: bool = False
    """Whether queries, keys and values come of one linear that the backward pass keeps whole, and heads lie apart."""
    wide_router: bool = False
    """Whether the router of the class computes in fp32."""
    whole_sequences: bool = False
    """Whether layers of the class read the tokens before their own, which no split of DeepSpeed's passes on."""
    has_plain_plan: bool = True
    """Whether the tensor-parallel plan of the class has the styles alone that DeepSpeed's AutoTP takes."""
    whole_heads: bool = False
    """Whether the class refuses a hidden_size that its heads do not divide, even where head_dim is given
    (validate_architecture, 5.23)."""
    plain_mixture: Mapping[str, Any] | None = None
    """Fields of a plain mixture with dense layers that change where this class builds it: no plainer class can."""
