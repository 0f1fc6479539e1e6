"""The table of Megatron-Bridge's recipes that `llmlaunch` reads commands with, made of Bridge's own source.

`PYTHONPATH=tests .venv/bin/python -m support.bridge_recipes` writes it anew from `.venv-frameworks`; nothing of Bridge
is imported. tests/frameworks/test_bridge_recipes.py holds it up to date.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from llmlaunch.families.hub_ids import hub_model
from llmlaunch.frameworks.bridge.recipe_fields import (
    RECIPES,
    UNREAD,
    Fields,
    FieldsReader,
    PythonModule,
    flat,
    plain_fields,
)

PACKAGES = Path(__file__).resolve().parents[2] / ".venv-frameworks/lib/python3.11/site-packages"
PLACES = ("megatron/bridge/recipes", "megatron/bridge/perf_recipes")
# scripts/training/recipe_metadata.py BENCHMARK_RECIPE_PRECEDENCE_COLLISIONS, Megatron-Bridge 0.6: the performance
# recipe is taken where both have one of a name
MODELS = {  # of providers that name no model on the hub
    "nemotron_3_nano_4b": None,
    "nemotron_3_nano": "nemotron-3-nano",
    "nemotron_3_5_lightning": "nemotron-3.5-lightning",
    "gpt3_175b": "gpt3-175b",
    "qwen35_text_35b_a3b": "qwen3.5-35b-a3b",
}


@cache
def module(name: str) -> PythonModule | None:
    """Return a module of Bridge's, None for one of another package."""
    path = PACKAGES / Path(*name.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return PythonModule.of(path.read_text("utf-8")) if name.startswith("megatron.bridge") and path.is_file() else None


class BridgeReader(FieldsReader):
    """Follows imports into Bridge's own modules."""

    def module(self, name: str) -> PythonModule | None:
        return module(name)


def recipes(wanted: Callable[[str], bool]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each wanted recipe whose model is known, with its fields; performance recipes last."""
    for place in PLACES:
        for path in sorted((PACKAGES / place).rglob("*.py")):
            source = module(".".join(path.relative_to(PACKAGES).with_suffix("").parts).removesuffix(".__init__"))
            assert source is not None
            for name in (*source.functions, *source.imports):
                if not name.endswith("_config") or name.startswith(("_", "default_", "get_")) or not wanted(name):
                    continue
                fields = BridgeReader().call(source, name)
                if isinstance(fields, Fields):
                    yield name, flat(fields) | ({"perf": True} if place == PLACES[1] and "gpu_" in name else {})


def fields_by_recipe(wanted: Callable[[str], bool] = lambda name: True) -> dict[str, dict[str, Any]]:
    """Return what is read of the wanted recipes, by their names."""
    read: dict[str, dict[str, Any]] = {}
    for name, fields in recipes(wanted):
        model = fields.get("model.hub_model") or next((MODELS[key] for key in MODELS if name.startswith(key)), None)
        if model in (None, UNREAD) or (name in read and not fields.get("perf")):
            continue
        if "/" in str(model) and hub_model(model) is None:
            read[name] = {"model": model}
        else:
            read[name] = {"model": model, **plain_fields(fields)}
    return read


def table() -> dict[str, Any]:
    """Return what the file holds: of each recipe its fields, or those that differ from another's."""
    read = fields_by_recipe()
    shown: dict[str, Any] = {}
    for name, fields in sorted(read.items(), key=lambda item: (len(item[0]), item[0])):
        beside = [_beside(fields, read[other], other) for other in shown]
        shown[name] = min((fields, *beside), key=len)
    return {
        "source": "megatron/bridge/recipes and perf_recipes, Megatron-Bridge 0.6",
        "precisions": precisions(),
        "recipes": dict(sorted(shown.items())),
    }


def _beside(fields: Mapping[str, Any], others: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return fields as what differs from those of another recipe; a field of that one that is not there is null."""
    absent = {key: None for key in others if key not in fields}
    other = {key: value for key, value in fields.items() if key not in others or others[key] != value}
    return {"as": name} | other | absent


def precisions() -> dict[str, Any]:
    """Return the fields of each mixed precision that a recipe names."""
    source = module("megatron.bridge.training.mixed_precision")
    assert source is not None
    functions = {name: BridgeReader().call(source, name) for name in source.functions if name.endswith("_mixed")}
    return {name: plain_fields({"mixed_precision": fields}) for name, fields in functions.items()}


def text() -> str:
    """Return the file's text, a recipe a line."""
    held = table()
    lines = [
        f"{json.dumps(name)}: {json.dumps(fields, separators=(',', ':'))}" for name, fields in held["recipes"].items()
    ]
    heads = [f"{json.dumps(name)}: {json.dumps(held[name])}" for name in ("source", "precisions")]
    return "{\n" + ",\n".join(heads) + ',\n"recipes": {\n' + ",\n".join(lines) + "\n}\n}\n"


if __name__ == "__main__":
    RECIPES.write_text(text(), "utf-8")
