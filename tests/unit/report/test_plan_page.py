"""A plan's page says what the plan says, loads nothing, and takes whatever a recipe holds as text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.errors import UserError
from llmlaunch.planner.neighbours import neighbours
from llmlaunch.planner.plan import Plan, as_planned
from llmlaunch.planner.planning import make_plan, make_sized_plan
from llmlaunch.planner.search import search
from llmlaunch.planner.setting import Setting
from llmlaunch.report.grid import grid_of
from llmlaunch.report.plan_page import plan_page, write_plan_page
from llmlaunch.units import gib
from support.page_elements import Elements
from support.plans import gallery_setting
from support.soak import in_soak
from support.tight import ONE_LAYOUT, RECIPE, hand_made_limit, judge_by, needed_gib

HOSTILE = "</script><img src=x onerror=alert(1)>&\"'"


FEW = (
    "context: 1, layers_by_stage: even, recompute: [none, full], offload_modules: [], offload_layers: 0, "
    "offload_optimizer: 0, techniques: asked"
)


def drawn(setting: Setting, plan: Plan | None = None) -> str:
    plan = plan or make_plan(setting)
    result = search(setting, whole=True)
    planned = setting.with_recipe(as_planned(setting.recipe, plan.chosen))
    return plan_page(setting, result, plan, neighbours(planned, plan.layout), "llmlaunch plan r.yaml --html p.html")


@cache
def small() -> tuple[Setting, Plan, str]:
    setting = gallery_setting("llama3-8b", "cluster=a100-40gb-x8", f"layout={{{FEW}}}")
    plan = make_plan(setting)
    return setting, plan, drawn(setting, plan)


def data_of(html: str) -> Any:
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert text is not None
    return json.loads(text[1])


def test_every_cell_of_the_grid_can_be_focused_and_says_its_verdict_in_words() -> None:
    setting, _, page = small()
    grid = grid_of(setting, search(setting, whole=True))
    cells = [each for each in Elements(page).of("button") if "data-cell" in each]
    assert len(cells) == len(grid.cells)
    words = {
        word for cell in cells for word in ("safe", "tight", "unsafe", "refused") if word in str(cell["aria-label"])
    }
    assert {"safe", "refused"} <= words
    (chosen,) = [cell for cell in cells if "chosen" in str(cell["class"])]
    assert "chosen" in str(chosen["aria-label"])


def test_a_cell_tells_the_terms_of_memory_that_make_its_peak() -> None:
    _, plan, page = small()
    data = data_of(page)
    (cell,) = [each for each in data["cells"] if each["title"] == plan.chosen.describe()]
    told = {data["terms"][number]: size for number, size in cell["terms"]}
    assert told["activations"] == gib(plan.estimate.worst.terms["activations"])
    assert any(f"{gib(plan.chosen.device_bytes)} GiB" in row for row in cell["rows"])


def test_it_names_the_limit_the_ranking_the_refusals_the_recipe_and_the_command() -> None:
    setting, plan, page = small()
    text = " ".join(Elements(page).texts)
    for words in (
        gib(plan.limit.limit_bytes),
        gib(plan.limit.memory_bytes),
        plan.chosen.describe(),
        plan.alternatives[0].describe(),
        next(iter(plan.refused)),
        plan.refusal_sentences[next(iter(plan.refused))],
        "llmlaunch plan r.yaml --html p.html",
        setting.recipe.text.splitlines()[0],
    ):
        assert words in text


def test_nothing_is_loaded_and_no_script_runs_but_its_own() -> None:
    _, _, html = small()
    elements = Elements(html)
    (policy,) = [each["content"] or "" for each in elements.of("meta") if each.get("http-equiv")]
    assert "default-src 'none'" in policy
    scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert [f"'sha256-{digest}'" for digest in digests] == re.findall(r"script-src ([^;]*);", policy)
    assert "unsafe" not in policy
    for _, attributes in elements.found:
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "srcset", "action")]
        assert str(attributes.get("href", "#")).startswith(("#", "data:,"))
    assert "http://" not in html.replace("http://www.w3.org/2000/svg", "")


def test_what_a_recipe_says_stays_text() -> None:
    setting = gallery_setting("quickstart")
    html = drawn(setting.with_recipe(replace(setting.recipe, name=HOSTILE, text=HOSTILE)))
    elements = Elements(html)
    assert elements.of("img") == []
    assert len(elements.of("script")) == 2
    assert " ".join(elements.texts).count(HOSTILE) > 1
    data_of(html)


def test_a_secret_of_the_recipe_is_not_shown() -> None:
    setting = gallery_setting("quickstart")
    html = drawn(setting.with_recipe(replace(setting.recipe, text="environment: {API_KEY: abcdefgh12345}\n")))
    assert "abcdefgh12345" not in html


def test_a_tight_plan_and_one_that_fits_nowhere_have_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "unsafe: it does not fit" in drawn(gallery_setting("llama3-70b", "nodes=1", f"layout={{{FEW}}}"))
    judge_by(monkeypatch, hand_made_limit(needed_gib() - 2, needed_gib() + 2))
    setting, plan = make_sized_plan(gallery_setting(RECIPE, ONE_LAYOUT))
    page = plan_page(setting, search(setting, whole=True), plan, (), "llmlaunch plan r.yaml")
    assert "tight (risk not known): it fits the card" in page


@pytest.mark.parametrize("name", ["llama3-405b", *in_soak("deepseek-v3")])
def test_it_stays_small_where_the_space_is_large(name: str) -> None:
    """The grid of either has 224 cells."""
    assert len(drawn(gallery_setting(name, "layout={recompute: full, techniques: asked}"))) < 600_000


def test_another_ending_is_refused_before_anything_is_drawn(tmp_path: Path) -> None:
    setting = gallery_setting("quickstart")
    with pytest.raises(UserError, match=r"p\.pdf: --html writes a page for a browser; give a name that ends in \.html"):
        write_plan_page(setting, search(setting, whole=True), make_plan(setting), (), "", tmp_path / "p.pdf")


def test_the_same_recipe_gives_the_same_page() -> None:
    assert drawn(gallery_setting("quickstart")) == drawn(gallery_setting("quickstart"))
