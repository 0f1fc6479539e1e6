"""What the commands that plan a recipe have in common: arguments, warnings, and what to type next."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmlaunch.app.planned_run import PlannedRun, lock_path, plan
from llmlaunch.cli.output import notify
from llmlaunch.cli.waiting import waiting_for
from llmlaunch.errors import NothingSafe, NoVerdict, UserError
from llmlaunch.rundir.regular_files import open_regular
from llmlaunch.rundir.values import printable, to_type
from llmlaunch.verdicts import TIGHT

if TYPE_CHECKING:
    from llmlaunch.app.existing_job import ExistingJob, UndecidedJob
    from llmlaunch.readiness.readiness import Readiness


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
class ScriptInput:
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


NO_SCRIPT = ScriptInput()


def script_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --cluster, --set and --command, and hand them on together as `script`."""

    @wraps(function)
    def together(
        *arguments: Any, cluster: str | None, settings: tuple[str, ...], number: int | None, **options: Any
    ) -> Any:
        return function(*arguments, script=ScriptInput(cluster, settings, number), **options)

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


def is_script(name: str, script: ScriptInput = NO_SCRIPT) -> bool:
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
        try:
            run = plan(recipe, overrides, notify, replan=replan)
        except UserError as error:
            raise _with_its_cluster(recipe, error) from None
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


def _with_its_cluster(recipe: str, error: UserError) -> UserError:
    """Return the error for a file of training arguments, which has no cluster, where it was taken for a recipe."""
    from llmlaunch.imports.recipe_file import holds_arguments

    try:
        taken = not holds_arguments(Path(recipe))
    except UserError:  # the same that was wrong with the recipe
        taken = True
    if taken:
        return error
    return UserError(f"{recipe}: holds training arguments and is no recipe; add --cluster NAME, a profile or its path")


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


def repair_steps(run: PlannedRun, in_words: str = "") -> Steps:
    """Return the changes under which the plan may run, as overrides of what was typed. `in_words` is the advised one as
    a script says it."""
    from llmlaunch.planner.search_space import yaml_text

    plan, words = run.plan, sys.argv[1:]
    steps = []
    if plan.change is not None:
        settings = plan.change.settings
        label = in_words or f"{'the smallest' if plan.change.smallest else 'a'} change that is safe"
        unchanged = [word for word in words if word.partition("=")[0] not in settings]
        changes = [f"{key}={'null' if value is None else yaml_text(value)}" for key, value in settings.items()]
        steps.append((to_type(*unchanged, *changes), label))
    if plan.verdict == TIGHT and not plan.accepts_tight:
        steps.append((to_type(*words, "memory.accept=tight"), "takes the risk"))
    return steps


def placement_lines(run: PlannedRun) -> list[str]:
    """Return what the order of the nodes is worth, where the network is known."""
    if run.placement is None:
        return []
    from llmlaunch.report.plan_text import placement_text

    return [placement_text(run.placement)]
