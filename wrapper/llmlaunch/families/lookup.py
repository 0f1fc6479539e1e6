"""Where the shape of a model comes from: a shipped preset, a config.json by path, a model on the hub, or a mapping."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmlaunch.documents.validate import validate
from llmlaunch.documents.yaml_strict import Document
from llmlaunch.errors import UserError
from llmlaunch.families.hub_ids import load_preset, preset_names, preset_values, shape_of
from llmlaunch.models.shape import ModelShape

if TYPE_CHECKING:
    from llmlaunch.families.hub_ids import HubModel


def find_model(spec: str | Mapping[str, Any], base_dir: Path = Path()) -> ModelShape:
    """The shape `spec` names: a preset, the path of a `config.json` or of its folder (relative to `base_dir`), a model
    on the hub, or an inline mapping (`model_form`). Raises `UserError`; `BadKey` for a wrong key of the mapping."""
    return resolve_model(spec, base_dir)[0]


def resolve_model(
    spec: str | Mapping[str, Any],
    base_dir: Path = Path(),
    default_positions: int | None = None,
    of_transformers: bool = False,
) -> tuple[ModelShape, tuple[str, ...]]:
    """Return the shape of `find_model` and notes on what was assumed.

    `default_positions` is the `max_position_embeddings` of an inline shape that does not give it. If `of_transformers`,
    a class of Transformers builds the model.
    """
    if isinstance(spec, str):
        return _named(spec, base_dir)
    from llmlaunch.families.inline import complete_shape, model_form, with_dense_layers

    document = Document("model", "", spec, {}, {})
    written = validate(model_form(), document)
    base = written.pop("base", None)
    shape, notes = _named(base, base_dir) if base is not None else (None, ())
    values = asdict(shape) if shape is not None else {}
    completed = complete_shape(values, written, base, default_positions)
    if of_transformers and not {"family", "qk_layernorm"} & written.keys():
        completed, more = with_dense_layers(completed)
        notes = (*notes, *more)
    return completed, notes


def _named(spec: str, base_dir: Path) -> tuple[ModelShape, tuple[str, ...]]:
    if spec in preset_names():
        return load_preset(spec), ()
    from llmlaunch.families.hub_ids import hub_model, is_hub_id, unknown_hub_id

    looks_like_path = "/" in spec or spec.endswith(".json") or spec in (".", "..")
    if "://" in spec:
        name = "/".join(spec.partition("://")[2].split("/")[1:3])
        raise UserError(
            f"{spec!r}: nothing is downloaded; write the id alone, model: {name}, or the path of a config.json"
        )
    path = base_dir / spec
    try:
        is_path = looks_like_path or path.exists()
    except (OSError, ValueError):
        is_path = False
    known = None if is_path and (not is_hub_id(spec) or path.exists()) else hub_model(spec)
    if known is not None:
        return _of_hub(known)
    if not path.exists() and "\0" not in spec and Path(spec).exists():
        there = os.path.relpath(Path(spec).absolute(), base_dir.absolute())
        raise UserError(
            f"{spec!r}: is in the working directory, and paths in a recipe start where it lies; did you mean "
            f"model: {there if '/' in there else f'./{there}'}?"
        )
    if not is_path:
        return load_preset(spec), ()
    if is_hub_id(spec) and not path.exists():
        raise UserError(
            f"{spec!r}: no such file or folder; as a model on the hub {unknown_hub_id(spec, preset_names())}"
        )
    from llmlaunch.families.written import read_config

    return read_config(path)


def _of_hub(model: HubModel) -> tuple[ModelShape, tuple[str, ...]]:
    """Return the shape of a model on the hub, and a note of where it comes from."""
    if not model.changes:
        return load_preset(model.preset), (f"{model.hub_id} is the preset {model.preset}",)
    name = model.hub_id.rpartition("/")[2].lower()
    differ = ", ".join(model.changes)
    shape = shape_of(_written_over(preset_values(model.preset), model.changes) | {"name": name})
    return shape, (f"{model.hub_id} is the preset {model.preset} with another {differ}",)


def _written_over(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a preset's values with changes; null takes a key out, and heads follow the width unless they are said."""
    if "hidden_size" in changes and values["head_dim"] * values["num_attention_heads"] == values["hidden_size"]:
        heads = changes.get("num_attention_heads", values["num_attention_heads"])
        changes = {"head_dim": changes["hidden_size"] // heads, **changes}
    return {name: value for name, value in {**values, **changes}.items() if value is not None}
