"""Constants of memory that no formula gives, from `constants.json`, which says where each was measured."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path


@cache
def _table() -> dict[str, dict[str, float | str]]:
    table: dict[str, dict[str, float | str]] = json.loads(Path(__file__).with_name("constants.json").read_text("utf-8"))
    return table


def constant(name: str) -> float:
    """A constant by name, in the unit its name ends in. Raises KeyError for a name that is not in the file."""
    return float(_table()[name]["value"])
