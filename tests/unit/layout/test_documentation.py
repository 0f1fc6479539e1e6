"""The documentation hangs together: every link leads somewhere, and every page can be reached from the index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"(?m)^#+ (.*)$", page.read_text("utf-8"))
    return {re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[tuple[Path, str]]:
    """Return what a page's relative links lead to: file and anchor, which may be empty."""
    matches = LINK.findall(page.read_text("utf-8"))
    return [((page.parent / path).resolve() if path else page, anchor) for path, anchor in matches if "://" not in path]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {target.name}#{anchor}"


def test_every_page_is_reached_from_the_index() -> None:
    linked = {target for target, _ in links(ROOT / "docs" / "index.md")}
    assert linked >= set((ROOT / "docs").glob("*.md")) - {ROOT / "docs" / "index.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_module_and_test_that_is_named_is_there(page: Path) -> None:
    """Paths of our rooms have one slash; those of other projects that a page cites have more."""
    text = page.read_text("utf-8")
    rooms = {path.name for path in (ROOT / "wrapper" / "llmlaunch").iterdir() if path.is_dir()}
    modules = {path for path in re.findall(r"`([a-z]+/[a-z_]+\.py)`", text) if path.partition("/")[0] in rooms}
    assert [path for path in modules if not (ROOT / "wrapper" / "llmlaunch" / path).exists()] == []
    assert [path for path in set(re.findall(r"`(tests/[a-z_/]+\.py)`", text)) if not (ROOT / path).exists()] == []
