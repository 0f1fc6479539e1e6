"""The rules of a backend as a table for people: docs/megatron*.md and docs/deepspeed*.md have them, word for word."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from llmlaunch.backends.requirements import Requirement
from llmlaunch.layout import Rule

__all__ = ["rules_table"]


def rules_table(rules: Iterable[Rule | Requirement], layer_of: Callable[[str], str] | None = None) -> str:
    """One Markdown row for each rule, in the order they are applied. `layer_of` names the layer of the framework that
    checks what stands `where`; None = the framework has no layers."""
    head = ["rule", "what it says", *(["layer"] if layer_of else []), "checked in"]
    rows = [_row(head), _row(["---"] * len(head)).replace(" ", "")]
    for rule in rules:
        layer = [layer_of(rule.where)] if layer_of else []
        rows.append(_row([f"`{rule.key}`", _cell(rule.sentence), *layer, f"`{_cell(rule.where)}`"]))
    return "\n".join(rows)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
