"""`llmlaunch init`: a starter recipe from the gallery, or a profile of the cluster it runs on."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmlaunch.app.gallery import gallery
from llmlaunch.cli.output import notify, say
from llmlaunch.documents.writing import new_place
from llmlaunch.errors import UserError
from llmlaunch.rundir.values import to_type

if TYPE_CHECKING:
    from llmlaunch.cluster.profile_text import Draft

__all__ = ["init_command"]

DEFAULT = "llama3-8b"


@click.command("init")
@click.argument("names", metavar="[NAME]", nargs=-1)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write; NAME.yaml here unless given.")
@click.option("--list", "show", is_flag=True, help="List the gallery and write nothing.")
@click.option("--site", is_flag=True, help="Draft a profile of this cluster, as its SLURM describes it.")
@click.option("--partition", metavar="NAME", help="With --site: of this partition's nodes only.")
@click.option(
    "--from",
    "source",
    type=click.Path(path_type=Path),
    help="Read the recipe from a script, sbatch file, ds_config.json or file of training arguments; nothing is run. "
    "NAME and what follows are the script's own arguments.",
)
@click.option("--cluster", metavar="NAME", help="With --from: the cluster, where the script does not tell it.")
@click.option(
    "--set", "settings", metavar="NAME=VALUE", multiple=True, help="With --from: what the script leaves open."
)
@click.option("--command", "number", metavar="N", type=int, help="With --from: which of several trainings to read.")
def init_command(
    names: tuple[str, ...],
    output: Path | None,
    show: bool,
    site: bool,
    partition: str | None,
    source: Path | None,
    cluster: str | None,
    settings: tuple[str, ...],
    number: int | None,
) -> int:
    """Write the recipe NAME of the gallery to a file of your own; with --site, a cluster profile called NAME; with
    --from, the recipe of a script that you have."""
    if source is not None:
        return _from(source, names, output, settings, cluster, number)
    for option, value in (("--cluster", cluster), ("--set", settings), ("--command", number)):
        if value:
            raise UserError(f"init: {option} belongs to --from; add it, or leave it out")
    if len(names) > 1:
        raise UserError(f"init: one NAME, not {len(names)}; the arguments of a script go with --from FILE")
    name = next(iter(names), None)
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


def _from(
    source: Path,
    arguments: tuple[str, ...],
    output: Path | None,
    settings: tuple[str, ...],
    cluster: str | None,
    number: int | None,
) -> int:
    from llmlaunch.cli.init_from import recipe_from_script

    name, text = recipe_from_script(source, arguments, settings, cluster, number)
    target = output or Path(f"{name}.yaml")
    _write(target, text.encode())
    say(f"wrote {target}; next: {to_type('check', target)}", err=True)
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
