"""The result of a command, alone on stdout; warnings beside it, each once."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import click

__all__ = ["print_json", "warn_once"]


def print_json(value: Any) -> None:
    """The result alone on stdout."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def warn_once(warnings: Iterable[str]) -> None:
    """On stderr. Several runs of one command share what there is to be warned of."""
    context = click.get_current_context(silent=True)
    said = set() if context is None else context.meta.setdefault("llmlaunch.warned", set())
    for warning in warnings:
        if warning not in said:
            click.echo(f"warning: {warning}", err=True)
        said.add(warning)
