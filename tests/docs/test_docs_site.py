"""The documentation is a site that builds strictly, says what the code says, and needs nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.interface_tables import command_reference, python_reference

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does; any warning of MkDocs fails it."""
    folder = tmp_path_factory.mktemp("site")
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_of_the_docs_is_on_the_site(site: Path) -> None:
    expected = {page.relative_to(DOCS).with_suffix(".html") for page in DOCS.glob("*.md")}
    assert expected <= {page.relative_to(site) for page in site.rglob("*.html")}


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    loads = re.compile(r"<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=\"?((?:https?:)?//[^\"\s>]+)")
    for page in site.rglob("*.html"):
        assert [url for url in loads.findall(page.read_text("utf-8")) if "rel=canonical" not in url] == [], page.name


def test_lists_tables_and_code_that_follow_a_sentence_at_once_stand_apart(site: Path) -> None:
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
