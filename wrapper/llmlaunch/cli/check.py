"""`llmlaunch check`: validate, plan, show; submit nothing."""

from __future__ import annotations

import click

from llmlaunch.cli.planned import Planned, planned, recipe_arguments
from llmlaunch.cli.printed import print_json
from llmlaunch.recipe.types import Recipe
from llmlaunch.store.location import Location, store_exists, where

__all__ = ["command"]


@click.command("check")
@recipe_arguments
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def command(recipe: str, overrides: tuple[str, ...], as_json: bool) -> int:
    """Validate and plan RECIPE; show memory by pipeline rank and term, the margin and the step time.

    Exit code 0: safe. 2: the recipe is invalid. 3: no layout is safe, or none within the budget.
    """
    from llmlaunch.planner.unsafe import refuse
    from llmlaunch.report.console import print_verdict
    from llmlaunch.report.plan_text import check_text

    result = planned(recipe, overrides)
    result.refuse_unrenderable()
    if as_json:
        print_json(result.json)
    else:
        print_verdict(check_text(result.recipe, result.plan), result.plan.good)
        for line in (*result.placement_lines, *_seen_before(result)):
            click.echo(line)
    result.warn_of_missing_inputs()
    refuse(result.plan)
    return 0


def _seen_before(result: Planned) -> list[str]:
    """The last true peaks of this recipe; the store is opened only where there is one."""
    place = where()
    if not store_exists(place) or not _has_run(place, result.recipe):
        return []
    from llmlaunch.cli.history import last_peaks_text

    return last_peaks_text(result.recipe, result.plan)


def _has_run(place: Location, recipe: Recipe) -> bool:
    from llmlaunch.store.reading import has_runs_of

    return has_runs_of(place, recipe.digest, recipe.name)
