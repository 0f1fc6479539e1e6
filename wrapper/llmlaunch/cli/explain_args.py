"""`llmlaunch explain-args`: what each rendered argument and variable of a run follows from."""

from __future__ import annotations

import click

from llmlaunch.app.run_lookup import directory_of
from llmlaunch.cli.output import print_json, say
from llmlaunch.errors import UserError

__all__ = ["command"]


@click.command("explain-args")
@click.argument("run", metavar="RUN|DIR")
@click.argument("names", metavar="[NAME...]", nargs=-1)
@click.option("--fallback", type=click.IntRange(min=1), metavar="K", help="Of the K-th layout to fall back on.")
@click.option("--json", "as_json", is_flag=True, help="Print the entries as JSON.")
def command(run: str, names: tuple[str, ...], fallback: int | None, as_json: bool) -> int:
    """Say for every argument, variable, setting and directive rendered for RUN which line of the recipe or which
    decision of the planner it follows from; or for those NAMEs alone, with or without their dashes.
    """
    from llmlaunch.rendering.arguments_json import read_arguments
    from llmlaunch.report.plan_text import explained_text

    directory = directory_of(run)
    arguments = read_arguments(directory / f"fallback/{fallback}" if fallback else directory)
    entries = arguments["entries"]
    if names:
        wanted = {name.lstrip("-") for name in names}
        entries = [entry for entry in entries if _names(entry["name"]) & wanted]
        rendered_names = set().union(*(_names(entry["name"]) for entry in arguments["entries"]))
        if wanted - rendered_names:
            raise UserError(
                f"{', '.join(sorted(wanted - rendered_names))}: nothing of that name is rendered in {directory}"
            )
    if as_json:
        print_json({"program": arguments["program"], "entries": entries})
    else:
        say(explained_text(arguments["program"], entries))
    return 0


def _names(name: str) -> set[str]:
    """As rendered without its dashes, and the last part of a dotted setting."""
    return {name.lstrip("-"), name.rpartition(".")[2].lstrip("-")}
