"""`llmlaunch init`: a starter recipe from the gallery, or a profile of the cluster it runs on."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmlaunch.assets import asset
from llmlaunch.cli.output import notify
from llmlaunch.documents.writing import new_place
from llmlaunch.errors import UserError
from llmlaunch.rundir.values import to_type

if TYPE_CHECKING:
    from llmlaunch.cluster.profile_text import Draft

__all__ = ["init_command"]

DEFAULT = "llama3-8b"


def gallery() -> dict[str, Path]:
    """The shipped recipes by name."""
    return {path.stem: path for path in sorted(asset("recipes").glob("*.yaml"))}


@click.command("init")
@click.argument("name", required=False)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write; NAME.yaml here unless given.")
@click.option("--list", "show", is_flag=True, help="List the gallery and write nothing.")
@click.option("--site", is_flag=True, help="Draft a profile of this cluster, as its SLURM describes it.")
@click.option("--partition", metavar="NAME", help="With --site: of this partition's nodes only.")
def init_command(name: str | None, output: Path | None, show: bool, site: bool, partition: str | None) -> int:
    """Write the recipe NAME of the gallery to a file of your own; with --site, a cluster profile called NAME."""
    if site:
        return _site(name, output, partition)
    if partition is not None:
        raise UserError("init: --partition belongs to --site; add it, or leave it out")
    recipes = gallery()
    if show:
        click.echo("\n".join(recipes))
        return 0
    name = name or DEFAULT
    if name not in recipes:
        raise UserError(f"init: no recipe named {name!r} in the gallery; there are: {', '.join(recipes)}")
    target = output or Path(f"{name}.yaml")
    _write(target, recipes[name].read_bytes())
    click.echo(f"wrote {target}; next: {to_type('check', target)}", err=True)
    return 0


def _site(name: str | None, output: Path | None, partition: str | None) -> int:
    from llmlaunch.cluster.profile_text import drafts
    from llmlaunch.cluster.slurm_site import read_site
    from llmlaunch.launchers.slurm.site import ask_site

    profiles = drafts(read_site(ask_site(notify)), partition)
    if output is not None and len(profiles) > 1:
        kinds = ", ".join(draft.kind for draft in profiles)
        raise UserError(
            f"init --site: there are several kinds of nodes ({kinds}), and one file holds one; choose with "
            "--partition, or leave out -o to have a file for each"
        )
    targets = {output or _profile(name, draft, len(profiles) > 1): draft for draft in profiles}
    for existing in filter(Path.exists, targets):
        raise UserError(f"init: {existing} exists and is left as it is; choose another file with -o")
    for target, draft in targets.items():
        _write(target, draft.text.encode())
    written = " and ".join(map(str, targets))
    click.echo(
        f"wrote {written}; read it, fill in what is marked, put it where LLMLAUNCH_CLUSTERS points and name it in "
        f"recipes: cluster: {next(iter(targets)).stem}",
        err=True,
    )
    return 0


def _profile(name: str | None, draft: Draft, several: bool) -> Path:
    stem = f"{name or draft.cluster}-{draft.kind}" if several or name is None else name
    return Path(re.sub(r"[^A-Za-z0-9._-]", "_", stem) + ".yaml")


def _write(target: Path, content: bytes) -> None:
    if not target.is_symlink():  # one that exists, as below
        target = new_place(target)
    try:
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        raise UserError(f"init: {target} exists and is left as it is; choose another file with -o") from None
    except OSError as failure:
        raise UserError(f"init: {target} cannot be written ({failure.strerror}); choose another file with -o") from None
    with os.fdopen(handle, "wb") as file:
        file.write(content)
