"""`llmlaunch init`: a starter recipe from the gallery, or a profile of the cluster it runs on."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmlaunch.app.gallery import gallery
from llmlaunch.cli.output import notify, print_json, say, say_next
from llmlaunch.cli.waiting import waiting_for
from llmlaunch.documents.likely_meaning import nearest
from llmlaunch.documents.writing import new_place
from llmlaunch.errors import UserError
from llmlaunch.rundir.values import to_type

if TYPE_CHECKING:
    from llmlaunch.cluster.profile_text import Draft, SiteOffer


DEFAULT = "llama3-8b"
CLUSTER_SCHEMA = "llmlaunch-cluster.schema.json"


@click.command("init")
@click.argument("names", metavar="[NAME]", nargs=-1)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write; NAME.yaml here unless given.")
@click.option(
    "--list", "show", is_flag=True, help="List the gallery: sizes, GPUs, backends, what each needs; write nothing."
)
@click.option("--json", "as_json", is_flag=True, help="With --list: as JSON.")
@click.option("--site", is_flag=True, help="Draft a profile of this cluster, as its SLURM describes it.")
@click.option("--partition", metavar="NAME", help="With --site: of this partition's nodes only.")
@click.option(
    "--from",
    "source",
    type=click.Path(path_type=Path),
    help="Read the recipe from a script, sbatch file, ds_config.json or file of training arguments; nothing is run. "
    "NAME and what follows are the script's own arguments.",
)
@click.option("--cluster", metavar="NAME", help="With --from: the cluster, where the script does not name it.")
@click.option(
    "--set", "settings", metavar="NAME=VALUE", multiple=True, help="With --from: what the script leaves open."
)
@click.option("--command", "number", metavar="N", type=int, help="With --from: which of several trainings to read.")
def init_command(
    names: tuple[str, ...],
    output: Path | None,
    show: bool,
    as_json: bool,
    site: bool,
    partition: str | None,
    source: Path | None,
    cluster: str | None,
    settings: tuple[str, ...],
    number: int | None,
) -> int:
    """Write the recipe NAME of the gallery to a file of your own, with comments, what SLURM says of this site, and what
    a job needs that trains for real; with --site, a cluster profile called NAME; with --from, the recipe of a script
    that you have.

    \b
    llmlaunch init --list                     what there is
    llmlaunch init quickstart                 trains on a CPU, in minutes
    llmlaunch init llama3-8b -o mine.yaml
    llmlaunch init --site                     a profile of this cluster
    llmlaunch init --from job.sbatch          of a job that you have

    A file that exists is never written over. Exit code 2: nothing was written. 5: the trainer
    of the script is not read.
    """
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
    if as_json and not show:
        raise UserError("init: --json belongs to --list; add it, or leave it out")
    return _list(as_json) if show else _starter(name or DEFAULT, output)


def _list(as_json: bool) -> int:
    from llmlaunch.app.gallery import gallery_entries

    entries = gallery_entries()
    if as_json:
        print_json({"recipes": [vars(entry) for entry in entries]})
        return 0
    from llmlaunch.report.text import table

    rows = [[entry.name, entry.size, entry.devices, entry.backend, f"{entry.sequence_length:,}"] for entry in entries]
    say(table(("recipe", "model", "nodes x GPUs", "backend", "tokens"), rows, indent=""))
    say(
        "\nmegatron-lm needs a checkout of Megatron-LM, core 0.19, or 0.16 with\n"
        "backend.version; megatron-bridge its package; deepspeed PyTorch, DeepSpeed and\n"
        "Transformers, quickstart PyTorch alone. Each in a container, or in an\n"
        "environment of the nodes. No data: tokens are made up, or Python's own files.\n"
        "What else a real job needs stands in each starter as comments."
    )
    say_next((to_type("init", "quickstart"), "runs on this machine"), (to_type("init", DEFAULT), "for a cluster"))
    return 0


def _starter(name: str, output: Path | None) -> int:
    from llmlaunch.app.starter import EDITOR_SCHEMA, starter_text

    recipes = gallery()
    if name not in recipes:
        near = nearest(name, tuple(recipes), most=3) or list(recipes)
        meant = f"did you mean {' or '.join(near)}?" if len(near) < 4 else f"there are: {', '.join(near)}"
        raise UserError(f"init: no recipe named {name!r} in the gallery; {meant}")
    target = output or Path(f"{name}.yaml")
    _refuse_existing(target)
    _write(target, starter_text(recipes[name], target, _site_offer(recipes[name])).encode())
    notify(f"wrote {target}{_beside(target, EDITOR_SCHEMA, 'recipe')}")
    say_next((to_type("check", target), "will it fit?"))
    return 0


def _site_offer(recipe: Path) -> SiteOffer | None:
    """Return what SLURM has for a recipe of the gallery; None for one that needs no GPU, and where SLURM is silent."""
    from llmlaunch.app.starter import gpu_cluster_of

    cluster = gpu_cluster_of(recipe)
    if cluster is None:
        return None
    if shutil.which("scontrol") is None:
        notify("no SLURM here (scontrol is not on PATH): partition and account are left for you to fill in")
        return None
    from llmlaunch.cluster.profile_text import offer_of
    from llmlaunch.cluster.slurm_site import read_site
    from llmlaunch.launchers.slurm.site import ask_site

    try:
        with waiting_for("asking SLURM for partitions and GPUs"):
            return offer_of(read_site(ask_site(notify)), cluster)
    except UserError as failure:
        reason = str(failure).removeprefix("init --site: ").partition("; try again")[0]
        notify(f"warning: {reason}: partition and account are left for you to fill in")
        return None


def _beside(target: Path, name: str, schema: str) -> str:
    """Write the JSON Schema that the first line of `target` names beside it, and return the end of a sentence on it.
    One that is there is left as it is."""
    from llmlaunch.recipe.key_reference import published_schema
    from llmlaunch.rundir.regular_files import read_bytes

    path = target.parent / name
    text = published_schema(schema).encode()
    try:
        if read_bytes(path, follow=True) != text:
            words = ["schema", *([] if schema == "recipe" else [schema]), "-o", path]
            return f"; {path} is another version's, and `{to_type(*words)}` replaces it"
        return ""
    except FileNotFoundError:
        _write(path, text)
        return f", and {path} for your editor"
    except OSError:
        return f"; {path} cannot be read, so an editor will not check it"


def _from(
    source: Path,
    arguments: tuple[str, ...],
    output: Path | None,
    settings: tuple[str, ...],
    cluster: str | None,
    number: int | None,
) -> int:
    from llmlaunch.cli.scripts import recipe_from_script

    name, text = recipe_from_script(source, arguments, settings, cluster, number)
    target = output or Path(f"{name}.yaml")
    write_recipe(target, text)
    say_next((to_type("check", target), "will it fit?"))
    return 0


def write_recipe(target: Path, text: str) -> None:
    """Write a recipe, and the schema beside it that editors check it by. Raises UserError where the file exists."""
    from llmlaunch.app.starter import EDITOR_SCHEMA

    _write(target, f"# yaml-language-server: $schema={EDITOR_SCHEMA}\n{text}".encode())
    notify(f"wrote {target}{_beside(target, EDITOR_SCHEMA, 'recipe')}")


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
    for target in targets:
        _refuse_existing(target)
    for target, draft in targets.items():
        _write(target, f"# yaml-language-server: $schema={CLUSTER_SCHEMA}\n{draft.text}".encode())
        notify(f"wrote {target}{_beside(target, CLUSTER_SCHEMA, 'cluster')}")
    first = next(iter(targets))
    notify(
        f"read it, fill in what is marked, put it where LLMLAUNCH_CLUSTERS points and name it in recipes: "
        f"cluster: {first.stem}"
    )
    say_next((to_type("init", "--list"), f"a recipe to start from; then write cluster: ./{first.name} in it"))
    return 0


def _profile(name: str | None, draft: Draft, several: bool) -> Path:
    stem = f"{name or draft.cluster}-{draft.kind}" if several or name is None else name
    return Path(re.sub(r"[^A-Za-z0-9._-]", "_", stem) + ".yaml")


def _refuse_existing(target: Path) -> None:
    if os.path.lexists(target):
        raise UserError(f"init: {target} exists and is left as it is; choose another file with -o")


def _write(target: Path, content: bytes) -> None:
    if not target.is_symlink():  # one that exists, as below
        target = new_place(target)
    try:
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        raise UserError(f"init: {target} exists and is left as it is; choose another file with -o") from None
    except OSError as failure:
        raise UserError(f"init: {target} cannot be written ({failure.strerror}); choose another file with -o") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
    except OSError as failure:  # the disk is full
        with contextlib.suppress(OSError):
            target.unlink()
        raise UserError(f"init: {target} cannot be written ({failure.strerror}); choose another file with -o") from None
