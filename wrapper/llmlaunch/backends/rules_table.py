"""The rules of a backend as a table for people: docs/backends.md holds it, and a test keeps the two equal."""

from __future__ import annotations

from collections.abc import Iterable

from llmlaunch.backends.requirements import Requirement
from llmlaunch.layout import Rule

__all__ = ["rules_table"]


def rules_table(rules: Iterable[Rule | Requirement]) -> str:
    """One Markdown row for each rule, in the order they are applied."""
    rows = ["| rule | what it says | checked in |", "|---|---|---|"]
    rows += [f"| `{rule.key}` | {_cell(rule.sentence)} | `{_cell(rule.where)}` |" for rule in rules]
    return "\n".join(rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
