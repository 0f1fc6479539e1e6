"""A recipe written to a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str | bytes], Path]:
    """Write a recipe and return its path."""

    def to_file(content: str | bytes) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        return path

    return to_file
