"""`llmlaunch plan`: the ranked layouts, what each neighbouring choice would cost, and why the others were refused."""

from __future__ import annotations

from pathlib import Path

import click

from llmlaunch.cli.planned import planned, recipe_arguments
from llmlaunch.cli.printed import print_json
from llmlaunch.planner.search import search

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
    from llmlaunch.planner.neighbours import neighbours
    from llmlaunch.planner.plan_json import candidates_json, neighbours_json
    from llmlaunch.planner.search import pareto
    from llmlaunch.planner.unsafe import refuse
    from llmlaunch.report.console import print_verdict
    from llmlaunch.report.plan_text import plan_text

    result = planned(recipe, overrides)
    plan, setting = result.plan, result.setting
    near = neighbours(setting.with_recipe(result.recipe), plan.layout)
    searched = search(setting) if with_front or plot is not None else None
    front = None
    if searched is not None and with_front:
        front = [searched.at(setting.recipe, int(row)) for row in pareto(searched)]
    if searched is not None and plot is not None:
        from llmlaunch.report.grid_plot import write_grid_plot

        write_grid_plot(setting, searched, plan, plot)
    if as_json:
        extra = {} if front is None else {"pareto": candidates_json(front)}
        print_json(result.json | {"neighbours": neighbours_json(near)} | extra)
    else:
        print_verdict(plan_text(result.recipe, plan, near, front), plan.good)
        for line in result.placement_lines:
            click.echo(line)
    refuse(plan)
    return 0
