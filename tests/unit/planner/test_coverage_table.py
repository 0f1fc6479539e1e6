"""docs/coverage.md says what can be said of the jobs that others publish as it is today."""

from __future__ import annotations

from typing import Any

import pytest

from llmlaunch.errors import UserError
from support.coverage_table import PAGE, line_of, published_pages, recipe_of_row

ROWS = [row for page in published_pages() for row in page["rows"]]
PRICED_QUICKLY = ("GPT-OSS 20B", "Llama")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_the_page_says_whether_a_row_can_be_said(row: dict[str, Any]) -> None:
    line = next(line for line in PAGE.read_text("utf-8").splitlines() if line.startswith(f"| {row['name']} | "))
    try:
        recipe_of_row(row)
    except UserError:
        assert line.split(" | ")[1:4] == ["no", "no", "no"], "run: make coverage-table"
    else:
        assert line.split(" | ")[1] == "yes", "run: make coverage-table"
    if row["name"].startswith(PRICED_QUICKLY):
        assert line + "\n" == line_of(row), "run: make coverage-table"
