"""`llmlaunch submit`: render, submit, record; with --follow also watch, collect and compare."""

from __future__ import annotations

import functools
import importlib.util
import os
import secrets
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmlaunch.cli.planned import Planned, plan_loaded, planned, recipe_arguments
from llmlaunch.cli.printed import print_json, say
from llmlaunch.cli.together import SubmitCommand, Together, together_options
from llmlaunch.errors import UserError
from llmlaunch.rundir.messages import counted, to_type

if TYPE_CHECKING:
    from llmlaunch.launchers.base import Submission
    from llmlaunch.launchers.choose import Choice

__all__ = ["command"]

FAILED = 1


@click.command("submit", cls=SubmitCommand)
@recipe_arguments
@together_options
@click.option("--dry-run", is_flag=True, help="Show what would be written and submitted; do neither.")
@click.option("--test-only", is_flag=True, help="Ask SLURM whether it would take the job; submit nothing.")
@click.option("--local", is_flag=True, help="Run on this machine, also where there is SLURM.")
@click.option("--follow", is_flag=True, help="Watch the job to its end, then collect its peaks.")
@click.option("--raw", is_flag=True, help="With --follow: the lines of the logs as they are.")
@click.option("--no-exclude", is_flag=True, help="Also on nodes that ended earlier runs (see llmlaunch nodes).")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The run directory; runs/NAME-TIME unless given.")
@click.option("--json", "as_json", is_flag=True, help="Print the submission as JSON.")
def command(
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
    together: Together,
) -> int:
    """Plan RECIPE, write its run directory, submit it to SLURM, or run it here where there is none.

    Several recipes, or several values of a key (training.steps=100,200), are several runs: all of them or none.

    Exit code 0: submitted (with --follow: succeeded). 1: with --follow, it did not succeed. 2: invalid. 3: nothing
    safe. 4: the scheduler refused.
    """
    from llmlaunch.launchers.choose import choose

    choice = choose(local, lambda line: say(line, err=True))
    variants = together.variants(recipe, overrides)
    if len(variants) > 1:
        from llmlaunch.cli.sweep import plan_all, show_sweep, submit_all

        if test_only:
            raise UserError("--test-only: asks SLURM about one run; --dry-run shows several")
        results = plan_all(variants, together)
        if dry_run:
            return show_sweep(variants, results, together, choice.why, as_json)
        words = functools.partial(_extra_words, choice, no_exclude=no_exclude)
        return submit_all(variants, results, together, choice, words, _record, output, follow, as_json)
    taken = None if dry_run or test_only or output is None else _taken(output)
    if taken is not None:
        return _follow(taken, raw, aside=as_json) if follow else 0
    result = planned(recipe, variants[0].overrides)
    _refuse(result)
    result.warn_of_missing_fallbacks()
    result.say_what_was_rehearsed()
    if dry_run:
        shown = _show(result, choice.why, as_json)
        result.refuse_missing_inputs()
        return shown
    if test_only:
        result.warn_of_missing_inputs()
        return _test(result, choice, as_json)
    result.refuse_missing_inputs()
    if choice.launcher.name == "local":
        result = _for_this_machine(result, choice.why)
    extra = together.sbatch_words()
    directory = _render(result, output)
    say(choice.why, err=True)
    extra = [*extra, *_extra_words(choice, directory, no_exclude)]
    from llmlaunch.cli.resume import refusals_recorded

    with refusals_recorded(directory):
        submission = choice.launcher.submit(directory, extra)
    say(f"job {', '.join(submission.jobs)} in {directory}", err=True)
    _record(result, submission)
    if as_json:
        print_json(_submission_json(result, submission))
    if not follow:
        say(f"look again: {to_type('status', directory)}; {to_type('logs', directory)}", err=True)
        return 0
    return _follow(submission, raw, aside=as_json)


def _extra_words(choice: Choice, directory: Path, no_exclude: bool) -> tuple[str, ...]:
    if no_exclude or choice.launcher.name != "slurm":
        return ()
    from llmlaunch.cli.excluded import excluded_words

    return excluded_words(directory)


def _taken(output: Path) -> Submission | None:
    """The job of a directory whose submit was interrupted, where SLURM has it. Raises UserError for one that needs
    another command."""
    from llmlaunch.cli.submitted import submission_in
    from llmlaunch.launchers import run_files, submitting

    if not (output / run_files.SCRIPT).is_file():
        return None
    run_files.refuse_foreign(output)
    if submitting.was_submitting(output) is not None:
        submission = submission_in(output.resolve())
        say(f"job {', '.join(submission.jobs)} in {output}: nothing was submitted again", err=True)
        return submission
    earlier = run_files.read_submission(output)
    if earlier is not None:
        raise UserError(
            f"{output}: already submitted as {earlier.launcher} job {earlier.job_id}; when that has ended, "
            f"{to_type('resume', output)} submits it again; another -o renders another run"
        )
    raise UserError(
        f"{output}: rendered before, and not submitted; {to_type('resume', output)} submits it as it is; another -o "
        "renders another run"
    )


def _test(result: Planned, choice: Choice, as_json: bool) -> int:
    """What sbatch --test-only says, in its own words, and what it does not look at."""
    from llmlaunch.errors import SchedulerRefused
    from llmlaunch.launchers.slurm.launcher import SlurmLauncher
    from llmlaunch.rendering.scripts import job_script

    if not isinstance(choice.launcher, SlurmLauncher):
        raise UserError(f"--test-only asks SLURM, and there is none to ask. {choice.why}")
    would, words = choice.launcher.test(job_script(result.recipe, result.plan))
    if as_json:
        print_json({"recipe": result.recipe.name, "would_take": would, "words": words})
    say(f"sbatch: {words}", err=True)
    say(
        "nothing was submitted"
        + ("; a job id was used up. " if would else ". ")
        + "Where the site leaves EnforcePartLimits and "
        "AccountingStorageEnforce at their defaults, SLURM says yes to a wrong account, a wrong QoS and a time over "
        "the partition's limit, too",
        err=True,
    )
    return 0 if would else SchedulerRefused.exit_code


def _refuse(result: Planned) -> None:
    from llmlaunch.planner.unsafe import refuse

    refuse(result.plan)


def _for_this_machine(result: Planned, why: str) -> Planned:
    """The plan of a local run, after all that can be refused at once: with an interpreter that can train (the
    recipe's, else what LLMLAUNCH_PYTHON names, else this one), and where the peak is resident memory with the idle
    trainer's bytes measured, not guessed."""
    from llmlaunch.launchers.baseline import measured_baseline
    from llmlaunch.launchers.local_gpus import refuse_missing_gpus

    recipe = result.recipe
    if recipe.nodes > 1:
        raise UserError(
            f"{recipe.path}: nodes: is {recipe.nodes}, and this machine is one; submit where there is SLURM, or try "
            f"nodes=1. {why}"
        )
    if recipe.cluster.accelerator.kind != "cpu":
        accelerator = recipe.cluster.accelerator
        refuse_missing_gpus(recipe.path, accelerator.name, recipe.cluster.devices_per_node, accelerator.memory_bytes)
    python = recipe.python or os.environ.get("LLMLAUNCH_PYTHON") or sys.executable
    if python == sys.executable and importlib.util.find_spec("torch") is not None:
        os.environ["LLMLAUNCH_PYTHON"] = python
    if recipe.cluster.accelerator.kind != "cpu" or recipe.backend.name != "deepspeed":
        return result
    baseline = measured_baseline(python, lambda line: say(line, err=True))
    measured = plan_loaded(recipe, baseline, result.plan.sizing)
    _refuse(measured)
    return measured


def _render(result: Planned, output: Path | None) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    runs = Path(os.environ.get("LLMLAUNCH_RUNS", "runs"))
    directory = output or runs / f"{result.recipe.name}-{stamp}-{secrets.token_hex(2)}"
    result.write_run(directory)
    return directory.resolve()


def _show(result: Planned, why: str, as_json: bool) -> int:
    """What would be written, the scripts on stdout, in the same words `render` writes them."""
    from llmlaunch.rendering.provenance import gather_provenance
    from llmlaunch.rendering.run_directory import run_files

    files = run_files(result.recipe, result.plan, result.json, result.rendered(), gather_provenance(result.recipe))
    if as_json:
        print_json({**result.json, "files": sorted(files)})
        return 0
    for name in ("job.sbatch", "train.sh", "ds_config.json"):
        if name in files:
            say(f"===== {name}\n{files[name].decode()}")
    say(
        f"{result.plan.layout.describe()}; {counted(len(files), 'file')}; nothing was written or submitted. {why}",
        err=True,
    )
    return 0


def _record(result: Planned, submission: Submission) -> None:
    """The store is an index: where it cannot be written the job runs on, and `collect` can name it later."""
    from llmlaunch.store.database import open_store
    from llmlaunch.store.runs import record_submission

    try:
        with open_store() as store:
            record_submission(store, result.recipe, result.json, submission.run_dir, asdict(submission))
    except UserError as failure:
        say(
            f"warning: the run goes on, but the store does not know it ({failure}); "
            f"later: {to_type('collect', submission.run_dir)}",
            err=True,
        )


def _submission_json(result: Planned, submission: Submission) -> dict[str, Any]:
    from llmlaunch.rundir.files import read_run_id

    return {
        "recipe": result.recipe.name,
        "run_id": read_run_id(submission.run_dir),
        "run_dir": str(submission.run_dir),
        "launcher": submission.launcher,
        "job_id": submission.job_id,
        "layout": result.plan.layout.as_json(),
    }


def _follow(submission: Submission, raw: bool, aside: bool) -> int:
    """To the job's end, also where the terminal is closed on the way: the run is collected then, too. `aside`: on
    stderr, because stdout holds the JSON alone."""
    from llmlaunch.cli.outcome import tell_outcome
    from llmlaunch.cli.submitted import note_end
    from llmlaunch.watch.follow import follow
    from llmlaunch.watch.screen import Screen, outliving_the_terminal

    warn = Screen(sys.stderr, lasting=True)
    screen = warn if aside else Screen(sys.stdout, lasting=True)
    with outliving_the_terminal():
        state = follow(submission, screen, raw)
        if not state.ended:
            return 0
        note_end(submission, state)
        tell_outcome(submission.run_dir, state, screen, warn)
    return 0 if state.phase == "succeeded" else FAILED
