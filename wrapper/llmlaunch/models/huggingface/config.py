"""A model shape from a Hugging Face `config.json`.

Only what is read exactly is accepted: families whose layers `ModelShape` can say. A missing key takes the default of
the family's own configuration class, and the notes say which did, and what is left out and changes no memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from llmlaunch.documents.validate import BadKey
from llmlaunch.documents.yaml_strict import read_text
from llmlaunch.errors import UserError
from llmlaunch.models.huggingface.defaults import ALIASES, DEFAULTS
from llmlaunch.models.huggingface.families import BUILDERS
from llmlaunch.models.huggingface.reader import ConfigReader, short
from llmlaunch.models.shape import ModelShape, check_shape

__all__ = ["SUPPORTED", "read_config", "shape_from_config"]

SUPPORTED = tuple(BUILDERS)

_KEYS = {  # our name -> theirs, for messages about sizes that do not agree
    "num_query_groups": "num_key_value_heads",
    "moe.topk": "num_experts_per_tok",
    "moe.router.groups": "n_group",
    "moe.router.group_topk": "topk_group",
    "mla.qk_pos_emb_head_dim": "qk_rope_head_dim",
}


def read_config(path: Path) -> tuple[ModelShape, tuple[str, ...]]:
    """Return the shape in a `config.json` (or in the folder that holds one), and notes on what it leaves open.

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
    """Return the shape a config describes, and notes. Raises `BadKey` for a key that cannot be used."""
    family = values.get("model_type")
    if not isinstance(family, str) or family not in BUILDERS:
        shown = "is missing" if family is None else f"{short(family)} is not supported"
        inside = values.get("text_config")
        hint = "; give its text_config as a file of its own" if isinstance(inside, Mapping) else ""
        raise BadKey(("model_type",), f"{shown}{hint}; supported: {', '.join(SUPPORTED)}; or write the shape inline")
    reader = ConfigReader(values, DEFAULTS[family], ALIASES.get(family, {}))
    _refuse_quantised(reader)
    shape = BUILDERS[family](reader)
    return check_shape(replace(shape, name=name, family=family)), reader.notes()


def _refuse_quantised(reader: ConfigReader) -> None:
    """Raise BadKey for a quantised checkpoint, except DeepSeek-V3's: its blocks of fp8 are how weights are stored, not
    how they are trained. Others were quantised after training.
    """
    quantization = reader.group("quantization_config")
    if quantization is None and reader.values.get("quantization_config") is None:
        return
    if quantization is None or quantization.get("quant_method") != "fp8":
        raise BadKey(("quantization_config",), "a quantised checkpoint is not trained; use the original config.json")
    reader.remark("quantization_config says how the weights are stored (fp8); training takes the recipe's precision")


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
        raise ValueError(f"the key {short(twice)} stands twice; remove one")
    return values


def _printable(text: str) -> str:
    shown = "".join(c if c.isprintable() else "?" for c in text)
    return shown if len(shown) <= 120 else shown[:117] + "..."
