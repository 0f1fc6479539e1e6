"""docs/megatron-flags.md: which flags we can write, and how each was tried."""

from __future__ import annotations

from pathlib import Path

from flags_table import (
    OBSTACLES,
    changes_table,
    flags_of,
    flags_table,
    trained_flags,
    written_flags,
)
from trained_cases import CASES, jobs

PAGE = Path(__file__).resolve().parents[2] / "docs" / "megatron-flags.md"


def test_the_page_holds_the_tables() -> None:
    text = PAGE.read_text("utf-8")
    for table in (changes_table(), flags_table()):
        assert table in text, f"{PAGE.name} is out of date; put this table there:\n{table}"


def test_what_is_rendered_is_among_them(tmp_path: Path) -> None:
    rendered = set().union(*(flags_of(job.rendered) for job in jobs(tmp_path, CASES)))
    assert rendered <= set(written_flags())


def test_what_was_not_trained_has_its_reason_and_only_that() -> None:
    assert set(OBSTACLES) == set(written_flags()) - trained_flags()
