"""Finding a model shape: a shipped preset by name, a Hugging Face config by path, or written inline."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from llmlaunch.assets import asset
from llmlaunch.documents.likely_meaning import known_and_nearest
from llmlaunch.documents.validate import BadKey, validate
from llmlaunch.documents.yaml_strict import Document
from llmlaunch.errors import UserError
from llmlaunch.families.form import PARTS, model_form
from llmlaunch.families.hub_ids import HubModel, hub_model, is_hub_id, unknown_hub_id
from llmlaunch.families.registry import all_families, family_of
from llmlaunch.models.sections import required_keys, section_from
from llmlaunch.models.shape import MARKS, ModelShape, check_shape, natural_activation

__all__ = ["find_model", "load_preset", "preset_names", "resolve_model"]

_REQUIRED = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size")


def preset_names() -> tuple[str, ...]:
    """Return the names of the shipped model shapes, sorted."""
    return tuple(sorted(path.stem for path in asset("recipes", "models").glob("*.json")))


def load_preset(name: str) -> ModelShape:
    """Return a shipped shape. Raises `UserError` with the known names."""
    names = preset_names()
    if name not in names:
        raise UserError(f"unknown model {name!r}; {known_and_nearest(name, names)} (or give the path of a config.json)")
    return _shape(_preset_values(name) | {"name": name})


def _preset_values(name: str) -> dict[str, Any]:
    data = json.loads(asset("recipes", "models", f"{name}.json").read_text(encoding="utf-8"))
    return dict(data["shape"])


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
    document = Document("model", "", spec, {}, {})
    written = validate(model_form(), document)
    base = written.pop("base", None)
    shape, notes = _named(base, base_dir) if base is not None else (None, ())
    values = asdict(shape) if shape is not None else {}
    completed = _complete(values, written, base, default_positions)
    if of_transformers and not {"family", "qk_layernorm"} & written.keys():
        completed, more = _with_dense_layers(completed)
        notes = (*notes, *more)
    return completed, notes


def _with_dense_layers(shape: ModelShape) -> tuple[ModelShape, tuple[str, ...]]:
    """Return a plain mixture that has dense layers, too, as the class of Transformers that builds such a model, with a
    note; any other shape as it is."""
    from llmlaunch.families.written import unsaid

    if shape.moe is None or "moe.layer_pattern" not in unsaid(replace(shape, mtp_num_layers=0)):
        return shape, ()
    changes = {name: family.plain_mixture for name, family in all_families() if family.plain_mixture is not None}
    for name, change in changes.items():
        built = replace(shape, family=name, **change)
        if not unsaid(replace(built, mtp_num_layers=0)):
            return built, (
                f"a mixture with dense layers is built as Transformers' {name}, which has norms on queries and keys "
                "(model.qk_layernorm: true): no class of its builds this one without them",
            )
    return shape, ()


def _named(spec: str, base_dir: Path) -> tuple[ModelShape, tuple[str, ...]]:
    if spec in preset_names():
        return load_preset(spec), ()
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
    from llmlaunch.families.config import read_config

    return read_config(path)


def _of_hub(model: HubModel) -> tuple[ModelShape, tuple[str, ...]]:
    """Return the shape of a model on the hub, and a note of where it comes from."""
    if not model.changes:
        return load_preset(model.preset), (f"{model.hub_id} is the preset {model.preset}",)
    name = model.hub_id.rpartition("/")[2].lower()
    differ = ", ".join(model.changes)
    shape = _shape(_written_over(_preset_values(model.preset), model.changes) | {"name": name})
    return shape, (f"{model.hub_id} is the preset {model.preset} with another {differ}",)


def _written_over(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a preset's values with changes; null takes a key out, and heads follow the width unless they are said."""
    if "hidden_size" in changes and values["head_dim"] * values["num_attention_heads"] == values["hidden_size"]:
        heads = changes.get("num_attention_heads", values["num_attention_heads"])
        changes = {"head_dim": changes["hidden_size"] // heads, **changes}
    return {name: value for name, value in {**values, **changes}.items() if value is not None}


def _complete(
    values: dict[str, Any], written: dict[str, Any], base: str | None, default_positions: int | None
) -> ModelShape:
    """Return the shape of the written values over the base's, with what follows from them."""
    base_moe = values.get("moe")
    parts = [name for name in PARTS if written.get(name) is not None]
    written = written | {name: _part(name, values.get(name), written[name]) for name in parts}
    values = values | {key: value for key, value in written.items() if value is not None}
    if "head_dim" in written and written["head_dim"] is None:
        raise BadKey(("head_dim",), "is empty; write a number, or remove the line: then heads share hidden_size evenly")
    for key in _REQUIRED:
        if key not in values:
            raise BadKey((), f"is missing `{key}`; give it, or `base:` with a preset that has it")
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    values.setdefault("num_query_groups", heads)
    latent = values.get("mla")
    if "head_dim" not in written and latent is not None:
        values["head_dim"] = latent["qk_head_dim"] + latent["qk_pos_emb_head_dim"]
    elif "head_dim" not in written and (
        "head_dim" not in values or {"hidden_size", "num_attention_heads"} & written.keys()
    ):
        if hidden % heads:
            raise BadKey(
                ("num_attention_heads",),
                f"hidden_size {hidden} is not divisible by {heads} heads; "
                f"give head_dim, or a number of heads that divides it",
            )
        values["head_dim"] = hidden // heads
    if "max_position_embeddings" not in values:
        if default_positions is None:
            raise BadKey((), "is missing `max_position_embeddings`")
        values["max_position_embeddings"] = default_positions
    moe, mamba = values.get("moe"), values.get("mamba")
    if mamba is not None and (written.get("mamba") or {}).get("pattern") is None:
        mamba = values["mamba"] = mamba | {"pattern": _letters(mamba["pattern"], values["num_layers"])}
    if mamba is not None and moe is not None and (written.get("moe") or {}).get("layer_pattern") is None:
        moe = values["moe"] = moe | {"layer_pattern": ()}  # the letters E of the layers
    elif moe is not None and base_moe is not None and moe.get("layer_pattern") == base_moe["layer_pattern"]:
        values["moe"] = moe | {"layer_pattern": _as_deep(base_moe["layer_pattern"], values["num_layers"])}
    pooled = values.get("compressed_attention")
    if pooled is not None and "compressed_attention" not in written:
        values["compressed_attention"] = pooled | {"ratios": pooled["ratios"][: values["num_layers"]]}
    if written.get("activation") is None and "gated_mlp" in written:
        values.pop("activation", None)
    if written.get("family") is None and MARKS & written.keys():  # the base's family may not be able to say it
        values.pop("family", None)
    values["name"] = f"{base} changed" if base else "inline"
    return check_shape(_shape(values))


def _part(name: str, below: Mapping[str, Any] | None, written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a part of the model, such as "moe": those that are written, over the base's."""
    whole = {**(below or {}), **written}
    if below is not None and written.get("router") is not None:
        whole["router"] = {**below["router"], **written["router"]}
    if written.get("layer_pattern") is None and below is not None and "layer_pattern" in below:
        whole["layer_pattern"] = below["layer_pattern"]
    for key in required_keys(PARTS[name]):
        if whole.get(key) is None:
            raise BadKey((name,), f"is missing `{key}`; give it, or `base:` with a preset that has it")
    return whole


def _letters(pattern: str, layers: int) -> str:
    """Return the letters for a number of layers: cut, or continued if all are alike."""
    return pattern[:1] * layers if len(set(pattern)) == 1 else pattern[:layers]


def _as_deep(pattern: Sequence[int], layers: int) -> tuple[int, ...]:
    """Return the layer pattern for a number of layers: cut, or continued if mixtures follow dense layers.

    Any other pattern stays as it is, and the person must write a new one.
    """
    if len(pattern) >= layers:
        return tuple(pattern[:layers])
    more = (pattern[-1],) * (layers - len(pattern)) if list(pattern) == sorted(pattern) else ()
    return (*pattern, *more)


def _shape(values: Mapping[str, Any]) -> ModelShape:
    """Return a shape from plain values, as presets and inline mappings give them."""
    plain = dict(values)
    if plain.get("moe") is not None:
        letters = (plain.get("mamba") or {}).get("pattern")
        every = [1] * plain["num_layers"] if letters is None else [int(letter == "E") for letter in letters]
        plain["moe"] = {**plain["moe"], "layer_pattern": list(plain["moe"].get("layer_pattern") or every)}
    if plain.get("activation") is None:
        plain["activation"] = natural_activation(plain.get("gated_mlp", True))
    shape = section_from(ModelShape, plain)
    return shape if plain.get("family") is not None else replace(shape, family=family_of(shape))
