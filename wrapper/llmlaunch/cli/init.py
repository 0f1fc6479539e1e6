"""`llmlaunch init`: a starter recipe from the gallery."""

from __future__ import annotations

import os
from pathlib import Path

import click

from llmlaunch.assets import asset
from llmlaunch.errors import UserError

__all__ = ["command"]

DEFAULT = "llama3-8b"


def gallery() -> dict[str, Path]:
    """The shipped recipes by name."""
    return {path.stem: path for path in sorted(asset("recipes").glob("*.yaml"))}


@click.command("init")
@click.argument("name", required=False, default=DEFAULT)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write; NAME.yaml here unless given.")
@click.option("--list", "show", is_flag=True, help="List the gallery and write nothing.")
def command(name: str, output: Path | None, show: bool) -> int:
    """Write the recipe NAME of the gallery to a file of your own."""
    recipes = gallery()
    if show:
        click.echo("\n".join(recipes))
        return 0
    if name not in recipes:
        raise UserError(f"init: no recipe named {name!r} in the gallery; there are: {', '.join(recipes)}")
    target = output or Path(f"{name}.yaml")
    try:
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        raise UserError(f"init: {target} exists and is left as it is; choose another file with -o") from None
    except OSError as failure:
        raise UserError(f"init: {target} cannot be written ({failure.strerror}); choose another file with -o") from None
    with os.fdopen(handle, "wb") as file:
        file.write(recipes[name].read_bytes())
    click.echo(f"wrote {target}; next: llmlaunch check {target}", err=True)
    return 0
