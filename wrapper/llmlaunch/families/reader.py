"""Typed access to the values of a config.json, with the defaults of its class."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from llmlaunch.documents.validate import BadKey
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
