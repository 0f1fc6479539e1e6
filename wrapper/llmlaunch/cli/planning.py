"""`llmlaunch plan`, `render` and `explain-args`: what a recipe becomes, before anything is submitted."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmlaunch.app.planned_run import PlannedRun, lock_path, plan
from llmlaunch.cli.next_steps import run_path
from llmlaunch.cli.output import notify, print_json, say, say_next
from llmlaunch.cli.waiting import waiting_for
from llmlaunch.errors import NothingSafe, NoVerdict, UserError
from llmlaunch.planner.plan import Candidate
from llmlaunch.rundir import file_names
from llmlaunch.rundir.files import open_regular
from llmlaunch.rundir.values import printable, to_type
from llmlaunch.verdicts import TIGHT

if TYPE_CHECKING:
    from llmlaunch.app.existing_job import ExistingJob, UndecidedJob
    from llmlaunch.planner.neighbours import Neighbour
    from llmlaunch.readiness.readiness import Readiness

__all__ = [
    "NO_SCRIPT",
    "ScriptOptions",
    "Steps",
    "exit_code_with_launch",
    "explain_args_command",
    "is_script",
    "mending_steps",
    "note_doubts",
    "placement_lines",
    "plan_command",
    "planned",
    "recipe_arguments",
    "recipe_or_script",
    "render_command",
    "replan_option",
    "say_launch",
    "say_why_not",
    "script_options",
    "steps_to_submit",
    "verbose_option",
    "warn_of_readiness",
    "warn_of_script_inputs",
    "warn_of_what_is_missing",
]


SCRIPT_SUFFIXES = (".sh", ".bash", ".sbatch", ".slurm", ".job")
Steps = list[tuple[str, str]]  # commands to type next, each with its purpose


def recipe_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add RECIPE and any number of KEY=VALUE overrides."""
    function = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")(function)
    return click.argument("recipe", metavar="RECIPE", type=click.Path())(function)


def recipe_or_script(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add RECIPE or SCRIPT and any number of KEY=VALUE overrides."""
    function = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")(function)
    return click.argument("recipe", metavar="RECIPE|SCRIPT", type=click.Path())(function)


@dataclass(frozen=True)
class ScriptOptions:
    """What is said of a script on the command line beside its path."""

    cluster: str | None = None
    settings: tuple[str, ...] = ()
    number: int | None = None

    def refuse_for(self, recipe: str) -> None:
        """Raise UserError where one is given with a recipe."""
        if self.cluster or self.settings or self.number:
            raise UserError(
                f"{recipe}: is a recipe, and --cluster, --set and --command are for scripts; write cluster=NAME"
            )


NO_SCRIPT = ScriptOptions()


def script_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --cluster, --set and --command, and hand them on together as `script`."""

    @wraps(function)
    def together(
        *arguments: Any, cluster: str | None, settings: tuple[str, ...], number: int | None, **options: Any
    ) -> Any:
        return function(*arguments, script=ScriptOptions(cluster, settings, number), **options)

    for option in (
        click.option(
            "--command", "number", type=click.IntRange(min=1), metavar="N", help="The N-th training of SCRIPT."
        ),
        click.option(
            "--set", "settings", multiple=True, metavar="NAME=VALUE",
            help="A variable that SCRIPT reads, its argument (1=... is $1), or a key of the recipe.",
        ),
        click.option(
            "--cluster", metavar="NAME", help="Of a script or arguments, which do not tell: profile by name or path."
        ),
    ):  # fmt: skip
        together = option(together)
    return together


def is_script(name: str, script: ScriptOptions = NO_SCRIPT) -> bool:
    """Return whether a file is a shell script rather than a recipe, by its ending or its first line; where a cluster
    is named beside it, also whether it is a file of training arguments, or a ds_config.json."""
    if name.endswith(SCRIPT_SUFFIXES):
        return True
    try:
        with open_regular(Path(name), follow=True) as file:
            if file.read(2) == b"#!":
                return True
    except (OSError, ValueError):  # the reader of recipes has the better message
        return False
    if not (script.cluster or script.settings):
        return False
    from llmlaunch.imports.recipe_file import holds_arguments

    return holds_arguments(Path(name))


verbose_option = click.option(
    "-v", "--verbose", is_flag=True, help="Also the terms of memory, the evidence, and all notes."
)
replan_option = click.option("--replan", is_flag=True, help="Leave the lock beside RECIPE aside, and plan anew.")


def planned(recipe: str, overrides: tuple[str, ...], replan: bool) -> PlannedRun:
    """Plan RECIPE, kept to its lock or, with `replan`, anew; tell of a lock what planning anew changes and gains."""
    with waiting_for(f"searching the layouts of {recipe}"):
        run = plan(recipe, overrides, notify, replan=replan)
    lock = lock_path(recipe)
    if run.unlocked is None and not (replan and lock.is_file()):
        return run
    from llmlaunch.report.plan_text import replan_text

    try:
        kept, anew = (plan(recipe, overrides), run) if replan else (run, run.replanned() or run)
        change = replan_text(kept.plan, anew.plan)
    except UserError as reason:  # another job than the lock's, or one that has no plan any more
        change = str(reason)
    notify(f"note: {lock} is left aside: {change}" if replan else f"note: {lock} keeps the plan; {change} (--replan)")
    return run


def warn_of_readiness(run: PlannedRun) -> None:
    """Say what was not seen, and warn of what is missing, which may come before the job does, and of what may not be as
    it is wanted."""
    note_doubts(run.readiness, run.slurm_request)
    _warn_of_missing(run)


def warn_of_what_is_missing(run: PlannedRun) -> None:
    """Warn as `warn_of_readiness` does, and leave the notes out."""
    for sentence in (*run.readiness.doubtful, *run.slurm_request.doubtful):
        notify(f"warning: {sentence}")
    _warn_of_missing(run)


def warn_of_script_inputs(run: PlannedRun) -> None:
    """Warn of data, weights and folders that a person's own script names and that are missing or in doubt."""
    from llmlaunch.readiness.readiness import script_inputs

    ready = script_inputs(run.recipe, run.plan.layout, os.environ)
    for sentence in (*ready.missing, *ready.doubtful):
        notify(f"warning: {sentence}")


def _warn_of_missing(run: PlannedRun) -> None:
    for sentence in (*run.readiness.missing, *run.slurm_request.missing):
        notify(f"warning: {sentence} (submit refuses until this is fixed)")


def note_doubts(*parts: Readiness) -> None:
    """Write the notes, then what is doubtful."""
    for readiness in parts:
        for sentence in readiness.notes:
            notify(f"note: {sentence}")
    for readiness in parts:
        for sentence in readiness.doubtful:
            notify(f"warning: {sentence}")


def say_why_not(run: PlannedRun) -> int:
    """Write to stderr why the plan must not run; return the exit code."""
    try:
        run.refuse_unsafe()
    except (NothingSafe, NoVerdict) as reason:
        notify(f"error: {reason}")
        return reason.exit_code
    return 0


def say_launch(job: ExistingJob | UndecidedJob) -> None:
    """Write what makes the launch of a script fail, in front of the screen."""
    from llmlaunch.report.terminal import filled, shown_on

    surface = shown_on()
    for line in job.launch_failures:
        first, *others = filled(printable(f"launch cannot work: {line}"), surface.width, "", "  ")
        click.echo("\n".join([click.style(first, fg="red") if surface.colours else first, *others]))


def exit_code_with_launch(job: ExistingJob | UndecidedJob, code: int) -> int:
    """Return the exit code of a job whose plan has `code`: 2 where its launch cannot work, after saying so."""
    for line in job.launch_failures:
        notify(f"error: {line}")
    return UserError.exit_code if job.launch_failures else code


def steps_to_submit(run: PlannedRun, words: tuple[str, ...]) -> Steps:
    """Return the command that submits a plan that may run; none where no backend runs it. `words` are the recipe and
    its overrides."""
    if run.recipe.techniques.what_ifs or run.plan.unrendered:
        return []
    missing = (*run.readiness.missing, *run.slurm_request.missing)
    return [(to_type("submit", *words), "after fixing the warnings above" if missing else "")]


def _steps_after_plan(run: PlannedRun, words: tuple[str, ...]) -> Steps:
    """Return the command that submits the plan; that which names what the job lacks, where `submit` would refuse."""
    if run.readiness.missing or run.slurm_request.missing:
        return [(to_type("check", *words), "names what the job still lacks")]
    return steps_to_submit(run, words)


def mending_steps(run: PlannedRun, in_words: str = "") -> Steps:
    """Return the nearest changes under which the plan may run, as overrides of what was typed. `in_words` is the
    smallest of them as a script says it."""
    from llmlaunch.planner.smallest_change import yaml_text

    plan, words = run.plan, sys.argv[1:]
    steps = []
    if plan.changes:
        kept = [word for word in words if word.partition("=")[0] not in plan.changes]
        changes = [f"{key}={'null' if value is None else yaml_text(value)}" for key, value in plan.changes.items()]
        steps.append((to_type(*kept, *changes), in_words or "the smallest change that is safe"))
    if plan.verdict == TIGHT and not plan.accepts_tight:
        steps.append((to_type(*words, "memory.accept=tight"), "takes the risk"))
    return steps


def placement_lines(run: PlannedRun) -> list[str]:
    """Return what the order of the nodes is worth, where the network is known."""
    if run.placement is None:
        return []
    from llmlaunch.report.plan_text import placement_text

    return [placement_text(run.placement)]


@click.command("plan")
@recipe_or_script
@script_options
@verbose_option
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.option("--pareto", "with_front", is_flag=True, help="Also the Pareto front of step time against head-room.")
@click.option("--plot", type=click.Path(path_type=Path), help="Also draw the grid of layouts as a heat map, .svg.")
@click.option("--html", type=click.Path(path_type=Path), help="Also write all of it as one page for a browser, .html.")
@click.option("--lock", "locks", is_flag=True, help="Keep to this plan from now on: write it beside RECIPE.")
def plan_command(
    recipe: str,
    overrides: tuple[str, ...],
    script: ScriptOptions,
    verbose: bool,
    as_json: bool,
    with_front: bool,
    plot: Path | None,
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
    front = run.pareto_front() if with_front else None
    if plot is not None:
        from llmlaunch.report.grid_plot import write_grid_plot

        write_grid_plot(run.setting, run.search, run.plan, plot)
    if html is not None:
        from llmlaunch.report.plan_page import write_plan_page

        command = to_type("plan", recipe, *overrides, "--html", html)
        write_plan_page(run.setting, run.search, run.plan, neighbours, command, html)
        notify(f"wrote {html}: open it in a browser")
    if as_json:
        extra = {} if front is None else {"pareto": [candidate.as_json() for candidate in front]}
        print_json(
            (run.json if job is None else job.as_json())
            | {"neighbours": [neighbour.as_json() for neighbour in neighbours]}
            | extra
        )
    else:
        if job is not None:
            say_launch(job)
        _show_plan(run, neighbours, front, verbose)
    code = say_why_not(run)
    code = code if job is None else exit_code_with_launch(job, code)
    if code == 0 and locks:
        notify(f"wrote {run.write_lock()}; commit it beside the recipe: check, render and submit keep to it")
    if not as_json:
        more = [] if verbose else [(to_type(*sys.argv[1:], "-v"), "every layout and reason")]
        say_next(*_after_plan(run, job, (recipe, *overrides), script, code), *more)
    return code


def _script_job(
    name: str, overrides: tuple[str, ...], script: ScriptOptions, verbose: bool, as_json: bool, locks: bool
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
    run: PlannedRun, job: ExistingJob | None, words: tuple[str, ...], script: ScriptOptions, code: int
) -> Steps:
    """Return what to type after the plan of a recipe or a script, whose path and overrides are `words`."""
    if job is not None:
        from llmlaunch.cli.scripts import steps_after_script

        return steps_after_script(job, script, words[1:])
    return _steps_after_plan(run, words) if code == 0 else mending_steps(run)


def _show_plan(
    run: PlannedRun, neighbours: Sequence[Neighbour], front: Sequence[Candidate] | None, verbose: bool
) -> None:
    from llmlaunch.report.check_screen import plan_screen
    from llmlaunch.report.plan_text import front_text, plan_text
    from llmlaunch.report.terminal import shown_on
    from llmlaunch.report.text import print_verdict

    if verbose:
        print_verdict(plan_text(run.recipe, run.plan, neighbours, front), run.plan.verdict_with_budget)
        for line in placement_lines(run):
            say(line)
        return
    click.echo(plan_screen(run.recipe, run.plan, neighbours, shown_on()))
    for line in [] if front is None else front_text(run.plan, front):
        say(line)


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
