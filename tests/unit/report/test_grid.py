"""The grid holds what the search found: one cell for each split and micro-batch size."""

from __future__ import annotations

import numpy as np
import pytest

from llmlaunch.planner.planning import make_sized_plan
from llmlaunch.planner.search import search
from llmlaunch.report.grid import grid_of
from support.plans import gallery_setting
from support.tight import ONE_LAYOUT, RECIPE, hand_made_limit, judge_by, needed_gib


def test_a_tight_layout_stands_in_the_grid_as_one_that_fits_the_card_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    judge_by(monkeypatch, hand_made_limit(needed_gib() - 2, needed_gib() + 2))
    here, plan = make_sized_plan(gallery_setting(RECIPE, ONE_LAYOUT))
    assert plan.verdict == "tight"
    grid = grid_of(here, search(here, whole=True))
    assert grid.cells
    assert not any(cell.safe for cell in grid.cells.values())


@pytest.mark.parametrize(
    ("name", "cluster"),
    [("llama3-8b", "a100-40gb-x8"), ("quickstart", "")],  # the last is split nowhere
)
def test_a_cell_holds_the_first_safe_layout_there_else_the_one_that_needs_the_least(name: str, cluster: str) -> None:
    here = gallery_setting(name, *([f"cluster={cluster}"] if cluster else []))
    found = search(here, whole=True)
    grid = grid_of(here, found)
    for (row, micro_batch_size), cell in grid.cells.items():
        inside = np.equal(found.points.layouts.micro_batch_size, micro_batch_size)
        for field, value in zip(grid.fields, row, strict=True):
            inside &= np.equal(getattr(found.points.layouts, field), value)
        if cell.best is None:
            assert not inside.any()
            assert cell.refused[0]
            continue
        assert cell.safe == bool((inside & found.safe).any())
        if cell.safe:
            places = np.flatnonzero(inside & found.safe)
            best = places[np.argmin(found.preferred_seconds[places])]
            assert cell.best.step_seconds == found.step_seconds[best]
        else:
            assert cell.best.device_bytes == int(found.device_bytes[inside].min())
