"""`llmlaunch qualify`: six small layouts on the person's own devices, as predicted and as measured."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmlaunch.cli.output import notify, print_json, say, say_next
from llmlaunch.cli.waiting import waiting_for
from llmlaunch.errors import UserError
from llmlaunch.recipe.frameworks import DEFAULT_FRAMEWORK, FRAMEWORKS
from llmlaunch.rundir.values import to_type

if TYPE_CHECKING:
    from llmlaunch.app.qualification import QualificationRequest
    from llmlaunch.launchers.base import Submission
    from llmlaunch.launchers.choose import LauncherChoice
    from llmlaunch.recipe.types import Recipe
    from llmlaunch.watch.screen import Screen

__all__ = ["qualify_command"]

OTHERWISE = 1
PAGE = "qualification.md"


@click.command("qualify")
@click.argument("words", nargs=-1, metavar="[RECIPE] [KEY=VALUE]...")
@click.option("--cluster", metavar="NAME", help="Profile to qualify, where no RECIPE says it.")
@click.option(
    "--backend",
    type=click.Choice(list(FRAMEWORKS)),
    help=f"[RECIPE's, else {DEFAULT_FRAMEWORK}].",
)
@click.option("--model", metavar="PRESET", help="Family whose layers are used [RECIPE's, else an 8B or 7B Llama].")
@click.option("--nodes", type=click.IntRange(min=1), default=1, show_default=True, help="Nodes of each of the six.")
@click.option("--local", is_flag=True, help="Run here, one after the other, also where there is SLURM.")
@click.option("--no-wait", is_flag=True, help="Submit and return; the same command shows the results later.")
@click.option("--report", is_flag=True, help="Show the last qualification of the cluster; submit nothing.")
@click.option("--again", is_flag=True, help="Begin a new qualification beside the earlier one.")
@click.option("--dry-run", is_flag=True, help="Show the six layouts; write and submit nothing.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder [runs/qualify-CLUSTER-BACKEND-MODEL].")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def qualify_command(
    words: tuple[str, ...],
    cluster: str | None,
    backend: str | None,
    model: str | None,
    nodes: int,
    local: bool,
    no_wait: bool,
    report: bool,
    again: bool,
    dry_run: bool,
    output: Path | None,
    as_json: bool,
) -> int:
    """Measure memory and step time of six small layouts of one model family on your own devices, one of them near the
    limit and one predicted to run out of memory; then propose a calibration.

    The six are short jobs of SLURM, or run here one after the other. The same command goes on with what it began.

    \b
    llmlaunch qualify recipe.yaml
    llmlaunch qualify --local

    Exit code 0: all that ended did so as predicted. 1: one died, survived or failed otherwise. 2: invalid. 4: the
    scheduler refused.
    """
    from llmlaunch.app.qualification import base_recipe, place_of_qualification, run_directories
    from llmlaunch.launchers.choose import choose
    from llmlaunch.recipe.load import load_recipe

    has_recipe = bool(words) and "=" not in words[0]
    recipe, overrides = (words[0], words[1:]) if has_recipe else (None, words)
    request = base_recipe(recipe, overrides, cluster, backend, model, nodes)
    base = load_recipe(request.recipe, request.overrides)
    if report:
        return _show(base, output, (), as_json)
    choice = choose(local, notify)
    if dry_run:
        return _show_layouts(request, choice, as_json)
    if no_wait and choice.launcher.name == "local":
        raise UserError(
            "qualify --no-wait: on this machine this command starts one run after the other, so it has to stay; "
            f"leave out --no-wait. {choice.why}"
        )
    directory = output or place_of_qualification(base, again)
    run_dirs = run_directories(directory, request)
    if run_dirs:
        notify(f"Continuing the qualification in {directory} (a new one: --again)")
    else:
        run_dirs = _begin(request, directory, choice)
    _run(run_dirs, choice.launcher.name == "local", no_wait, as_json)
    if no_wait:
        options = [word for word in sys.argv[1:] if word not in ("--no-wait", "--again")]
        if not as_json:
            say_next((to_type(*options, "--report"), "when the six have ended"), (to_type("status"), "until then"))
        return 0
    return _show(base, directory, run_dirs, as_json)


def _show_layouts(request: QualificationRequest, choice: LauncherChoice, as_json: bool) -> int:
    """Show the six layouts that would run."""
    from llmlaunch.app.qualification import plan_qualification
    from llmlaunch.report.qualification_text import planned_text
    from llmlaunch.units import duration

    with waiting_for("choosing six layouts"):
        runs = plan_qualification(request, choice, notify)
    rows, limit = [each.to_json() for each in runs], runs[0].run.plan.limit
    if as_json:
        print_json({"memory_bytes": limit.memory_bytes, "limit_bytes": limit.limit_bytes, "layouts": rows})
    else:
        say(planned_text(rows, limit.memory_bytes, limit.limit_bytes))
    training = duration(sum(each.run.plan.length.seconds for each in runs))
    notify(f"{training} of training, and the start of six jobs; nothing was written or submitted. {choice.where}")
    if not as_json:
        say_next((to_type(*(word for word in sys.argv[1:] if word != "--dry-run")), "runs them"))
    return 0


def _begin(request: QualificationRequest, directory: Path, choice: LauncherChoice) -> list[Path]:
    """Choose the six layouts, show them, and write their run directories; return these."""
    from llmlaunch.app.qualification import plan_qualification, run_directories, write_qualification
    from llmlaunch.report.qualification_text import planned_text

    with waiting_for("choosing six layouts"):
        runs = plan_qualification(request, choice, notify)
    limit = runs[0].run.plan.limit
    say(planned_text([each.to_json() for each in runs], limit.memory_bytes, limit.limit_bytes), err=True)
    write_qualification(directory, runs, request, notify)
    return run_directories(directory, request)


def _run(run_dirs: Sequence[Path], local: bool, no_wait: bool, as_json: bool) -> None:
    """Submit what is not submitted yet, and follow it to the end unless `no_wait`: all at once, but on this machine one
    after the other. A closed terminal does not end this."""
    from llmlaunch.app.qualification import has_ended, submit_unless_submitted
    from llmlaunch.watch.screen import Screen, outliving_the_terminal

    screen = Screen(sys.stderr if as_json else sys.stdout, lasting=True)
    notify_each = _once()
    with outliving_the_terminal():
        groups = [[run_dir] for run_dir in run_dirs] if local else [run_dirs]
        for group in groups:
            submissions = [submit_unless_submitted(run_dir, local, notify_each) for run_dir in group]
            ongoing = [each for each in submissions if not has_ended(each)]
            if ongoing and not no_wait and not _follow(ongoing, screen):
                break


def _once() -> Callable[[str], None]:
    """Return `notify` for messages that six runs share."""
    messages: set[str] = set()

    def notify_once(message: str) -> None:
        if message not in messages:
            messages.add(message)
            notify(message)

    return notify_once


def _follow(submissions: Sequence[Submission], screen: Screen) -> bool:
    """Follow runs to their end; return False where a person stopped following before."""
    from llmlaunch.app.run_lookup import note_ends
    from llmlaunch.watch.follow import follow_several

    states = follow_several(submissions, screen)
    note_ends(((submission, states[submission.job_id]) for submission in submissions), notify)
    return all(state.ended for state in states.values())


def _show(base: Recipe, directory: Path | None, run_dirs: Sequence[Path], as_json: bool) -> int:
    """Show what the store knows of the qualification, and write it beside the runs."""
    from llmlaunch.app.qualification_results import qualification_result
    from llmlaunch.documents.writing import write_whole
    from llmlaunch.report.qualification_text import qualification_markdown, qualification_text

    result = qualification_result(base, directory, run_dirs, notify)
    if result is None:
        raise UserError(
            f"qualify: nothing was measured on {base.cluster.name} with {base.backend.name}"
            + (f" in {directory}" if directory else "")
            + "; the same command without --report begins"
        )
    answer: dict[str, Any] = result.to_json()
    if as_json:
        print_json(answer)
    else:
        say(qualification_text(answer))
    folder = Path(result.directory)
    if folder.is_dir():
        write_whole(folder / PAGE, qualification_markdown(answer))
        notify(f"the page: {folder / PAGE}")
    if not as_json:
        say_next(
            (to_type("calibrate"), "learns from the six")
            if answer["complete"]
            else (to_type("status"), "those that have not ended")
        )
    return 0 if result.as_predicted else OTHERWISE
