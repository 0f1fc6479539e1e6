"""The result of a command, alone on stdout; warnings beside it, each once."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import click

from llmlaunch.rundir.identifiers import printable

__all__ = ["print_json", "say", "warn_once"]


def say(text: object, err: bool = False) -> None:
    """Write a line to stdout, or to stderr. What a terminal would obey in it has come from a file, and is left out."""
    click.echo(printable(str(text)), err=err)


def print_json(value: Any) -> None:
    """The result alone on stdout, in ASCII: JSON's own escapes stand for what a terminal would obey."""
    click.echo(json.dumps(value, indent=2))


def warn_once(warnings: Iterable[str]) -> None:
    """On stderr. Several runs of one command share what there is to be warned of."""
    context = click.get_current_context(silent=True)
    said = set() if context is None else context.meta.setdefault("llmlaunch.warned", set())
    for warning in warnings:
        if warning not in said:
            say(f"warning: {warning}", err=True)
        said.add(warning)
