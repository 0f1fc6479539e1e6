"""`llmlaunch plan`: the ranked layouts, and why the others were refused."""

from __future__ import annotations

import click

from llmlaunch.cli.planned import planned, print_json, recipe_arguments

__all__ = ["command"]


@click.command("plan")
@recipe_arguments
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def command(recipe: str, overrides: tuple[str, ...], as_json: bool) -> int:
    """Show the layouts of RECIPE ranked by step time, and how many were refused for what."""
    from llmlaunch.planner.unsafe import refuse
    from llmlaunch.report.console import print_verdict
    from llmlaunch.report.plan_text import plan_text

    result = planned(recipe, overrides)
    if as_json:
        print_json(result.json)
    else:
        print_verdict(plan_text(result.recipe, result.plan), result.plan.good)
        for line in result.placement_lines:
            click.echo(line)
    refuse(result.plan)
    return 0
