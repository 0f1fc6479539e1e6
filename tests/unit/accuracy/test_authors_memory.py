"""What authors of public scripts state of memory is recorded beside the prediction, which nothing moves unseen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from support.authors_memory import PAGE, authors_rows, predicted_gib, with_table
from support.plans import ADVICE_LIMITS, spend
from support.soak import share

ROWS = authors_rows()


@pytest.mark.parametrize("row", share(ROWS, ROWS[::4]), ids=lambda row: row["name"])
def test_the_recorded_prediction_is_todays(
    row: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spend(monkeypatch, ADVICE_LIMITS)
    assert predicted_gib(row, tmp_path) == pytest.approx(row["predicted_gib"], rel=0.05)


def test_the_page_has_the_recorded_rows() -> None:
    page = PAGE.read_text("utf-8")
    assert with_table(page, authors_rows()) == page
