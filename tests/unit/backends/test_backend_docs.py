"""docs/backends.md shows the rules the planner applies, word for word."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmlaunch.backends import deepspeed_rules, megatron_rules
from llmlaunch.backends.rules_table import rules_table
from llmlaunch.layout import Rule

PAGE = Path(__file__).resolve().parents[3] / "docs" / "backends.md"


@pytest.mark.parametrize("rules", [megatron_rules.RULES, deepspeed_rules.RULES])
def test_the_page_holds_the_rules_of_the_code(rules: tuple[Rule, ...]) -> None:
    table = rules_table(rules)
    assert table in PAGE.read_text("utf-8"), f"docs/backends.md is out of date; put this table there:\n{table}"
