"""`llmlaunch collect`: run directories into the store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmlaunch.cli.printed import print_json

if TYPE_CHECKING:
    from llmlaunch.store.collect import Outcome
    from llmlaunch.store.database import Store

__all__ = ["command"]

UNREADABLE = 2


@click.command("collect")
@click.argument("words", nargs=-1, metavar="[RUN|DIR]...")
@click.option("--json", "as_json", is_flag=True, help="Print what was done about each run as JSON.")
def command(words: tuple[str, ...], as_json: bool) -> int:
    """Take the measured peaks of finished runs into the store: of all known ones, or of those named.

    A named run that is still going on is collected as far as it got. A run directory that was submitted with bare
    `sbatch job.sbatch` becomes known by naming it. Exit code 2: a named one could not be read.
    """
    outcomes = _collected(words)
    if as_json:
        print_json({"runs": [outcome.as_json() for outcome in outcomes]})
    for outcome in outcomes:
        unreadable = outcome.did == "unreadable"
        if unreadable or not as_json:
            click.echo(("error: " if words and unreadable else "") + outcome.sentence(), err=unreadable)
    if not outcomes:
        click.echo("no runs to collect; name a run directory", err=True)
    return UNREADABLE if words and any(outcome.did == "unreadable" for outcome in outcomes) else 0


def _collected(words: tuple[str, ...]) -> list[Outcome]:
    from llmlaunch.store.location import store_exists

    if not words and not store_exists():
        return []
    from llmlaunch.store.collect import collect
    from llmlaunch.store.open import open_store

    with open_store() as store:
        for warning in store.warnings:
            click.echo(f"warning: {warning}", err=True)
        return collect(store, [_directory(store, word) for word in words] if words else None)


def _directory(store: Store, word: str) -> Path:
    """A folder of that name, else the directory of the run that is meant."""
    from llmlaunch.store.runs import find_run

    path = Path(word).expanduser()
    return path if path.is_dir() else find_run(store, word).directory
