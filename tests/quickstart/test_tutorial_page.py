"""The tutorial of the docs, typed from beginning to end: what it shows is what llmlaunch prints."""

from __future__ import annotations

import pytest

from support.command_line import data_folders
from support.screens import missing_words
from support.snippets import DOCS, walk

pytestmark = pytest.mark.frameworks


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the tutorial's pictures show, as printed here; its training runs for real."""
    folder = tmp_path_factory.mktemp("tutorial")
    return walk(DOCS / "tutorial.md", folder, **data_folders(folder))


def test_the_tutorial_can_be_typed_and_trains(printed: dict[str, str]) -> None:
    assert "succeeded" in printed["tutorial-submit"]
    assert "quickstart" in printed["tutorial-runs"]


def test_its_pictures_show_what_is_printed(printed: dict[str, str]) -> None:
    for name in ("tutorial-check", "tutorial-mistake"):
        assert missing_words(name, printed[name]) == set(), f"{name} is old: make docs-screens"
