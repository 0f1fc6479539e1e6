"""Pictures as SVG files, from the templates; what a person or a file named stands in them as text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmlaunch.documents.templates import render
from llmlaunch.documents.writing import write_whole
from llmlaunch.errors import UserError

__all__ = ["svg", "write_svg"]


def svg(template: str, **values: Any) -> str:
    """The template `<template>.svg.j2`, filled in and escaped."""
    return render(f"{template}.svg.j2", values, {}, autoescape=True)


def write_svg(path: Path, drawn: Callable[[], str]) -> None:
    """Draw and write to `path`, whose name ends in .svg; nothing is drawn for another.

    Raises:
        UserError: another ending, or a file that cannot be written.
    """
    if path.suffix.lower() != ".svg":
        raise UserError(f"{path}: --plot writes SVG; give a name that ends in .svg")
    write_whole(path, drawn())
