"""Every template can be replaced by one of the person's own, and all that is rendered comes from a template."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmlaunch.assets import asset
from llmlaunch.rendering.shell import render_template

PACKAGE = Path(__file__).parents[3] / "wrapper" / "llmlaunch"


@pytest.mark.parametrize("name", sorted(path.name for path in asset("templates").glob("*.j2")))
def test_each_template_is_replaced_by_the_persons_own(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_text("echo {{ word }}")
    monkeypatch.setenv("LLMLAUNCH_TEMPLATES", str(tmp_path))
    assert render_template(name, {"word": "a b"}) == "echo 'a b'"


def test_nothing_else_fills_in_templates() -> None:
    """The trainer's chat.py names what goes wrong in a tokenizer's template, which Transformers fills in."""
    jinja = sorted(path.name for path in PACKAGE.rglob("*.py") if "jinja2" in path.read_text().split('"""', 2)[-1])
    assert jinja == ["chat.py", "templates.py"]
