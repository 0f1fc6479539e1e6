"""A model shape from a Hugging Face `config.json`.

Only what this reads exactly is accepted: model types whose layers `ModelShape` can express, without quantisation
or sliding windows. A missing key takes the default of the model's own configuration class (transformers 5.23,
models/<type>/configuration_<type>.py), and the notes say which did.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from llmlaunch.documents.validate import BadKey
from llmlaunch.documents.yaml_strict import read_text
from llmlaunch.errors import UserError
from llmlaunch.models.schema import check_shape
from llmlaunch.models.shape import ModelShape, MoeShape

__all__ = ["SUPPORTED", "read_config", "shape_from_config"]

_LARGEST = 2**28

_COMMON = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
}
# the defaults of LlamaConfig, MistralConfig, MixtralConfig and Qwen2Config; None = as many as attention heads
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": _COMMON
    | {
        "intermediate_size": 11008,
        "num_key_value_heads": None,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "sliding_window": None,
    },
    "mistral": _COMMON
    | {
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
    },
    "mixtral": _COMMON
    | {
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen2": _COMMON
    | {
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "rope_theta": 10000.0,
        "use_sliding_window": False,
    },
}
SUPPORTED = tuple(_DEFAULTS)

_KEYS = {  # our name -> theirs, for messages about sizes that do not agree
    "num_query_groups": "num_key_value_heads",
    "head_dim": "head_dim",
    "moe.topk": "num_experts_per_tok",
}


def read_config(path: Path) -> tuple[ModelShape, tuple[str, ...]]:
    """The shape in a `config.json` (or in the folder that holds one), and the notes on what it left open.

    Raises `UserError` naming the file and the key for anything that is not such a file.
    """
    file = path / "config.json" if path.is_dir() else path
    values = _parse(read_text(file), file)
    name = str(values.get("_name_or_path") or "") or (path.name if path.is_dir() else path.parent.name or path.stem)
    try:
        return shape_from_config(values, _printable(name))
    except BadKey as error:
        key = _KEYS.get(".".join(map(str, error.key)), ".".join(map(str, error.key)))
        raise UserError(f"{file}: {key}: {error.problem}") from None


def shape_from_config(values: Mapping[str, Any], name: str) -> tuple[ModelShape, tuple[str, ...]]:
    """The shape a config describes. Raises `BadKey` naming the key it cannot use."""
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in _DEFAULTS:
        shown = "is missing" if model_type is None else f"{_short(model_type)} is not supported"
        raise BadKey(("model_type",), f"{shown}; supported: {', '.join(SUPPORTED)}; or write the shape inline")
    reader = _Reader(values, _DEFAULTS[model_type])
    _refuse_what_is_not_exact(reader, model_type)
    heads, hidden = reader.size("num_attention_heads"), reader.size("hidden_size")
    layers, ffn = reader.size("num_hidden_layers", largest=10_000), reader.size("intermediate_size")
    bias = model_type == "llama" and reader.flag("attention_bias")
    moe = None
    if model_type == "mixtral":
        experts, topk = reader.size("num_local_experts"), reader.size("num_experts_per_tok")
        moe = MoeShape(experts, topk, ffn, 0, (1,) * layers)
    shape = ModelShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=reader.size("num_key_value_heads", otherwise=heads),
        head_dim=_head_dim(reader, hidden, heads),
        vocab_size=reader.size("vocab_size"),
        max_position_embeddings=reader.size("max_position_embeddings"),
        tied_embeddings=reader.flag("tie_word_embeddings"),
        linear_bias=bias,
        qkv_bias=model_type == "qwen2",
        rotary_base=_rotary_base(reader),
        attention_dropout=reader.rate("attention_dropout"),
        moe=moe,
        family=model_type,
    )
    return check_shape(shape), reader.notes()


@dataclass
class _Reader:
    """Typed access to a config with the defaults of its class; remembers which defaults were taken."""

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.taken: dict[str, Any] = {}

    def get(self, key: str) -> Any:
        if key in self.values:
            return self.values[key]
        self.taken[key] = self.defaults.get(key)
        return self.taken[key]

    def size(self, key: str, otherwise: int | None = None, largest: int = _LARGEST) -> int:
        value = self.get(key)
        if value is None and otherwise is not None:
            self.taken[key] = otherwise
            return otherwise
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
            raise BadKey((key,), f"must be a whole number from 1 to {largest}, not {_short(value)}")
        return value

    def number(self, key: str, value: Any) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            raise BadKey((key,), f"must be a finite number, not {_short(value)}")
        return float(value)

    def rate(self, key: str) -> float:
        value = self.get(key)
        number = 0.0 if value is None else self.number(key, value)
        if not 0 <= number < 1:
            raise BadKey((key,), f"must be at least 0 and below 1, not {_short(value)}")
        return number

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool):
            raise BadKey((key,), f"must be true or false, not {_short(value)}")
        return value

    def notes(self) -> tuple[str, ...]:
        notes = []
        if self.taken:
            listed = ", ".join(f"{key}={value}" for key, value in sorted(self.taken.items()))
            notes.append(f"absent from config.json, taken from the defaults of its class in transformers: {listed}")
        if self.values.get("rope_scaling") is not None:
            notes.append("rope_scaling of config.json is left out; it changes neither memory nor arithmetic")
        return tuple(notes)


def _refuse_what_is_not_exact(reader: _Reader, model_type: str) -> None:
    if reader.get("hidden_act") != "silu":
        raise BadKey(("hidden_act",), f"only silu (SwiGLU) is supported, not {_short(reader.get('hidden_act'))}")
    if reader.values.get("quantization_config") is not None:
        raise BadKey(("quantization_config",), "a quantised checkpoint is not trained; use the original config.json")
    if model_type == "qwen2":
        window = reader.flag("use_sliding_window")
    else:
        window = reader.get("sliding_window") is not None
    if window:
        raise BadKey(
            ("sliding_window",), "sliding-window attention is not supported; set it to null for full attention"
        )
    if model_type == "llama" and reader.flag("attention_bias") != reader.flag("mlp_bias"):
        raise BadKey(("attention_bias",), "attention_bias and mlp_bias must be both true or both false here")


def _head_dim(reader: _Reader, hidden: int, heads: int) -> int:
    if reader.values.get("head_dim") is not None:
        return reader.size("head_dim")
    if hidden % heads:
        raise BadKey(
            ("num_attention_heads",),
            f"hidden_size {hidden} is not divisible by {heads} heads; give head_dim, or a number that divides it",
        )
    return hidden // heads


def _rotary_base(reader: _Reader) -> float:
    """`rope_theta`, which transformers 5 writes inside `rope_parameters`."""
    inside = reader.values.get("rope_parameters")
    if isinstance(inside, Mapping) and "rope_theta" in inside:
        base = reader.number("rope_theta", inside["rope_theta"])
    else:
        base = reader.number("rope_theta", reader.get("rope_theta"))
    if base <= 0:
        raise BadKey(("rope_theta",), f"must be above 0, not {base}")
    return base


def _parse(text: str, file: Path) -> dict[str, Any]:
    try:
        values = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{file}:{error.lineno}: is not valid JSON: {error.msg}; give a Hugging Face config.json"
        ) from None
    except RecursionError:
        raise UserError(f"{file}: is nested too deeply for a config.json") from None
    except ValueError as error:
        raise UserError(f"{file}: {_printable(str(error))}") from None
    if not isinstance(values, dict):
        raise UserError(f"{file}: is not a JSON object; give a Hugging Face config.json")
    return values


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number JSON knows; write a finite number")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {_short(twice)} stands twice; remove one")
    return values


def _printable(text: str) -> str:
    shown = "".join(c if c.isprintable() else "?" for c in text)
    return shown if len(shown) <= 120 else shown[:117] + "..."


def _short(value: Any) -> str:
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError):
        text = "what it is"
    return text if len(text) <= 60 else text[:57] + "..."
