"""`llmlaunch collect`: run directories into the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from llmlaunch.app.run_lookup import directory_of
from llmlaunch.cli.output import notify, print_json, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmlaunch.sinks.delivery import Chosen, Passed
    from llmlaunch.store.collect import Outcome

__all__ = ["command"]

UNREADABLE = 2


@click.command("collect")
@click.argument("words", nargs=-1, metavar="[RUN|DIR]...")
@click.option(
    "--sink",
    "sinks",
    multiple=True,
    metavar="NAME[=PLACE]",
    help="Pass on to this sink alone: prometheus, mlflow, wandb.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was done about each run as JSON.")
def command(words: tuple[str, ...], sinks: tuple[str, ...], as_json: bool) -> int:
    """Take the measured peaks of finished runs into the store: of all known ones, or of those named.

    A named run that is still going on is collected as far as it got. A run directory that was submitted with bare
    `sbatch job.sbatch` becomes known by naming it. Exit code 2: a named one could not be read.

    What was collected is then passed on to the sinks of LLMLAUNCH_PROMETHEUS, LLMLAUNCH_MLFLOW and LLMLAUNCH_WANDB, or
    those named.
    """
    from llmlaunch.sinks.delivery import chosen_sinks

    outcomes, passed = _collected(words, chosen_sinks(sinks))
    if as_json:
        sinks_json = {"sinks": [delivery.as_json() for delivery in passed]} if passed else {}
        print_json({"runs": [outcome.as_json() for outcome in outcomes], **sinks_json})
    for outcome in outcomes:
        unreadable = outcome.did == "unreadable"
        if unreadable or not as_json:
            say(("error: " if words and unreadable else "") + outcome.sentence(), err=unreadable)
    for delivery in passed:
        if sentence := delivery.sentence():
            say(sentence, err=as_json or delivery.why is not None)
    if not outcomes:
        notify("no runs to collect; name a run directory")
    return UNREADABLE if words and any(outcome.did == "unreadable" for outcome in outcomes) else 0


def _collected(words: tuple[str, ...], sinks: Sequence[Chosen]) -> tuple[list[Outcome], list[Passed]]:
    from llmlaunch.store.location import store_exists

    if not words and not store_exists():
        return [], []
    from llmlaunch.sinks.delivery import pass_on
    from llmlaunch.store.collect import collect
    from llmlaunch.store.database import open_store

    directories = [directory_of(word) for word in words] if words else None
    with open_store() as store:
        for warning in store.warnings:
            notify(f"warning: {warning}")
        outcomes = collect(store, directories)
        only = {outcome.run_id for outcome in outcomes if outcome.run_id} if words else None
        return outcomes, pass_on(store, sinks, only)
