"""The documentation is a site that builds strictly, says what the code says, and needs nothing from elsewhere."""

from __future__ import annotations

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.browser import Browser
from support.interface_tables import command_reference, python_reference
from support.soak import in_soak

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def build(settings: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(settings), "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does; any warning of MkDocs fails it."""
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    """By the site's own settings, of one page instead of all."""
    settings = re.sub(r"(?ms)^(nav|hooks):.*?(?=^\S|\Z)", "", (ROOT / "mkdocs.yml").read_text("utf-8"))
    (tmp_path / "mkdocs.yml").write_text(settings)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# Home\n\n[gone](no-such-page.md)\n")
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "no-such-page.md" in done.stderr


class QuietServer(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The site, served on this machine."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(QuietServer, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    """One that knows no palette of an earlier test."""
    opened = Browser(tmp_path / "profile")
    yield opened
    opened.close()


def test_every_page_of_the_docs_is_on_the_site(site: Path) -> None:
    expected = {page.relative_to(DOCS).with_suffix(".html") for page in DOCS.glob("*.md")}
    assert expected <= {page.relative_to(site) for page in site.rglob("*.html")}


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    loads = re.compile(r"<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=\"?((?:https?:)?//[^\"\s>]+)")
    for page in site.rglob("*.html"):
        assert [url for url in loads.findall(page.read_text("utf-8")) if "rel=canonical" not in url] == [], page.name


def test_lists_and_tables_right_after_a_sentence_are_rendered_as_such(site: Path) -> None:
    for page in site.glob("*.html"):
        words = re.sub(r"(?s)<(pre|code|script|style)\b.*?</\1>", "", page.read_text("utf-8"))
        paragraphs = re.findall(r"(?s)<p>(.*?)</p>", words)
        assert [text for text in paragraphs if re.search(r"(?m)^(\||- |\d\. )", text)] == [], page.name


@pytest.mark.parametrize(
    ("page", "reference"),
    [("commands.md", command_reference), ("python-reference.md", python_reference)],
)
def test_references_made_from_the_code_are_current(page: str, reference: object) -> None:
    assert callable(reference)
    assert (DOCS / page).read_text("utf-8") == reference(), "make docs-tables"


@pytest.mark.browser
@pytest.mark.parametrize(("size", "colours"), [("phone", "light"), ("desktop", "dark")])
def test_pages_open_without_errors_or_outside_requests_and_fit_the_screen(
    address: str, browser: Browser, size: str, colours: str
) -> None:
    wanted = "slate" if colours == "dark" else "default"
    for page in ("index.html", "tutorial.html", "commands.html", "overview.html", "megatron-rules.html"):
        browser.open(f"{address}/{page}", size, colours)
        assert browser.driver.find_element("tag name", "h1").is_displayed()
        wait(browser, lambda: browser.run("return document.body.dataset.mdColorScheme") == wanted)
        overflow = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert browser.run(overflow) <= 0, f"{page} is wider than a {size}"
        wait(browser, lambda: browser.run("return [...document.images].every(image => image.complete)"))
        pictures = "return [...document.images].filter(image => !image.naturalWidth).map(image => image.src)"
        assert browser.run(pictures) == [], page
        assert browser.complaints() == [], page
        assert [url for url in browser.requests() if not url.startswith((address, "blob:"))] == [], page


@pytest.mark.browser
@pytest.mark.parametrize("size", ["phone", *in_soak("desktop")])
def test_search_leads_to_a_page(address: str, browser: Browser, size: str) -> None:
    browser.open(f"{address}/index.html", size)
    driver = browser.driver
    if size == "phone":
        driver.find_element("css selector", "label.md-header__button[for=__search]").click()
    field = driver.find_element("css selector", "input.md-search__input")
    wait(browser, field.is_displayed)
    field.send_keys("watchdog")
    results = "li.md-search-result__item a"
    wait(browser, lambda: driver.find_elements("css selector", results))
    wait(browser, lambda: driver.find_element("css selector", results).is_displayed())
    driver.find_element("css selector", results).click()
    wait(browser, lambda: "watchdog" in driver.current_url)


def wait(browser: Browser, condition: Any) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser.driver, 60).until(lambda _: condition())
