"""`llmlaunch plan`: the ranked layouts, what each neighbouring choice would cost, and why the others were refused."""

from __future__ import annotations

from pathlib import Path

import click

from llmlaunch.app.planned_run import plan
from llmlaunch.cli.arguments import placement_lines, recipe_arguments
from llmlaunch.cli.output import notify, print_json

__all__ = ["command"]


@click.command("plan")
@recipe_arguments
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.option("--pareto", "with_front", is_flag=True, help="Also the Pareto front of step time against head-room.")
@click.option("--plot", type=click.Path(path_type=Path), help="Also draw the grid of layouts as a heat map, .svg.")
def command(recipe: str, overrides: tuple[str, ...], as_json: bool, with_front: bool, plot: Path | None) -> int:
    """Show the layouts of RECIPE ranked by step time, what each neighbouring choice would cost, and how many were
    refused for what.

    Exit code 0: safe. 2: the recipe is invalid. 3: no layout is safe.
    """
    run = plan(recipe, overrides, notify)
    neighbours = run.neighbours()
    front = run.pareto_front() if with_front else None
    if plot is not None:
        from llmlaunch.report.grid_plot import write_grid_plot

        write_grid_plot(run.setting, run.search, run.plan, plot)
    if as_json:
        extra = {} if front is None else {"pareto": [candidate.as_json() for candidate in front]}
        print_json(run.json | {"neighbours": [neighbour.as_json() for neighbour in neighbours]} | extra)
    else:
        from llmlaunch.report.plan_text import plan_text
        from llmlaunch.report.text import print_verdict

        print_verdict(plan_text(run.recipe, run.plan, neighbours, front), run.plan.good)
        for line in placement_lines(run):
            click.echo(line)
    run.refuse_unsafe()
    return 0
