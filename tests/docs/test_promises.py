"""docs/promises.md: each promise about a run names a test that exists, and no two promises name the same one."""

from __future__ import annotations

import ast
import re

from support.snippets import DOCS, ROOT

ROW = re.compile(r"^\| (?P<promise>[A-Z].+?) \| (?P<page>\[.+?\]\(.+?\)) \| `(?P<test>[^`]+)` \|$", re.MULTILINE)
PAGE = (DOCS / "promises.md").read_text("utf-8")
ROWS = [match.groupdict() for match in ROW.finditer(PAGE)]


def test_every_row_is_a_promise_with_a_page_and_a_test() -> None:
    heads = PAGE.count("\n| promise |")
    assert len(ROWS) == PAGE.count("\n| ") - heads
    assert len(ROWS) > 40


def test_every_promise_has_a_test_of_its_own() -> None:
    tests = [row["test"] for row in ROWS]
    assert len({*tests}) == len(tests)
    for test in tests:
        file, _, name = test.partition("::")
        tree = ast.parse((ROOT / file).read_text("utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test
