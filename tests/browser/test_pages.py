"""The pages of a plan and of a run in a real Chromium: nothing is asked of a network, nothing complains, all can be
read and reached by keyboard, on a phone and on a desk, in light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from llmlaunch.app.run_report import run_report
from llmlaunch.planner.planning import make_plan
from llmlaunch.planner.search import search
from llmlaunch.report.plan_page import write_plan_page
from llmlaunch.report.run_page import write_run_page
from support.browser import FAINT_TEXT, INTERACTIVE, SIZES, Browser
from support.plans import gallery_setting
from support.report_runs import restarted_run
from support.soak import in_soak
from support.store_run_dirs import RunDir

pytestmark = pytest.mark.browser

HOSTILE = "</script><img src=https://example.invalid/x onerror=alert(1)>"
# Keeps the places that had the focus: to ask after each key would take a minute.
NOTES_FOCUS = """
window.reached = new Set();
addEventListener('focusin', (event) => { window.reached.add(Number(event.target.dataset.place)); });
"""
PAGES = ("plan", "run", "empty", "hostile")
SCREENS = (("phone", "light"), ("desktop", "dark"), *in_soak(("phone", "dark"), ("desktop", "light")))
EVERYWHERE = [(page, *screen) for page in PAGES for screen in SCREENS]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("pages")
    setting = gallery_setting("llama3-8b", "cluster=a100-40gb-x8")
    write_plan_page(
        setting, search(setting, whole=True), make_plan(setting), (), "llmlaunch plan r.yaml", place / "plan.html"
    )
    runs = {
        "run": restarted_run(place / "run"),
        "empty": RunDir(place / "empty"),
        "hostile": restarted_run(place / "hostile", name=HOSTILE, overrides=[HOSTILE], backend=HOSTILE),
    }
    for name, run in runs.items():
        write_run_page(run_report(run.path, lambda _: None), f"llmlaunch report {name}", place / f"{name}.html")
    return {name: place / f"{name}.html" for name in PAGES}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.mark.parametrize(("page", "size", "scheme"), EVERYWHERE)
def test_a_page_makes_no_request_fits_the_screen_and_is_legible(
    page: str, size: str, scheme: str, pages: dict[str, Path], browser: Browser
) -> None:
    browser.open(pages[page], size, scheme)
    assert browser.run("return document.documentElement.scrollWidth") <= SIZES[size][0]
    browser.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert browser.run(FAINT_TEXT) == []
    assert browser.run("return document.documentElement.scrollWidth") <= SIZES[size][0]
    assert browser.requests() == [pages[page].as_uri()]
    assert browser.complaints() == []


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("page", ["plan", "run"])
def test_every_control_is_reached_by_tab_and_shows_its_focus(
    page: str, size: str, pages: dict[str, Path], browser: Browser
) -> None:
    browser.open(pages[page], size)
    wanted = browser.run(INTERACTIVE)
    browser.run(NOTES_FOCUS)
    ActionChains(browser.driver).send_keys(Keys.TAB * 3).perform()
    assert browser.run("return document.activeElement.matches(':focus-visible')")
    assert browser.run("return parseFloat(getComputedStyle(document.activeElement).outlineWidth)") >= 2
    ActionChains(browser.driver).send_keys(Keys.TAB * (len(wanted) + 2)).perform()
    assert set(wanted) <= set(browser.run("return [...window.reached]"))


def tip(browser: Browser) -> str:
    return str(browser.run("const tip = document.getElementById('tip'); return tip.hidden ? '' : tip.innerText"))


@pytest.mark.parametrize("size", SIZES)
def test_a_cell_shows_its_terms_on_hover_and_focus(size: str, pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages["plan"], size)
    cell = browser.driver.find_element(By.CSS_SELECTOR, ".cell.chosen")
    assert tip(browser) == ""
    ActionChains(browser.driver).move_to_element(cell).perform()
    assert "activations" in tip(browser)
    assert "chosen" in tip(browser)
    box = browser.run("return document.getElementById('tip').getBoundingClientRect().toJSON()")
    assert box["left"] >= 0
    assert box["right"] <= SIZES[size][0]
    ActionChains(browser.driver).move_to_element(browser.driver.find_element(By.TAG_NAME, "h1")).perform()
    assert tip(browser) == ""
    browser.run("arguments[0].focus()", cell)
    assert "activations" in tip(browser)
    assert cell.get_attribute("aria-describedby") == "tip"
    ActionChains(browser.driver).send_keys(Keys.ESCAPE).perform()
    assert tip(browser) == ""


def test_arrow_keys_walk_through_the_grid_and_the_switch_shows_memory(pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages["plan"])
    cells = browser.driver.find_elements(By.CSS_SELECTOR, ".heat tbody tr:first-child .cell")
    browser.run("arguments[0].focus()", cells[0])
    ActionChains(browser.driver).send_keys(Keys.ARROW_RIGHT).perform()
    assert browser.driver.switch_to.active_element == cells[1]
    shown = browser.run("return document.querySelector('.cell.chosen').innerText")
    assert shown.endswith("s")
    browser.driver.find_element(By.CSS_SELECTOR, "input[value=room]").click()
    assert browser.run("return document.querySelector('.cell.chosen').innerText").startswith("+")


@pytest.mark.parametrize("chart", ["memory-over-time", "loss", "step-time"])
def test_a_curve_shows_its_values_on_hover_and_by_arrow_keys(
    chart: str, pages: dict[str, Path], browser: Browser
) -> None:
    browser.open(pages["run"])
    plot = browser.driver.find_element(By.ID, chart)
    browser.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", plot)
    ActionChains(browser.driver).move_to_element(plot).perform()
    under_pointer = tip(browser)
    assert under_pointer
    ActionChains(browser.driver).move_by_offset(0, -400).perform()
    browser.run("arguments[0].focus()", plot)
    last = tip(browser)
    ActionChains(browser.driver).send_keys(Keys.ARROW_LEFT).perform()
    assert tip(browser) not in ("", last)


def test_a_bar_of_an_attempt_says_why_it_ended(pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages["run"], "phone")
    bar = browser.driver.find_element(By.CSS_SELECTOR, ".bar")
    browser.run("arguments[0].focus()", bar)
    assert "steps made again" in tip(browser)
    assert "as it was logged" in tip(browser)


def test_the_button_switches_the_colours_of_page_and_charts(pages: dict[str, Path], browser: Browser) -> None:
    browser.open(pages["run"], scheme="dark")
    ground = "return getComputedStyle(document.body).backgroundColor"
    dark = browser.run(ground)
    browser.driver.find_element(By.ID, "scheme").click()
    light = browser.run(ground)
    assert dark != light
    assert browser.run(FAINT_TEXT) == []
    browser.driver.find_element(By.ID, "scheme").click()
    assert browser.run(ground) == dark


def test_no_script_but_the_pages_own_can_run(pages: dict[str, Path], browser: Browser, tmp_path: Path) -> None:
    """Even markup that reached the page would do nothing: the policy names one script by its digest."""
    forged = tmp_path / "forged.html"
    text = pages["run"].read_text("utf-8")
    forged.write_text(text.replace("<h1>", "<script>window.forged = 1</script><img src=x onerror='forged = 1'><h1>"))
    browser.open(forged)
    assert browser.run("return window.forged === undefined")
    assert browser.complaints()
