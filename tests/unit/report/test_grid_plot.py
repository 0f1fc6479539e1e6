"""The heat map draws what the search found: one cell for each split and micro-batch size, coloured by its memory."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmlaunch.errors import UserError
from llmlaunch.planner.planning import make_plan, make_sized_plan
from llmlaunch.planner.search import search
from llmlaunch.report.grid_plot import grid_of, grid_svg, write_grid_plot
from llmlaunch.units import GIB
from support.plans import gallery_setting, setting_for
from support.tight import ONE_LAYOUT, RECIPE, hand_made_limit, judge_by, needed_gib

SVG = "{http://www.w3.org/2000/svg}"


def test_a_tight_layout_is_drawn_as_one_that_fits_the_card_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    judge_by(monkeypatch, hand_made_limit(needed_gib() - 2, needed_gib() + 2))
    here, plan = make_sized_plan(gallery_setting(RECIPE, ONE_LAYOUT))
    assert plan.verdict == "tight"
    grid = grid_of(here, search(here, whole=True))
    assert grid.cells
    assert not any(cell.safe for cell in grid.cells.values())


@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        ("llama3-8b", "a100-40gb-x8"),
        ("llama2-7b-deepspeed", "a100-40gb-x8"),
        ("quickstart", ""),
    ],  # the last is split nowhere
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


def test_the_picture_names_the_chosen_cell_its_limit_and_the_rule_of_a_grey_one(tmp_path: Path) -> None:
    here = gallery_setting("llama3-8b", "cluster=a100-40gb-x8")
    plan = make_plan(setting_for(here.recipe))
    write_grid_plot(here, search(here, whole=True), plan, tmp_path / "grid.svg")
    root = ElementTree.parse(tmp_path / "grid.svg").getroot()
    titles = [element.text or "" for element in root.iter(f"{SVG}title")]
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert titles[0] == f"llama3-8b: safe, {plan.chosen.describe()}"
    assert any(title.startswith(f"{plan.chosen.describe()}: ") for title in titles[1:])
    assert any(f"{plan.limit.limit_bytes / GIB:.1f} GiB" in text for text in texts)
    assert "batch" in texts
    assert any("--global-batch-size" in title for title in titles)
    outlined = [e for e in root.iter(f"{SVG}rect") if e.get("stroke-width") == "2.5"]
    assert len(outlined) == 1


def test_every_colour_stands_for_what_the_legend_says() -> None:
    here = gallery_setting("llama3-8b", "cluster=a100-40gb-x8")
    plan = make_plan(setting_for(here.recipe))
    grid = grid_of(here, search(here, whole=True))
    root = ElementTree.fromstring(grid_svg(here.recipe, plan, grid))
    drawn = {}
    for group in root.iter(f"{SVG}g"):
        title, rect = group.find(f"{SVG}title"), group.find(f"{SVG}rect")
        if title is not None and rect is not None:
            drawn[title.text] = rect.get("fill") or ""
    for cell in grid.cells.values():
        if cell.best is None:
            continue
        fill = next(f for title, f in drawn.items() if (title or "").startswith(f"{cell.best.describe()}: "))
        red, green = int(fill[1:3], 16), int(fill[3:5], 16)
        if cell.safe:
            assert green > red
        elif cell.best.device_bytes <= plan.limit.memory_bytes:
            assert fill == "#fce69d"
        else:
            assert red > green + 30


def test_a_name_that_is_markup_is_drawn_as_text(tmp_path: Path) -> None:
    here = gallery_setting("quickstart")
    evil = '<script>alert(1)</script> & "x"\n'
    recipe = replace(here.recipe, name=evil, model=replace(here.recipe.model, name=evil))
    plan = make_plan(setting_for(recipe))
    text = grid_svg(recipe, plan, grid_of(here.with_recipe(recipe), search(here, whole=True)))
    assert "<script" not in text
    assert ElementTree.fromstring(text).find(f"{SVG}title") is not None


def test_only_svg_is_written_and_an_unwritable_place_is_said(tmp_path: Path) -> None:
    here = gallery_setting("quickstart")
    plan, found = make_plan(setting_for(here.recipe)), search(here, whole=True)
    with pytest.raises(UserError, match=r"grid.png: --plot writes SVG; give a name that ends in .svg"):
        write_grid_plot(here, found, plan, tmp_path / "grid.png")
    with pytest.raises(UserError, match="cannot be written"):
        write_grid_plot(here, found, plan, tmp_path / "none" / "grid.svg")


def test_the_same_recipe_gives_the_same_picture() -> None:
    here = gallery_setting("llama3-8b")
    plan = make_plan(setting_for(here.recipe))
    first, second = (grid_svg(here.recipe, plan, grid_of(here, search(here, whole=True))) for _ in range(2))
    assert first == second


def test_a_space_where_nothing_is_safe_is_drawn_too() -> None:
    here = gallery_setting("llama3-70b", "model=llama3-405b", "nodes=1")
    plan = make_plan(setting_for(here.recipe))
    assert "unsafe" in grid_svg(here.recipe, plan, grid_of(here, search(here, whole=True)))
