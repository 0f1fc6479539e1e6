"""Facts of a framework with other values of some of their fields."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields, replace
from typing import Any

from llmlaunch.facts import MemoryFacts

OWN = {each.name for each in fields(MemoryFacts)}
FACT_GROUPS = sorted(OWN - {"backend", "version", "source"})


def changed(facts: MemoryFacts, **values: Any) -> MemoryFacts:
    """Return the facts with other values of fields, each named as in its group; whole groups go by their own names.

    Fields of `host` have names that other groups have, too: those are changed with `host=replace(...)`.

    Raises TypeError where no group has such a field.
    """
    homes = {each.name: group for group in FACT_GROUPS if group != "host" for each in fields(getattr(facts, group))}
    whole = {name: value for name, value in values.items() if name in OWN}
    parts: dict[str, dict[str, Any]] = defaultdict(dict)
    for name in values.keys() - whole.keys():
        if name not in homes:
            raise TypeError(f"no group of facts has a field {name}")
        parts[homes[name]][name] = values[name]
    return replace(facts, **whole, **{group: replace(getattr(facts, group), **part) for group, part in parts.items()})
