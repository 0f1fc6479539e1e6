"""The result of a command, alone on stdout."""

from __future__ import annotations

import json
from typing import Any

import click

__all__ = ["print_json"]


def print_json(value: Any) -> None:
    """The result alone on stdout."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))
