"""`llmlaunch check`, `plan`, `render` and `explain-args`: what a recipe becomes, before anything is submitted."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmlaunch.app.planned_run import PlannedRun, lock_path, plan
from llmlaunch.cli.output import announced_after, notify, print_json, say
from llmlaunch.errors import UserError
from llmlaunch.rundir import file_names
from llmlaunch.rundir.files import open_regular
from llmlaunch.rundir.values import to_type
from llmlaunch.units import gib

if TYPE_CHECKING:
    from llmlaunch.readiness.readiness import Readiness
    from llmlaunch.store.history import PastRun

__all__ = [
    "check_command",
    "explain_args_command",
    "note_doubts",
    "plan_command",
    "planned",
    "recipe_arguments",
    "render_command",
    "replan_option",
    "warn_of_readiness",
]


SCRIPT_SUFFIXES = (".sh", ".bash", ".sbatch", ".slurm", ".job")


PATIENCE_SECONDS = 1.0  # of a search, before a line says that it runs


def recipe_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add RECIPE and any number of KEY=VALUE overrides."""
    function = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")(function)
    return click.argument("recipe", metavar="RECIPE", type=click.Path())(function)


replan_option = click.option("--replan", is_flag=True, help="Leave the lock beside RECIPE aside, and plan anew.")


def planned(recipe: str, overrides: tuple[str, ...], replan: bool) -> PlannedRun:
    """Plan RECIPE, kept to its lock or, with `replan`, anew; tell of a lock what planning anew changes and gains."""
    with announced_after(PATIENCE_SECONDS, f"searching the layouts of {recipe} ..."):
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


@click.command("check")
@click.argument("recipe", metavar="RECIPE|SCRIPT", required=False)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--megatron-args", metavar="TEXT", help="Instead of RECIPE: the arguments of Megatron-LM's trainer.")
@click.option("--cluster", metavar="NAME", help="Of a script or arguments, which do not tell: profile by name or path.")
@click.option(
    "--set", "variables", multiple=True, metavar="NAME=VALUE", help="A variable that SCRIPT is given; 1=... is $1."
)
@click.option("--command", "number", type=click.IntRange(min=1), metavar="N", help="The N-th training of SCRIPT.")
@replan_option
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def check_command(
    recipe: str | None,
    overrides: tuple[str, ...],
    megatron_args: str | None,
    cluster: str | None,
    variables: tuple[str, ...],
    number: int | None,
    replan: bool,
    as_json: bool,
) -> int:
    """Validate and plan RECIPE; show memory by pipeline rank and term, the margin and the step time.

    SCRIPT is a shell script or sbatch file that starts Megatron-LM or DeepSpeed, and TEXT the arguments of
    pretrain_gpt.py: they are read, never executed, and priced as they are.

    Exit code 0: safe, or tight and accepted by the recipe. 2: the recipe is invalid. 3: no layout is safe, or none
    within the budget. A locked plan (`llmlaunch plan --lock`) may run whatever is known of it today.
    """
    if megatron_args is None and (recipe is None or not is_script(recipe)):
        if recipe is None:
            raise UserError("check: name a RECIPE or a SCRIPT, or give --megatron-args")
        if cluster or variables or number:
            raise UserError(
                f"{recipe}: is a recipe, and --cluster, --set and --command are for scripts; write cluster=NAME"
            )
        run = planned(recipe, overrides, replan)
        run.refuse_unrenderable()
        _show_check(run, as_json)
        run.refuse_unsafe()
        warn_of_readiness(run)
    else:
        run = _existing_job(recipe, overrides, megatron_args, cluster, variables, number)
        _show_check(run, as_json)
        run.refuse_unsafe()
    return 0


def is_script(name: str) -> bool:
    """Return whether a file is a shell script rather than a recipe, by its ending or its first line."""
    if name.endswith(SCRIPT_SUFFIXES):
        return True
    try:
        with open_regular(Path(name), follow=True) as file:
            return file.read(2) == b"#!"
    except (OSError, ValueError):  # the reader of recipes has the better message
        return False


def _existing_job(
    recipe: str | None,
    overrides: tuple[str, ...],
    megatron_args: str | None,
    cluster: str | None,
    variables: tuple[str, ...],
    number: int | None,
) -> PlannedRun:
    """Plan the job of a script or of Megatron-LM's arguments, and say how it was read."""
    from llmlaunch.app.existing_job import job_of_arguments, job_of_script, reading_lines

    if megatron_args is not None:
        words = overrides if recipe is None else (recipe, *overrides)
        job = job_of_arguments(megatron_args, cluster, words, notify)
    else:
        values = dict(_variable(word) for word in variables)
        job = job_of_script(Path(str(recipe)), cluster, overrides, notify, variables=values, number=number)
    for line in reading_lines(job):
        notify(line)
    return job.run


def _variable(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*|[0-9]+", name):
        raise UserError(f"--set {word.partition('=')[0]}: is not NAME=VALUE; write for example --set CHECKPOINTS=/ckpt")
    return name, value


def _show_check(run: PlannedRun, as_json: bool) -> None:
    hints = run.hints()
    if as_json:
        print_json(run.json | ({"hints": [hint.as_json() for hint in hints]} if hints else {}))
        return
    from llmlaunch.app.evidence import last_true_peaks
    from llmlaunch.report.plan_text import check_text
    from llmlaunch.report.text import print_verdict

    print_verdict(check_text(run.recipe, run.plan), run.plan.verdict_with_budget, run.mock_data_warning)
    past = last_true_peaks(run.recipe, notify)
    lines = [*_placement_lines(run), *_qualification_lines(run), *([] if past is None else _past_lines(past, run))]
    lines += ["", "Faster, by one line of the recipe:", *(f"  {hint.sentence()}" for hint in hints)] if hints else []
    for line in lines:
        click.echo(line)


def _placement_lines(run: PlannedRun) -> list[str]:
    """Return what the order of the nodes is worth, where the network is known."""
    if run.placement is None:
        return []
    from llmlaunch.report.plan_text import placement_text

    return [placement_text(run.placement)]


def _qualification_lines(run: PlannedRun) -> list[str]:
    """Return when the cluster was qualified, and how far off predictions were; nothing where the store cannot tell,
    which was said before."""
    from llmlaunch.app.evidence import last_qualification
    from llmlaunch.report.qualification_text import summary_line

    recipe = run.recipe
    try:
        summary = last_qualification(recipe)
    except UserError:
        return []
    figures = None if summary is None else (summary.changed_at, summary.layouts, summary.worst_error)
    return [summary_line(figures, recipe.cluster.name, recipe.backend.name)]


def _past_lines(past: PastRun, run: PlannedRun) -> list[str]:
    """Return the last true peaks of this recipe, or of another version of it, beside the predictions."""
    estimate = run.plan.estimate
    day = time.strftime("%Y-%m-%d %H:%M", time.localtime(past.started_at)) if past.started_at else "at an unknown time"
    which = "This recipe" if past.same_recipe else "Another version of this recipe"
    lines = ["", f"{which} ran {day} ({past.state}, {past.run_id}); measured then, predicted then, predicted now:"]
    predicted_now = {rank.pipeline_rank: rank.device_bytes for rank in estimate.ranks}
    for peak in past.peaks:
        then = "-" if peak.predicted_bytes is None else gib(peak.predicted_bytes)
        now_bytes = None if peak.pipeline_rank is None else predicted_now.get(peak.pipeline_rank)
        now = gib(now_bytes) if now_bytes is not None and peak.peak_kind == estimate.peak_kind else "-"
        rank = "worst rank" if peak.pipeline_rank is None else f"rank {peak.pipeline_rank}"
        rank = "worst node" if peak.peak_kind == "host" else rank
        lines.append(f"  {rank} {peak.peak_kind}: {gib(peak.peak_bytes)}, {then}, {now} GiB ({peak.peak_source})")
    return lines


def warn_of_readiness(run: PlannedRun) -> None:
    """Warn of what is missing, which may come before the job does, and of what may not be as it is wanted."""
    note_doubts(run.readiness, run.slurm_request)
    for sentence in (*run.readiness.missing, *run.slurm_request.missing):
        notify(f"warning: {sentence} (submit refuses without it)")


def note_doubts(*parts: Readiness) -> None:
    """Write the notes, then what is doubtful."""
    for readiness in parts:
        for sentence in readiness.notes:
            notify(f"note: {sentence}")
    for readiness in parts:
        for sentence in readiness.doubtful:
            notify(f"warning: {sentence}")


@click.command("plan")
@recipe_arguments
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.option("--pareto", "with_front", is_flag=True, help="Also the Pareto front of step time against head-room.")
@click.option("--plot", type=click.Path(path_type=Path), help="Also draw the grid of layouts as a heat map, .svg.")
@click.option("--html", type=click.Path(path_type=Path), help="Also write all of it as one page for a browser, .html.")
@click.option("--lock", "locks", is_flag=True, help="Keep to this plan from now on: write it beside RECIPE.")
def plan_command(
    recipe: str,
    overrides: tuple[str, ...],
    as_json: bool,
    with_front: bool,
    plot: Path | None,
    html: Path | None,
    locks: bool,
) -> int:
    """Show the layouts of RECIPE ranked by step time, what each neighbouring choice would cost, and how many were
    refused for what. A lock beside RECIPE is left aside.

    Exit code 0: safe, or tight and accepted by the recipe. 2: the recipe is invalid. 3: no layout is safe.
    """
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
        print_json(run.json | {"neighbours": [neighbour.as_json() for neighbour in neighbours]} | extra)
    else:
        from llmlaunch.report.plan_text import plan_text
        from llmlaunch.report.text import print_verdict

        print_verdict(plan_text(run.recipe, run.plan, neighbours, front), run.plan.verdict_with_budget)
        for line in _placement_lines(run):
            click.echo(line)
    run.refuse_unsafe()
    if locks:
        notify(f"wrote {run.write_lock()}; commit it beside the recipe: check, render and submit keep to it")
    return 0


@click.command("render")
@recipe_arguments
@replan_option
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder to write; must be new.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def render_command(recipe: str, overrides: tuple[str, ...], replan: bool, output: Path, as_json: bool) -> int:
    """Plan RECIPE and write its run directory. Nothing is submitted; nothing is written unless it is safe, or tight and
    accepted."""
    from llmlaunch.app.variants import warn_of_memory

    run = planned(recipe, overrides, replan)
    run.refuse_unsafe()
    warn_of_memory(run, notify)
    warn_of_readiness(run)
    run.write(output, notify)
    if as_json:
        print_json(run.json)
    notify(
        f"rendered {output}: {run.layout.describe()}; next: sbatch {shlex.quote(str(output / file_names.JOB_SCRIPT))}"
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
    """
    from llmlaunch.app.run_lookup import directory_of
    from llmlaunch.rendering.arguments_json import read_arguments
    from llmlaunch.report.plan_text import explained_text

    directory = directory_of(run, notify)
    arguments = read_arguments(directory / f"fallback/{fallback}" if fallback else directory)
    entries = arguments["entries"]
    if names:
        wanted = {name.lstrip("-") for name in names}
        entries = [entry for entry in entries if _argument_names(entry["name"]) & wanted]
        rendered_names = set().union(*(_argument_names(entry["name"]) for entry in arguments["entries"]))
        if wanted - rendered_names:
            raise UserError(
                f"{', '.join(sorted(wanted - rendered_names))}: nothing of that name is rendered in {directory}"
            )
    if as_json:
        print_json({"program": arguments["program"], "entries": entries})
    else:
        say(explained_text(arguments["program"], entries))
    return 0


def _argument_names(name: str) -> set[str]:
    """As rendered without its dashes, and the last part of a dotted setting."""
    return {name.lstrip("-"), name.rpartition(".")[2].lstrip("-")}
