"""`llmlaunch submit`: render, submit, record; with --follow also watch, collect and compare."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmlaunch.app.planned_run import PlannedRun
from llmlaunch.app.variants import SweepOptions, Variant, plan_variants, warn_of_memory
from llmlaunch.cli.output import notify, print_json, say
from llmlaunch.cli.planning import note_doubts, planned, recipe_arguments, replan_option, warn_of_readiness
from llmlaunch.errors import SchedulerRefused, UserError
from llmlaunch.rundir.values import counted, to_type

if TYPE_CHECKING:
    from llmlaunch.launchers.base import Submission
    from llmlaunch.launchers.choose import LauncherChoice

__all__ = ["submit_command"]

SWEEP_KEYS = ("run_id", "run_dir", "launcher", "job_id")


class SubmitCommand(click.Command):
    """`--chain` alone is `--chain=afterok`; click would take the next word for its value."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, ["--chain=afterok" if word == "--chain" else word for word in args])


@click.command("submit", cls=SubmitCommand)
@recipe_arguments
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
@click.option("--test-only", is_flag=True, help="Ask SLURM whether it would take the job; submit nothing.")
@click.option("--local", is_flag=True, help="Run on this machine, also where there is SLURM.")
@click.option("--follow", is_flag=True, help="Watch the job to its end, then collect its peaks.")
@click.option("--raw", is_flag=True, help="With --follow: the lines of the logs as they are.")
@replan_option
@click.option("--no-exclude", is_flag=True, help="Also on nodes that ended earlier runs (see llmlaunch nodes).")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The run directory; runs/NAME-TIME unless given.")
@click.option("--json", "as_json", is_flag=True, help="Print the submission as JSON.")
def submit_command(
    recipe: str,
    overrides: tuple[str, ...],
    dry_run: bool,
    test_only: bool,
    local: bool,
    follow: bool,
    raw: bool,
    no_exclude: bool,
    output: Path | None,
    as_json: bool,
    **sweep: Any,
) -> int:
    """Plan RECIPE, write its run directory, submit it to SLURM, or run it here where there is none.

    Several recipes, or several values of a key (training.steps=100,200), are several runs: all of them or none.

    Exit code 0: submitted (with --follow: succeeded). 1: with --follow, it did not succeed. 2: invalid. 3: nothing
    safe. 4: the scheduler refused.
    """
    from llmlaunch.app.submission import earlier_submission, submit_runs
    from llmlaunch.launchers.choose import choose

    options = SweepOptions(**sweep)
    choice = choose(local, notify)
    variants = options.variants(recipe, overrides)
    several = len(variants) > 1
    if several and test_only:
        raise UserError("--test-only: asks SLURM about one run; --dry-run shows several")
    writes_one = not (several or dry_run or test_only)
    if writes_one and output is not None and (earlier := earlier_submission(output, notify)) is not None:
        return _follow([earlier], raw, as_json) if follow else 0
    runs = (
        plan_variants(variants, options, notify)
        if several
        else [_planned(recipe, variants[0].overrides, options.replan)]
    )
    for run in runs:
        if run.mock_data_warning is not None:
            notify(f"note: {run.mock_data_warning}", colour="yellow")
    if dry_run:
        return _show_sweep(variants, runs, options, choice.why, as_json) if several else _show(runs[0], choice, as_json)
    if test_only:
        warn_of_readiness(runs[0])
        return _test(runs[0], choice, as_json)
    if not several:
        _refuse_missing(runs[0], choice)
    submitted = submit_runs(runs, choice, output, notify, options, variants, exclude_nodes=not no_exclude)
    if as_json and several:
        rows = [{key: row[key] for key in SWEEP_KEYS} for row in (run.to_json() for run in submitted)]
        print_json({"sweep": str(submitted[0].run_dir.parent), "how": options.how, "runs": rows})
    elif as_json:
        print_json(submitted[0].to_json())
    if follow:
        return _follow([run.submission for run in submitted], raw, as_json)
    _hint(submitted[0].run_dir, several)
    return 0


def _hint(directory: Path, several: bool) -> None:
    commands: tuple[str, ...] = (to_type("status", directory), to_type("logs", directory))
    if several:
        commands = ("llmlaunch runs", "llmlaunch status DIR", "llmlaunch logs DIR")
    notify(f"look again: {'; '.join(commands)}")


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


def _follow(submissions: Sequence[Submission], raw: bool, json_on_stdout: bool) -> int:
    from llmlaunch.cli.following import follow_run, follow_sweep

    if len(submissions) > 1:
        return follow_sweep(submissions, json_on_stdout)
    return follow_run(submissions[0], raw, json_on_stdout)


def _show(run: PlannedRun, choice: LauncherChoice, as_json: bool) -> int:
    """Show what would be written, with the scripts as `render` writes them."""
    for note in run.rendered.notes:
        notify(f"note: {note}")
    files = run.files()
    if as_json:
        print_json({**run.json, "files": sorted(files)})
    else:
        for name in ("job.sbatch", "train.sh", "ds_config.json"):
            if name in files:
                say(f"===== {name}\n{files[name].decode()}")
        notify(
            f"{run.layout.describe()}; {counted(len(files), 'file')}; nothing was written or submitted. {choice.why}"
        )
    _refuse_missing(run, choice)
    return 0


def _show_sweep(
    variants: Sequence[Variant], runs: Sequence[PlannedRun], options: SweepOptions, why: str, as_json: bool
) -> int:
    """Show what would be written and submitted of several runs."""
    from llmlaunch.app.submission import sweep_name
    from llmlaunch.rendering.sweep import array_script, run_names

    names = run_names([run.recipe.name for run in runs])
    script = None
    if options.array:
        scripts = {name: run.job_script() for name, run in zip(names, runs, strict=True)}
        script = array_script(sweep_name(runs), scripts, options.array_limit)
    if as_json:
        rows = [
            variant.to_json(run.recipe.name) | {"plan": run.json} for variant, run in zip(variants, runs, strict=True)
        ]
        print_json({"how": options.how, "runs": rows, "script": script})
        return 0
    for name, variant, run in zip(names, variants, runs, strict=True):
        say(f"{name}: {variant.label}: {run.layout.describe()}")
    if script is not None:
        say(f"===== job.sbatch\n{script}")
    notify(f"{counted(len(runs), 'run')}, {options.description}; nothing was written or submitted. {why}")
    return 0


def _test(run: PlannedRun, choice: LauncherChoice, as_json: bool) -> int:
    """Show what sbatch --test-only answers, and what it does not look at."""
    from llmlaunch.launchers.slurm.launcher import SlurmLauncher

    if not isinstance(choice.launcher, SlurmLauncher):
        raise UserError(f"--test-only asks SLURM, and there is none to ask. {choice.why}")
    would_take, answer = choice.launcher.test(run.job_script())
    if as_json:
        print_json({"recipe": run.recipe.name, "would_take": would_take, "words": answer})
    notify(f"sbatch: {answer}")
    notify(
        "nothing was submitted"
        + ("; a job id was used up. " if would_take else ". ")
        + "Where the site leaves EnforcePartLimits and "
        "AccountingStorageEnforce at their defaults, SLURM says yes to a wrong account, a wrong QoS and a time over "
        "the partition's limit, too"
    )
    return 0 if would_take else SchedulerRefused.exit_code
