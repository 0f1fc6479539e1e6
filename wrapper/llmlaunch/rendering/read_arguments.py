"""arguments.json read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmlaunch.errors import UserError
from llmlaunch.rundir.files import object_in

__all__ = ["read_arguments"]

SCHEMA = 1


def read_arguments(directory: Path) -> dict[str, Any]:
    """Raises UserError where there is none, or none this llmlaunch can read."""
    path = directory / "arguments.json"
    try:
        value = object_in(path)
    except FileNotFoundError:
        raise UserError(
            f"{directory}: holds no arguments.json: it is no run directory, or an older llmlaunch rendered it; render "
            "the recipe again"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}; render the recipe again") from error
    if value.get("schema") != SCHEMA:
        raise UserError(f"{path}: this llmlaunch reads schema {SCHEMA}; use the version that rendered it")
    return value
