"""The table of Megatron-Bridge's recipes is that of the Megatron-Bridge that is installed."""

from __future__ import annotations

import json
from typing import Any
from zlib import crc32

from llmlaunch.frameworks.bridge.recipe_fields import RECIPES, known_recipes
from support.bridge_recipes import fields_by_recipe, precisions, text
from support.recorded import ONE_IN
from support.soak import SOAK


def in_the_table(name: str) -> dict[str, Any]:
    fields = dict(known_recipes()["recipes"][name])
    other = fields.pop("as", None)
    merged = {**(in_the_table(other) if other else {}), **fields}
    return {key: value for key, value in merged.items() if value is not None}


def test_the_table_of_recipes_is_up_to_date() -> None:
    """A share of its recipes in `make test`, and all of its text in `make soak`."""
    read = fields_by_recipe(in_share)
    assert read.keys() == set(filter(in_share, known_recipes()["recipes"]))
    assert {name: in_the_table(name) for name in read} == json.loads(json.dumps(read))
    assert known_recipes()["precisions"] == json.loads(json.dumps(precisions()))
    assert not SOAK or RECIPES.read_text("utf-8") == text()


def in_share(name: str) -> bool:
    return crc32(name.encode()) % ONE_IN == 0
