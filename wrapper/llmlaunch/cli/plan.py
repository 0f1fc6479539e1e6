"""`llmlaunch plan`: the layouts of a recipe ranked, and what each neighbouring choice would cost."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmlaunch.app.planned_run import PlannedRun
from llmlaunch.cli.output import notify, print_json, say, say_next
from llmlaunch.cli.planning import (
    ScriptInput,
    Steps,
    exit_code_with_launch,
    is_script,
    placement_lines,
    planned,
    recipe_or_script,
    repair_steps,
    say_launch,
    say_why_not,
    script_options,
    steps_to_submit,
    verbose_option,
)
from llmlaunch.errors import UserError
from llmlaunch.rundir.values import to_type

if TYPE_CHECKING:
    from llmlaunch.app.existing_job import ExistingJob
    from llmlaunch.planner.neighbours import Neighbour


@click.command("plan")
@recipe_or_script
@script_options
@verbose_option
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.option("--html", type=click.Path(path_type=Path), help="Also write all of it as one page for a browser, .html.")
@click.option("--lock", "locks", is_flag=True, help="Keep to this plan from now on: write it beside RECIPE.")
def plan_command(
    recipe: str,
    overrides: tuple[str, ...],
    script: ScriptInput,
    verbose: bool,
    as_json: bool,
    html: Path | None,
    locks: bool,
) -> int:
    """Show the layouts of RECIPE ranked by step time, what each neighbouring choice would cost, and how many were
    refused for what. A lock beside RECIPE is left aside. The layout of a SCRIPT is its own.

    \b
    llmlaunch plan recipe.yaml
    llmlaunch plan recipe.yaml --lock     keep this plan: a file to commit

    Exit code 0: safe, or tight and accepted by the recipe. 2: the recipe is invalid. 3: no layout is safe. 5:
    no verdict, because what decides memory was not read.
    """
    job: ExistingJob | None = None
    if is_script(recipe, script):
        ended = _script_job(recipe, overrides, script, verbose, as_json, locks)
        if isinstance(ended, int):
            return ended
        job, run = ended, ended.run
    else:
        script.refuse_for(recipe)
        run = planned(recipe, overrides, replan=True)
    neighbours = run.neighbours()
    if html is not None:
        _write_page(run, neighbours, html, (recipe, *overrides))
    if as_json:
        document = run.json if job is None else job.as_json()
        print_json(document | {"neighbours": [neighbour.as_json() for neighbour in neighbours]})
    else:
        if job is not None:
            say_launch(job)
        _show_plan(run, neighbours, verbose)
    code = say_why_not(run)
    code = code if job is None else exit_code_with_launch(job, code)
    if code == 0 and locks:
        notify(f"wrote {run.write_lock()}; commit it beside the recipe: check, render and submit keep to it")
    if not as_json:
        typed = ("plan", recipe, *overrides) if job is None else sys.argv[1:]
        more = [] if verbose else [(to_type(*typed, "-v"), "every layout and reason")]
        say_next(*_after_plan(run, job, (recipe, *overrides), script, code), *more)
    return code


def _write_page(run: PlannedRun, neighbours: Sequence[Neighbour], html: Path, words: tuple[str, ...]) -> None:
    """Write the page of the plan of `words` to `html`."""
    from llmlaunch.report.plan_page import write_plan_page

    command = to_type("plan", *words, "--html", html)
    write_plan_page(run.setting, run.search, run.plan, neighbours, command, html)
    notify(f"wrote {html}: open it in a browser")


def _script_job(
    name: str, overrides: tuple[str, ...], script: ScriptInput, verbose: bool, as_json: bool, locks: bool
) -> ExistingJob | int:
    """Return the job of a script after what a person should know of its reading, or the exit code of one without a
    verdict."""
    from llmlaunch.cli.scripts import job_with_verdict, reading_notes

    if locks:
        command = to_type("init", "--from", name)
        raise UserError(f"{name}: --lock: a lock lies beside a recipe, which `{command}` makes of it")
    job = job_with_verdict(name, overrides, script, verbose, as_json)
    if isinstance(job, int):
        return job
    notes = reading_notes(job)
    for note in notes if verbose or as_json else []:
        notify(note)
    return job


def _after_plan(
    run: PlannedRun, job: ExistingJob | None, words: tuple[str, ...], script: ScriptInput, code: int
) -> Steps:
    """Return what to type after the plan of a recipe or a script, whose path and overrides are `words`."""
    if job is not None:
        from llmlaunch.cli.scripts import steps_after_script

        return steps_after_script(job, script, words[1:])
    return _steps_after_plan(run, words) if code == 0 else repair_steps(run)


def _show_plan(run: PlannedRun, neighbours: Sequence[Neighbour], verbose: bool) -> None:
    from llmlaunch.report.check_screen import plan_screen
    from llmlaunch.report.plan_text import plan_text
    from llmlaunch.report.terminal import shown_on
    from llmlaunch.report.text import print_verdict

    if verbose:
        print_verdict(plan_text(run.recipe, run.plan, neighbours), run.plan.verdict_with_budget)
        for line in placement_lines(run):
            say(line)
        return
    click.echo(plan_screen(run.recipe, run.plan, neighbours, shown_on()))


def _steps_after_plan(run: PlannedRun, words: tuple[str, ...]) -> Steps:
    """Return the command that submits the plan; that which names what the job lacks, where `submit` would refuse."""
    if run.readiness.missing or run.slurm_request.missing:
        return [(to_type("check", *words), "names what the job still lacks")]
    return steps_to_submit(run, words)
