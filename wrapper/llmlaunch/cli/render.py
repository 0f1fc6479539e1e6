"""`llmlaunch render`: the run directory, ready for `sbatch job.sbatch`."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from llmlaunch.cli.planned import planned, recipe_arguments
from llmlaunch.cli.printed import print_json

__all__ = ["command"]


@click.command("render")
@recipe_arguments
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder to write; must be new.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def command(recipe: str, overrides: tuple[str, ...], output: Path, as_json: bool) -> int:
    """Plan RECIPE and write its run directory. Nothing is submitted; nothing is written unless it is safe."""
    from llmlaunch.planner.unsafe import refuse

    result = planned(recipe, overrides)
    refuse(result.plan)
    result.warn_of_missing_fallbacks()
    result.warn_of_missing_inputs()
    result.write_run(output)
    if as_json:
        print_json(result.json)
    click.echo(
        f"rendered {output}: {result.plan.layout.describe()}; next: sbatch {shlex.quote(str(output / 'job.sbatch'))}",
        err=True,
    )
    return 0
