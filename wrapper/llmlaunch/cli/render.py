"""`llmlaunch render` and `explain-args`: what a recipe becomes, before anything is submitted."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from llmlaunch.cli.next_steps import run_path
from llmlaunch.cli.output import notify, print_json, say, say_next
from llmlaunch.cli.planning import planned, recipe_arguments, replan_option, warn_of_readiness
from llmlaunch.cli.waiting import waiting_for
from llmlaunch.errors import UserError
from llmlaunch.rundir import file_names
from llmlaunch.rundir.values import to_type


@click.command("render")
@recipe_arguments
@replan_option
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder to write; must be new.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def render_command(recipe: str, overrides: tuple[str, ...], replan: bool, output: Path, as_json: bool) -> int:
    """Plan RECIPE and write its run directory. Nothing is submitted; nothing is written unless it is safe, or tight and
    accepted.

    \b
    llmlaunch render recipe.yaml -o run   then: sbatch run/job.sbatch

    Exit code 0: written. 2: the recipe is invalid, or the folder is there already. 3: no layout is safe. 5:
    no verdict.
    """
    from llmlaunch.app.variants import warn_of_memory

    run = planned(recipe, overrides, replan)
    run.refuse_unsafe()
    warn_of_memory(run, notify)
    warn_of_readiness(run)
    with waiting_for(f"writing {output}"):  # the files of a large snapshot are hashed
        run.write(output, notify)
    if as_json:
        print_json(run.json)
    notify(f"rendered {output}: {run.layout.describe()}")
    if not as_json:
        bare = f"sbatch {shlex.quote(str(output / file_names.JOB_SCRIPT))}"
        say_next(
            (to_type("resume", run_path(output.resolve())), "submits it, and records it"), (bare, "without llmlaunch")
        )
    return 0


@click.command("explain-args")
@click.argument("run", metavar="RUN|DIR")
@click.argument("names", metavar="[NAME...]", nargs=-1)
@click.option("--fallback", type=click.IntRange(min=1), metavar="K", help="Of the K-th layout to fall back on.")
@click.option("--json", "as_json", is_flag=True, help="Print the entries as JSON.")
def explain_args_command(run: str, names: tuple[str, ...], fallback: int | None, as_json: bool) -> int:
    """Say for every argument, variable, setting and directive rendered for RUN which line of the recipe or which
    decision of the planner it follows from; or for those NAMEs alone, with or without their dashes.

    \b
    llmlaunch explain-args last
    llmlaunch explain-args last tensor-model-parallel-size
    """
    from llmlaunch.app.run_lookup import directory_of
    from llmlaunch.rendering.arguments_json import read_arguments
    from llmlaunch.report.explained_text import explained_text

    directory = directory_of(run, notify)
    arguments = read_arguments(directory / f"fallback/{fallback}" if fallback else directory)
    entries = arguments["entries"]
    if names:
        wanted = {name.lstrip("-") for name in names}
        entries = [entry for entry in entries if _argument_names(entry["name"]) & wanted]
        rendered_names = set().union(*(_argument_names(entry["name"]) for entry in arguments["entries"]))
        for name in sorted(wanted - rendered_names):
            raise UserError(
                f"{name}: nothing of that name is rendered in {directory}; {_nearest(name, rendered_names)}"
            )
    if as_json:
        print_json({"program": arguments["program"], "entries": entries})
    else:
        say(explained_text(arguments["program"], entries))
    return 0


def _nearest(name: str, rendered_names: set[str]) -> str:
    """Return the rendered names that a person may have meant, also by another tool's name for the same."""
    from llmlaunch.documents.likely_meaning import nearest

    near = nearest(name, sorted(rendered_names), most=3)
    return f"did you mean {' or '.join(near)}?" if near else "without a NAME all that is rendered is listed"


def _argument_names(name: str) -> set[str]:
    """As rendered without its dashes, and the last part of a dotted setting."""
    return {name.lstrip("-"), name.rpartition(".")[2].lstrip("-")}
