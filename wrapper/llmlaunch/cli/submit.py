"""`llmlaunch submit`: render, submit, record; with --follow also watch, collect and compare."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmlaunch.app.planned_run import PlannedRun
from llmlaunch.app.variants import SweepOptions, Variant, plan_variants, warn_of_memory
from llmlaunch.cli.next_steps import Step, run_path, while_going_on
from llmlaunch.cli.on_host import HostCommand
from llmlaunch.cli.output import notify, print_json, say, say_next
from llmlaunch.cli.planning import (
    ScriptInput,
    is_script,
    note_doubts,
    planned,
    recipe_or_script,
    replan_option,
    script_options,
    warn_of_readiness,
)
from llmlaunch.cli.waiting import waiting_for
from llmlaunch.documents.yaml_strict import STANDARD_INPUT
from llmlaunch.errors import SchedulerRefused, UserError
from llmlaunch.rundir.values import counted, to_type

if TYPE_CHECKING:
    from llmlaunch.app.submission import SubmittedRun
    from llmlaunch.launchers.base import Submission
    from llmlaunch.launchers.choose import LauncherChoice
    from llmlaunch.launchers.ssh.host import Host


SWEEP_KEYS = ("run_id", "run_dir", "launcher", "job_id")


class SubmitCommand(HostCommand):
    """With --on the recipes go to the host first."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """`--chain` alone is `--chain=afterok`; click would take the next word for its value."""
        return super().parse_args(ctx, ["--chain=afterok" if word == "--chain" else word for word in args])

    def run_on(self, host: Host, ctx: click.Context) -> int:
        from llmlaunch.app.sent_files import place_of_file, sent_files

        recipe, words = ctx.params["recipe"], ctx.params["overrides"]
        if recipe == STANDARD_INPUT or is_script(recipe):
            raise UserError(
                f"{recipe}: --on takes the file of a recipe; `{to_type('init', '--from', 'SCRIPT')}` writes that of a "
                "script"
            )
        sweep = SweepOptions(**{option.name: ctx.params[option.name] for option in fields(SweepOptions)})
        variants = sweep.variants(recipe, words)
        sent = sent_files(variants, notify)
        notify(f"Sending {counted(len(sent.files), 'file')} to {host.name}:{host.folder}, where the command runs")
        host.send(sent.files, sent.absent)
        places = {variant.recipe: place_of_file(variant.recipe) for variant in variants}
        words = tuple(places.get(word, word) for word in words)
        return host.run(self.words(ctx, recipe=places[recipe], overrides=words))


@click.command("submit", cls=SubmitCommand)
@recipe_or_script
@script_options
@click.option("--array", is_flag=True, help="Several runs as one job array.")
@click.option("--array-limit", type=click.IntRange(min=1), metavar="N", help="So many tasks of it run at a time.")
@click.option(
    "--chain",
    type=click.Choice(["afterok", "afterany"]),
    help="Several runs one after the other; afterok, unless given: an end without success ends the rest.",
)
@click.option("--grid", multiple=True, metavar="KEY=A,B", help="One run for each value, whatever the key holds.")
@click.option("--after", metavar="RUN|DIR", help="Start when that run has succeeded.")
@click.option("--dependency", metavar="WORD", help="As sbatch's own --dependency.")
@click.option("--dry-run", is_flag=True, help="Show what would be written and submitted; do neither.")
@click.option("--full", is_flag=True, help="With --dry-run: the scripts and arguments themselves.")
@click.option("--test-only", is_flag=True, help="Ask SLURM whether it would take the job; submit nothing.")
@click.option("--local", is_flag=True, help="Run on this machine, also where there is SLURM.")
@click.option("--follow", is_flag=True, help="Watch the job to its end, then collect its peaks.")
@click.option("--raw", is_flag=True, help="With --follow: the lines of the logs as they are.")
@replan_option
@click.option("--no-exclude", is_flag=True, help="Also on nodes that ended earlier runs (see llmlaunch nodes).")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The run directory; runs/NAME-TIME unless given.")
@click.option("--json", "as_json", is_flag=True, help="Print the submission as JSON.")
def submit_command(recipe: str, overrides: tuple[str, ...], script: ScriptInput, **options: Any) -> int:
    """Plan RECIPE, write its run directory, submit it to SLURM, or run it here where there is none.

    Several recipes, or several values of a key (training.steps=100,200), are several runs: all of them or none. Of a
    SCRIPT the recipe is written beside it first (init --from), with what differs from the script's own job, and you are
    asked.

    \b
    llmlaunch submit recipe.yaml --follow
    llmlaunch submit recipe.yaml --dry-run
    llmlaunch submit recipe.yaml training.steps=100,200 --array

    Exit code 0: submitted (with --follow: succeeded). 1: with --follow, it did not succeed. 2: invalid. 3: nothing
    safe. 4: the scheduler refused. 5: no verdict, because what decides memory was not read.
    """
    from llmlaunch.app.submission import earlier_submission
    from llmlaunch.launchers.choose import choose

    request = _Request(**{field.name: options.pop(field.name) for field in fields(_Request)})
    sweep = SweepOptions(**options)
    if is_script(recipe, script):
        if request.dry_run or request.test_only:
            return _try_script(recipe, overrides, script, request)
        recipe, overrides = _recipe_of_script(recipe, overrides, script), ()
    else:
        script.refuse_for(recipe)
    variants = sweep.variants(recipe, overrides)
    request.refuse_contradictions(several=len(variants) > 1)
    choice = choose(request.local, notify)
    if len(variants) == 1 and request.submits and request.output is not None:
        earlier = earlier_submission(request.output, notify)
        if earlier is not None:
            return _follow([earlier], request) if request.follow else 0
    runs = _planned_runs(recipe, variants, sweep)
    if request.dry_run:
        if len(runs) > 1:
            return _show_sweep(variants, runs, sweep, choice.where, request)
        return _show(runs[0], choice, request)
    if request.test_only:
        return _test(runs[0], choice, request.as_json)
    return _submit(variants, runs, sweep, choice, request)


@dataclass(frozen=True)
class _Request:
    """What is to be done with the runs, and where: options as they were typed."""

    dry_run: bool
    full: bool
    test_only: bool
    local: bool
    follow: bool
    raw: bool
    no_exclude: bool
    output: Path | None
    as_json: bool

    @property
    def submits(self) -> bool:
        return not (self.dry_run or self.test_only)

    def refuse_contradictions(self, several: bool) -> None:
        """Raise UserError for options that do not go together, or with `several` runs."""
        if self.full and not self.dry_run:
            raise UserError("--full: shows the scripts of a dry run; write --dry-run --full")
        if several and self.test_only:
            raise UserError("--test-only: asks SLURM about one run; --dry-run shows several")


def _try_script(recipe: str, overrides: Sequence[str], script: ScriptInput, request: _Request) -> int:
    """Show what would be submitted of a script, or ask SLURM about it; no file is written."""
    from llmlaunch.app.planned_run import plan
    from llmlaunch.cli.scripts import recipe_beside
    from llmlaunch.documents.yaml_strict import parse_document
    from llmlaunch.launchers.choose import choose
    from llmlaunch.recipe.load import load_written

    target, text = recipe_beside(Path(recipe), overrides, script)
    request.refuse_contradictions(several=False)
    choice = choose(request.local, notify)
    run = plan(load_written(parse_document(text, str(target)), (), target.parent), notify=notify)
    run.refuse_unsafe()
    return _show(run, choice, request) if request.dry_run else _test(run, choice, request.as_json)


def _recipe_of_script(recipe: str, overrides: Sequence[str], script: ScriptInput) -> str:
    """Write the recipe of a script beside it and return its path, if the person wants that submitted.

    Raises UserError where nobody can be asked, and for a file that exists already.
    """
    from llmlaunch.cli.init import write_recipe
    from llmlaunch.cli.scripts import recipe_beside

    target, text = recipe_beside(Path(recipe), overrides, script)
    command = to_type("submit", target)
    if os.path.lexists(target):
        raise UserError(f"{target}: exists, and is left as it is; `{command}` submits it, or move it out of the way")
    write_recipe(target, text)
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UserError(f"{recipe}: nothing is submitted without asking; read {target}, then type `{command}`")
    if not click.confirm(f"Submit {target}, with the differences above?", err=True):
        say_next((command, "when it is as you want it"))
        raise click.Abort
    return str(target)


def _planned_runs(recipe: str, variants: Sequence[Variant], sweep: SweepOptions) -> list[PlannedRun]:
    """Plan all runs, and say what a person should know of them."""
    if len(variants) > 1:
        with waiting_for("planning"):
            runs = plan_variants(variants, sweep, notify)
    else:
        runs = [_planned(recipe, variants[0].overrides, sweep.replan)]
    for run in runs:
        if run.mock_data_warning is not None:
            notify(f"note: {run.mock_data_warning}", colour="yellow")
    return runs


def _submit(
    variants: Sequence[Variant],
    runs: Sequence[PlannedRun],
    sweep: SweepOptions,
    choice: LauncherChoice,
    request: _Request,
) -> int:
    from llmlaunch.app.submission import submit_runs

    several = len(runs) > 1
    if not several:
        _refuse_missing(runs[0], choice)
    with waiting_for("writing and submitting the runs" if several else "writing and submitting the run"):
        submitted = submit_runs(
            runs, choice, request.output, notify, sweep, variants, exclude_nodes=not request.no_exclude
        )
    if request.as_json and several:
        rows = [{key: row[key] for key in SWEEP_KEYS} for row in (run.to_json() for run in submitted)]
        print_json({"sweep": str(submitted[0].run_dir.parent), "how": sweep.how, "runs": rows})
    elif request.as_json:
        print_json(submitted[0].to_json())
    if not several and (request.as_json or request.follow):
        notify(submitted[0].sentence)
    if request.follow:
        return _follow([run.submission for run in submitted], request)
    if not request.as_json:
        _say_submitted(runs, submitted)
    return 0


def _say_submitted(runs: Sequence[PlannedRun], submitted: Sequence[SubmittedRun]) -> None:
    """Say what was submitted, where it lies, and how to look at it."""
    from llmlaunch.report.submission_text import submitted_text

    first = submitted[0]
    if len(submitted) > 1:
        say(f"{counted(len(submitted), 'run')} submitted below {run_path(first.run_dir.parent)}")
        say_next((to_type("runs"), "all of them"), *while_going_on(first.run_dir)[:1])
        return
    jobs = ", ".join(first.submission.jobs)
    place = run_path(first.run_dir)
    say(submitted_text(runs[0].recipe, runs[0].plan, jobs, first.launcher == "slurm", place, datetime.now()))
    say_next(*while_going_on(first.run_dir))


def _planned(recipe: str, overrides: tuple[str, ...], replan: bool) -> PlannedRun:
    run = planned(recipe, overrides, replan)
    run.refuse_unsafe()
    warn_of_memory(run, notify)
    if run.plan.rehearsed is not None:
        notify(run.plan.rehearsed.sentence)
    return run


def _refuse_missing(run: PlannedRun, choice: LauncherChoice) -> None:
    of_slurm = choice.launcher.name == "slurm"
    note_doubts(run.readiness, *([run.slurm_request] if of_slurm else []))
    run.refuse_missing(of_slurm)


def _follow(submissions: Sequence[Submission], request: _Request) -> int:
    from llmlaunch.cli.following import follow_run, follow_sweep

    if len(submissions) > 1:
        return follow_sweep(submissions, request.as_json)
    return follow_run(submissions[0], request.raw, request.as_json)


def _show(run: PlannedRun, choice: LauncherChoice, request: _Request) -> int:
    """Show what would be submitted; with --full the scripts and arguments as `render` writes them."""
    if request.as_json or request.full:
        for note in run.rendered.notes:
            notify(f"note: {note}")
    files = run.files()
    if request.as_json:
        print_json({**run.json, "files": sorted(files)})
    elif request.full:
        for name in ("job.sbatch", "command.txt", "ds_config.json"):
            if name in files:
                say(f"===== {name}\n{files[name].decode()}")
        notify(
            f"{run.layout.describe()}; {counted(len(files), 'file')}; nothing was written or submitted. {choice.where}"
        )
    else:
        from llmlaunch.app.submission import runs_folder
        from llmlaunch.report.submission_text import dry_run_text

        directory = request.output or runs_folder() / f"{run.recipe.name}-TIME"
        of_slurm = choice.launcher.name == "slurm"
        say(dry_run_text(run.recipe, run.plan, of_slurm, directory, len(files), run.rendered.notes, datetime.now()))
    _refuse_missing(run, choice)
    if not request.as_json:
        say_next(*_after_dry_run(request.full))
    return 0


def _after_dry_run(full: bool) -> list[Step]:
    """Return the command that was typed without its `--dry-run`, and that with the scripts."""
    typed = sys.argv[1:]
    submitting = to_type(*(word for word in typed if word not in ("--dry-run", "--full")))
    return [(submitting, "")] if full else [(submitting, ""), (to_type(*typed, "--full"), "")]


def _show_sweep(
    variants: Sequence[Variant],
    runs: Sequence[PlannedRun],
    sweep: SweepOptions,
    where: str,
    request: _Request,
) -> int:
    """Show what would be written and submitted of several runs; with --full also the script of an array."""
    from llmlaunch.app.submission import sweep_name
    from llmlaunch.rendering.sweep import array_script, run_names

    names = run_names([run.recipe.name for run in runs])
    script = None
    if sweep.array:
        scripts = {name: run.job_script() for name, run in zip(names, runs, strict=True)}
        script = array_script(sweep_name(runs), scripts, sweep.array_limit)
    if request.as_json:
        rows = [
            variant.to_json(run.recipe.name) | {"plan": run.json} for variant, run in zip(variants, runs, strict=True)
        ]
        print_json({"how": sweep.how, "runs": rows, "script": script})
        return 0
    for name, variant, run in zip(names, variants, runs, strict=True):
        say(f"{name}: {variant.label}: {run.layout.describe()}")
    if script is not None and request.full:
        say(f"===== job.sbatch\n{script}")
    notify(f"{counted(len(runs), 'run')}, {sweep.description}; nothing was written or submitted. {where}")
    say_next(*_after_dry_run(request.full or script is None))
    return 0


def _test(run: PlannedRun, choice: LauncherChoice, as_json: bool) -> int:
    """Show what sbatch --test-only answers, how a refusal is mended, and what it does not look at."""
    from llmlaunch.launchers.run_environment import directives
    from llmlaunch.launchers.slurm.launcher import SlurmLauncher
    from llmlaunch.report.slurm_words import mend_of_refusal

    warn_of_readiness(run)
    if not isinstance(choice.launcher, SlurmLauncher):
        raise UserError(f"--test-only asks SLURM, and there is none to ask. {choice.why}")
    script = run.job_script()
    would_take, answer = choice.launcher.test(script)
    if as_json:
        print_json({"recipe": run.recipe.name, "would_take": would_take, "words": answer})
    notify(f"sbatch: {answer}")
    mend = "" if would_take else mend_of_refusal(answer, directives(script)).sentence
    if mend:
        notify(mend)
    notify(
        "nothing was submitted"
        + ("; a job id was used up. " if would_take else ". ")
        + "Where the site leaves EnforcePartLimits and "
        "AccountingStorageEnforce at their defaults, SLURM says yes to a wrong account, a wrong QoS and a time over "
        "the partition's limit, too"
    )
    return 0 if would_take else SchedulerRefused.exit_code
