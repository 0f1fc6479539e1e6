"""`llmlaunch rehearse`: single ranks of the planned job, run alone before it is submitted."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from llmlaunch.app.planned_run import plan
from llmlaunch.cli.output import notify, print_json, say_next
from llmlaunch.cli.planning import recipe_arguments
from llmlaunch.cli.waiting import waiting_for
from llmlaunch.rundir.values import to_type
from llmlaunch.verdicts import EXIT_CODES, SAFE, TIGHT


def _install(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Install what a trace needs into the person's own data folder, in place of a rehearsal."""
    if not wanted or ctx.resilient_parsing:
        return
    from llmlaunch.rehearsal.install import install, user_folder

    install(user_folder(), notify)
    ctx.exit(0)


@click.command("rehearse")
@recipe_arguments
@click.option("--rank", default="worst", metavar="worst|all|N", help="Which pipeline ranks [worst].")
@click.option(
    "--on",
    "place",
    type=click.Choice(["auto", "trace", "gpu"]),
    default="auto",
    help="One GPU, or real framework code without any [auto: what is at hand].",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="With --on gpu: the run directory; must be new.")
@click.option(
    "--install-frameworks",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_install,
    help="Install what a trace needs into your data folder, and end.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def rehearse_command(
    recipe: str, overrides: tuple[str, ...], rank: str, place: str, output: Path | None, as_json: bool
) -> int:
    """Plan RECIPE and run single ranks of it alone for a few steps: the true peak, before the queue.

    Tensor, context and data peers of a pipeline rank hold the same, so one process speaks for all of them. What it
    shows is put beside the estimate by term, recorded, and the verdict follows it.

    \b
    llmlaunch rehearse recipe.yaml --on trace    without a GPU
    llmlaunch rehearse recipe.yaml --on gpu

    Exit code 0: safe, or tight and accepted by the recipe. 2: invalid, or nothing at hand to rehearse on. 3: not safe.
    """
    from llmlaunch.app.rehearsals import rehearse
    from llmlaunch.rehearsal.report import rehearsal_text
    from llmlaunch.report.text import print_verdict

    with waiting_for(f"rehearsing {recipe}"):
        run = plan(recipe, overrides, notify)
        result = rehearse(run, rank, place, output, to_type(*sys.argv[1:]), notify)
    verdict = result.judgement.verdict
    may_run = verdict == SAFE or (verdict == TIGHT and run.plan.accepts_tight)
    if as_json:
        print_json(result.to_json())
    else:
        print_verdict(rehearsal_text(run.plan, result.ranks, result.judgement, result.next_layout), verdict)
        if result.store is not None:
            click.echo(f"Recorded in {result.store} for this shape and version alone (evidence: rehearsed)")
        if may_run and run.plan.beyond_budget is not None:
            click.echo(f"Beyond the budget: {run.plan.beyond_budget}")
        elif may_run:
            say_next((to_type("submit", Path(run.recipe.path), *run.recipe.overrides), ""))
        else:
            say_next((to_type("plan", Path(run.recipe.path), *run.recipe.overrides), "layouts with more room"))
    return 0 if may_run else EXIT_CODES[verdict]
