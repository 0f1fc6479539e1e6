"""The generated tables of the docs show the rules and facts the planner applies, word for word."""

from __future__ import annotations

import pytest

from support.backend_tables import DOCS, tables


@pytest.mark.parametrize(("pages", "table"), tables())
def test_the_docs_have_the_table_of_the_code(pages: str, table: str) -> None:
    texts = [page.read_text("utf-8") for page in DOCS.glob(pages)]
    assert any(table in text for text in texts), f"docs/{pages} is out of date: run `make docs-tables` for\n{table}"
