"""Pictures as SVG files, from the templates; what a person or a file named stands in them as text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from llmlaunch.assets import asset
from llmlaunch.errors import UserError

__all__ = ["svg", "write_svg"]


def svg(template: str, **values: Any) -> str:
    """The template `<template>.svg.j2`, filled in and escaped."""
    environment = Environment(
        loader=FileSystemLoader(asset("templates")), undefined=StrictUndefined, autoescape=True, trim_blocks=True
    )
    return environment.get_template(f"{template}.svg.j2").render(**values)


def write_svg(path: Path, drawn: Callable[[], str]) -> None:
    """Draw and write to `path`, whose name ends in .svg; nothing is drawn for another.

    Raises:
        UserError: another ending, or a file that cannot be written.
    """
    if path.suffix.lower() != ".svg":
        raise UserError(f"{path}: --plot writes SVG; give a name that ends in .svg")
    text = drawn()
    try:
        path.write_text(text, "utf-8")
    except OSError as failure:
        raise UserError(f"{path}: the plot cannot be written: {failure.strerror}") from None
