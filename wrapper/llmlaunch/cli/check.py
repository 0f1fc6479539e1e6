"""`llmlaunch check`: whether a recipe or a script fits, before anything is submitted."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
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
    repair_steps,
    replan_option,
    say_launch,
    say_why_not,
    script_options,
    steps_to_submit,
    verbose_option,
    warn_of_script_inputs,
    warn_of_what_is_missing,
)
from llmlaunch.errors import UserError
from llmlaunch.rundir.values import counted, to_type
from llmlaunch.units import gib

if TYPE_CHECKING:
    from llmlaunch.app.existing_job import ExistingJob
    from llmlaunch.planner.hints import Hint
    from llmlaunch.store.history import PastRun


@click.command("check")
@click.argument("recipe", metavar="RECIPE|SCRIPT", required=False)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--megatron-args", metavar="TEXT", help="Instead of RECIPE: the arguments of Megatron-LM's trainer.")
@script_options
@replan_option
@verbose_option
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def check_command(
    recipe: str | None,
    overrides: tuple[str, ...],
    megatron_args: str | None,
    script: ScriptInput,
    replan: bool,
    verbose: bool,
    as_json: bool,
) -> int:
    """Validate and plan RECIPE; show memory by pipeline rank, its limit, time and cost, and what to type next.

    SCRIPT is a shell script or sbatch file that starts Megatron-LM or DeepSpeed, and TEXT the arguments of
    pretrain_gpt.py: they are read, never executed, and priced as they are.

    \b
    llmlaunch check recipe.yaml
    llmlaunch check recipe.yaml nodes=8 layout.tensor=2
    llmlaunch check job.sbatch --cluster h100-80gb-x8

    Exit code 0: safe, or tight and accepted by the recipe. 2: the recipe is invalid. 3: no layout is safe, or none
    within the budget. 5: no verdict, because what decides memory was not read. A locked plan (`llmlaunch plan --lock`)
    may run whatever is known of it today.
    """
    if megatron_args is None and (recipe is None or not is_script(recipe, script)):
        if recipe is None:
            raise UserError("check: name a RECIPE or a SCRIPT, or give --megatron-args")
        script.refuse_for(recipe)
        run = planned(recipe, overrides, replan)
        run.refuse_unrenderable()
        notes = _readiness_notes(run) if run.plan.good else []
        return _end_check(
            run, notes, lambda: _steps_of_recipe(run, (recipe, *overrides)), warn_of_what_is_missing, verbose, as_json
        )
    return _check_script(recipe, overrides, megatron_args, script, verbose, as_json)


def _check_script(
    name: str | None,
    overrides: tuple[str, ...],
    megatron_args: str | None,
    script: ScriptInput,
    verbose: bool,
    as_json: bool,
) -> int:
    """Check the job of a script or of Megatron-LM's arguments. A launch that cannot work comes first, and the exit code
    is then that of a person's mistake."""
    from llmlaunch.cli.scripts import job_with_verdict, reading_notes, steps_after_script

    job = job_with_verdict(name, overrides, script, verbose, as_json, megatron_args)
    if isinstance(job, int):
        return job
    notes = reading_notes(job)
    words = overrides if megatron_args is None or name is None else (name, *overrides)
    return _end_check(
        job.run, notes, lambda: steps_after_script(job, script, words), warn_of_script_inputs, verbose, as_json, job
    )


def _end_check(
    run: PlannedRun,
    notes: list[str],
    steps: Callable[[], Steps],
    warn: Callable[[PlannedRun], None],
    verbose: bool,
    as_json: bool,
    job: ExistingJob | None = None,
) -> int:
    """Show the plan: the screen on stdout; warnings, and what forbids the plan, on stderr; last what to type next.
    `warn` writes what a plan that may run still lacks. `job` is that of a script, whose launch comes first."""
    hints = run.hints()
    if as_json:
        print_json(
            (run.json if job is None else job.as_json())
            | ({"hints": [hint.as_json() for hint in hints]} if hints else {})
        )
    else:
        if job is not None:
            say_launch(job)
        _show_screen(run, hints, verbose, job)
    for note in notes if verbose or as_json else []:
        notify(note)
    if run.plan.good:
        warn(run)
    code = say_why_not(run)
    code = code if job is None else exit_code_with_launch(job, code)
    if not as_json:
        behind = ["memory by term", "evidence", *([counted(len(notes), "note")] if notes else [])]
        behind += [counted(len(hints), "way") + " to be faster"] if hints else []
        more = [] if verbose else [(to_type(*sys.argv[1:], "-v"), ", ".join(behind))]
        say_next(*steps(), *more)
    return code


def _show_screen(run: PlannedRun, hints: Sequence[Hint], verbose: bool, job: ExistingJob | None) -> None:
    """Write the screen and, with `verbose`, what stands behind it."""
    from llmlaunch.app.evidence import last_true_peaks
    from llmlaunch.report.check_screen import check_screen
    from llmlaunch.report.terminal import shown_on

    past = last_true_peaks(run.recipe, notify)
    made_up = run.mock_data_warning
    remarks = [("Data", "made-up tokens (data.mock: true), on which nothing is learned")] if made_up else []
    remarks += [] if past is None else [("Before", sentence) for sentence in _past_sentences(past, run)]
    click.echo(check_screen(run.recipe, run.plan, shown_on(), remarks))
    if not verbose:
        return
    from llmlaunch.report.plan_text import check_text

    lines = ["", check_text(run.recipe, run.plan), *placement_lines(run)]
    lines += [] if past is None else _past_lines(past, run)
    lines += ["", *_faster(hints, job)] if hints else []
    lines += ["", made_up] if made_up else []
    lines += _first_rows(run)
    for line in lines:
        say(line)


def _first_rows(run: PlannedRun) -> list[str]:
    """Return what is learned of the first rows, where the shipped DeepSpeed trainer reads rows that are here."""
    if run.recipe.data.format is None or run.recipe.backend.on_megatron_core:
        return []
    from llmlaunch.readiness.rows import preview
    from llmlaunch.report.terminal import shown_on

    lines = preview(run.recipe, shown_on().width)
    return ["", "What is learned:", *lines] if lines else []


def _faster(hints: Sequence[Hint], job: ExistingJob | None) -> list[str]:
    """Return what makes a job faster, in the words of a recipe or of its script."""
    if job is None:
        return ["Faster, by one line of the recipe:", *(f"  {hint.sentence()}" for hint in hints)]
    from llmlaunch.app.existing_job import hint_in_words

    return ["Faster, by one change of the script:", *(f"  {hint_in_words(job, hint)}" for hint in hints)]


def _readiness_notes(run: PlannedRun) -> list[str]:
    own = () if run.plan.unrendered else run.backend.notes(run.recipe, run.plan.layout)
    return [f"note: {sentence}" for sentence in (*run.readiness.notes, *run.slurm_request.notes, *own)]


def _steps_of_recipe(run: PlannedRun, words: tuple[str, ...]) -> Steps:
    """Return what to type after `check` of a recipe, whose arguments are `words`."""
    return steps_to_submit(run, words) if run.plan.good else repair_steps(run)


def _past_sentences(past: PastRun, run: PlannedRun) -> list[str]:
    """Return the highest peak of an earlier run beside what is predicted now; nothing where it measured no peak of the
    kind that is predicted."""
    peaks = [peak.peak_bytes for peak in past.peaks if peak.peak_kind == run.plan.estimate.peak_kind]
    if not peaks:
        return []
    which = "this recipe" if past.same_recipe else "another version of this recipe"
    reached = f"{which} reached {gib(max(peaks))} GiB ({past.state}, {past.run_id})"
    return [f"{reached}; predicted now {gib(run.plan.device_bytes)}"]


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
