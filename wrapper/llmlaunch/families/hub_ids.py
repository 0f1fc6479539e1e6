"""The shipped model shapes by name, and names of models on the Hugging Face hub, answered from what is shipped: nothing
is asked of the network."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from llmlaunch.assets import asset
from llmlaunch.errors import UserError
from llmlaunch.models.sections import section_from
from llmlaunch.models.shape import ModelShape, natural_activation

_HUB_ID = re.compile(r"(?!\.)[\w.-]{1,96}/(?!\.)[\w.-]{1,96}", re.ASCII)
_FILES = (".json", ".yaml", ".yml")
_NOT_COMPARED = re.compile(r"meta-|-hf$|-(instruct|chat|it|base|pt)\b|[^a-z0-9.]")


@dataclass(frozen=True)
class HubModel:
    """A hub id's shape: a preset with `changes`, the keys of its shape that differ. `published_parameters` is stated
    where the changes change their number."""

    hub_id: str
    preset: str
    changes: Mapping[str, Any]
    published_parameters: int | None = None


def is_hub_id(spec: str) -> bool:
    """Return whether a text has the form OWNER/NAME of a model on the hub."""
    return _HUB_ID.fullmatch(spec) is not None and not spec.lower().endswith(_FILES)


def hub_model(hub_id: str) -> HubModel | None:
    """Return what is shipped of a model on the hub, None where it is not known. The hub is case-insensitive."""
    return _models().get(hub_id.lower())


def hub_id_of(preset: str) -> str | None:
    """Return the first model on the hub that a preset is the shape of, None where none is known."""
    return next(iter(_ids_of_presets()[preset]), None)


def unknown_hub_id(hub_id: str, presets: Sequence[str]) -> str:
    """Return the end of a sentence about a hub id that is not known: how its shape can be had."""
    beginnings = _data()["unsupported"]
    family = next((kind for begin, kind in beginnings.items() if hub_id.lower().startswith(begin.lower())), None)
    if family is not None:
        return f"its layers ({family}) are of no family that can be read; write a shape inline that is near it"
    near = difflib.get_close_matches(_compared(hub_id.rpartition("/")[2]), {_compared(p): p for p in presets}, 2, 0.5)
    by_name = {_compared(preset): preset for preset in presets}
    nearest = f"the nearest presets are {' and '.join(by_name[name] for name in near)}" if near else "no preset is near"
    return (
        f"its shape is not shipped, and nothing is downloaded; {nearest}. Fetch its configuration with "
        f"`hf download {hub_id} config.json --local-dir FOLDER` and write model: FOLDER"
    )


def _compared(name: str) -> str:
    return _NOT_COMPARED.sub("", name.lower())


@cache
def _models() -> Mapping[str, HubModel]:
    """Return every known model by its id in small letters: those of a preset's own file, and those that differ."""
    models = [HubModel(hub_id, preset, {}) for preset, ids in _ids_of_presets().items() for hub_id in ids]
    models += [
        HubModel(hub_id, entry["preset"], entry["changes"], entry.get("published_parameters"))
        for entry in _data()["models"]
        for hub_id in entry["ids"]
    ]
    return {model.hub_id.lower(): model for model in models}


@cache
def _ids_of_presets() -> Mapping[str, tuple[str, ...]]:
    """Return the ids whose shape is exactly that of a preset, for each preset."""
    files = sorted(asset("recipes", "models").glob("*.json"))
    return {path.stem: tuple(json.loads(path.read_text(encoding="utf-8")).get("ids", ())) for path in files}


@cache
def _data() -> Mapping[str, Any]:
    data: Mapping[str, Any] = json.loads(asset("recipes", "hub_ids.json").read_text(encoding="utf-8"))
    return data


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
