"""`llmlaunch render`: the run directory, ready for `sbatch job.sbatch`."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from llmlaunch.app.planned_run import plan
from llmlaunch.app.variants import warn_of_missing_fallbacks
from llmlaunch.cli.arguments import recipe_arguments, warn_of_inputs
from llmlaunch.cli.output import notify, print_json
from llmlaunch.rundir import file_names

__all__ = ["command"]


@click.command("render")
@recipe_arguments
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder to write; must be new.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def command(recipe: str, overrides: tuple[str, ...], output: Path, as_json: bool) -> int:
    """Plan RECIPE and write its run directory. Nothing is submitted; nothing is written unless it is safe."""
    run = plan(recipe, overrides, notify)
    run.refuse_unsafe()
    warn_of_missing_fallbacks(run, notify)
    warn_of_inputs(run)
    run.write(output, notify)
    if as_json:
        print_json(run.json)
    notify(
        f"rendered {output}: {run.layout.describe()}; next: sbatch {shlex.quote(str(output / file_names.JOB_SCRIPT))}"
    )
    return 0
