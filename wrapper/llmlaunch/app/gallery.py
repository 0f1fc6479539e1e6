"""The gallery: the shipped recipes that `llmlaunch init` starts from."""

from __future__ import annotations

from pathlib import Path

from llmlaunch.assets import asset

__all__ = ["gallery"]


def gallery() -> dict[str, Path]:
    """Return the shipped recipes by name."""
    return {path.stem: path for path in sorted(asset("recipes").glob("*.yaml"))}
