"""The shipped model shapes, by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llmlaunch.assets import asset
from llmlaunch.errors import UserError
from llmlaunch.models.sections import section_from
from llmlaunch.models.shape import ModelShape, natural_activation


def preset_names() -> tuple[str, ...]:
    """Return the names of the shipped model shapes, sorted."""
    return tuple(sorted(path.stem for path in asset("recipes", "models").glob("*.json")))


def load_preset(name: str) -> ModelShape:
    """Return a shipped shape. Raises `UserError` with the known names."""
    names = preset_names()
    if name not in names:
        from llmlaunch.documents.likely_meaning import known_and_nearest

        raise UserError(f"unknown model {name!r}; {known_and_nearest(name, names)} (or give the path of a config.json)")
    return shape_of(preset_values(name) | {"name": name})


def preset_values(name: str) -> dict[str, Any]:
    """Return what the file of a shipped shape says."""
    data = json.loads(asset("recipes", "models", f"{name}.json").read_text(encoding="utf-8"))
    return dict(data["shape"])


def shape_of(values: Mapping[str, Any]) -> ModelShape:
    """Return a shape from plain values, as presets and inline mappings give them, which say their family."""
    plain = dict(values)
    if plain.get("moe") is not None:
        letters = (plain.get("mamba") or {}).get("pattern")
        every = [1] * plain["num_layers"] if letters is None else [int(letter == "E") for letter in letters]
        plain["moe"] = {**plain["moe"], "layer_pattern": list(plain["moe"].get("layer_pattern") or every)}
    if plain.get("activation") is None:
        plain["activation"] = natural_activation(plain.get("gated_mlp", True))
    return section_from(ModelShape, plain)
