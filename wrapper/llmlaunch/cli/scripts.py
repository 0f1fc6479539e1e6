"""What `check`, `plan`, `compare`, `diff` and `submit` do with a script in place of a recipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from llmlaunch.app.existing_job import (
    EXPORT,
    ExistingJob,
    UndecidedJob,
    change_in_words,
    job_of_arguments,
    job_of_script,
    no_verdict_json,
    reading_lines,
    recipe_settings,
)
from llmlaunch.cli.output import notify, print_json, say, say_next
from llmlaunch.cli.planning import (
    NO_SCRIPT,
    ScriptInput,
    Steps,
    exit_code_with_launch,
    repair_steps,
    say_launch,
)
from llmlaunch.cluster.load import load_cluster
from llmlaunch.command_lines.recipe_draft import LEFT_OUT
from llmlaunch.errors import NoVerdict
from llmlaunch.imports.recipe_file import RecipeSource, read_with_settings, recipe_text
from llmlaunch.report.check_screen import no_verdict_screen
from llmlaunch.report.terminal import shown_on
from llmlaunch.rundir.values import counted, to_type
from llmlaunch.verdicts import UNKNOWN


def job_of(
    name: str | None,
    overrides: Sequence[str],
    script: ScriptInput = NO_SCRIPT,
    megatron_args: str | None = None,
) -> ExistingJob | UndecidedJob:
    """Plan the job of a script, or of Megatron-LM's arguments, beside which `name` is an override."""
    if megatron_args is not None:
        words = overrides if name is None else (name, *overrides)
        return job_of_arguments(megatron_args, script.cluster, words, notify, script.settings)
    path = Path(str(name))
    return job_of_script(path, script.cluster, overrides, notify, settings=script.settings, number=script.number)


def job_with_verdict(
    name: str | None,
    overrides: Sequence[str],
    script: ScriptInput,
    verbose: bool,
    as_json: bool,
    megatron_args: str | None = None,
) -> ExistingJob | int:
    """Return the job of a script after its warnings, or the exit code where there is no verdict, which was shown."""
    try:
        job = job_of(name, overrides, script, megatron_args)
    except NoVerdict as failure:
        if not failure.reason:
            raise
        return end_without_plan(failure, script.cluster, as_json)
    if isinstance(job, ExistingJob):
        return job
    return end_undecided(job, verbose, as_json)


def reading_notes(job: ExistingJob | UndecidedJob) -> list[str]:
    """Warn of what was not read of a script; return the notes on how it was read."""
    lines = reading_lines(job)
    for line in lines:
        if line.startswith("warning: "):
            notify(line)
    return [line for line in lines if not line.startswith("warning: ")]


def end_without_plan(failure: NoVerdict, cluster: str | None, as_json: bool) -> int:
    """Show why a job has no verdict and no figure. Raises UserError for a cluster that does not exist, which comes
    first."""
    if cluster is not None:
        load_cluster(cluster)
    if as_json:
        print_json(no_verdict_json(failure.recipe, failure.reason))
    else:
        click.echo(no_verdict_screen(failure.recipe, failure.reason, shown_on()))
    notify(f"error: {failure}")
    return failure.exit_code


def end_undecided(job: UndecidedJob, verbose: bool, as_json: bool) -> int:
    """Show why a job has no verdict, and its memory by what was not read."""
    notes = reading_notes(job)
    if as_json:
        print_json(job.as_json())
    else:
        say_launch(job)
        assumed = [(f"{each.key}: {each.value}", each.run.plan) for each in job.assumed]
        click.echo(no_verdict_screen(job.name, job.reason, shown_on(), assumed))
    for note in notes if verbose or as_json else []:
        notify(note)
    failure = job.error
    notify(f"error: {failure}")
    code = exit_code_with_launch(job, failure.exit_code)
    if not as_json:
        decided = job.assumed[-1]
        say_next((to_type(*sys.argv[1:], f"{decided.key}={decided.value}"), "if that is what it has"))
    return code


def script_words(script: ScriptInput) -> tuple[str, ...]:
    """Return the options of a script as they are typed."""
    words = ["--cluster", script.cluster] if script.cluster else []
    words += [word for setting in script.settings for word in ("--set", setting)]
    return (*words, *(("--command", str(script.number)) if script.number else ()))


def steps_after_script(job: ExistingJob, script: ScriptInput, overrides: Sequence[str] = ()) -> Steps:
    """Return what to type after the plan of a script or of arguments, as it was read with these options."""
    source = job.source
    if not job.run.plan.good:
        steps = repair_steps(job.run, change_in_words(job))
        unknown = job.run.plan.arguments.deciding or job.run.plan.arguments.unknown
        if unknown and (job.run.verdict == UNKNOWN or job.run.plan.tight_by_arguments):
            names = ",".join(dict.fromkeys(argument.flag.removeprefix("backend.ds_config.") for argument in unknown))
            command = to_type(*sys.argv[1:], f"backend.neutral_args=[{names}]")
            steps.insert(0, (command, "if none of them changes memory"))
        if job.with_export is not None:
            steps.insert(0, (to_type(*sys.argv[1:], f"environment.{EXPORT}"), "with that export in the script"))
        return steps
    assumed = recipe_settings(job, script.cluster, overrides)
    unrendered = job.run.plan.unrendered or job.run.recipe.techniques.what_ifs or source.reading.not_rendered
    if assumed is None or unrendered or not source.path.is_file():
        return []
    settings = tuple(word for setting in (*overrides, *assumed) for word in ("--set", setting))
    words = (source.path, *script_words(script), *settings)
    where = f" (write your own {' and '.join(word.partition('=')[0] for word in assumed)})" if assumed else ""
    return [(to_type("init", "--from", *words), f"makes a recipe of it, for llmlaunch submit{where}")]


def recipe_from_script(
    path: Path, arguments: Sequence[str], settings: Sequence[str], cluster: str | None, number: int | None
) -> tuple[str, str]:
    """Return a recipe's name and text, and say on stderr what was not read of the file."""
    source = read_with_settings(path, settings, arguments, number, cluster)
    if source.unset and sys.stdin.isatty() and sys.stderr.isatty():
        asked = _ask(source)
        source = read_with_settings(path, (*settings, *asked), arguments, number, cluster) if asked else source
    names = [key.partition("=")[0] for key in source.keys]
    given = dict(key.split("=", 1) for key in source.keys)
    name = given.get("name") or str(source.reading.document["name"])
    text, notes = recipe_text(source, Path(f"{name}.yaml"), cluster)
    _say_what_was_read(source, number, names)
    for note in notes:
        say(f"note: {note}", err=True)
    return name, text


def recipe_beside(path: Path, overrides: Sequence[str], script: ScriptInput) -> tuple[Path, str]:
    """Return where the recipe of a script lies beside it, and its text; say on stderr how it differs from the script.
    `overrides` are `KEY=VALUE` words for the recipe."""
    name, text = recipe_from_script(path, (), (*script.settings, *overrides), script.cluster, script.number)
    return path.parent / f"{name}.yaml", text


def _ask(source: RecipeSource) -> list[str]:
    """Ask for the variables without a value, and return the settings; an empty answer leaves one as it is."""
    values = []
    for unset in source.unset:
        question = f"{source.path}:{unset.line}: ${unset.name} has no value here; value (Enter to leave it out)"
        answer = click.prompt(question, default="", show_default=False, err=True)
        if answer:
            values.append(f"{unset.name}={answer}")
    return values


def _say_what_was_read(source: RecipeSource, number: int | None, keys: Sequence[str]) -> None:
    reading = source.reading
    if len(source.trainings) > 1 and number is None:
        say(f"{source.path}: starts {counted(len(source.trainings), 'training')}; the last is read:", err=True)
        for place, training in enumerate(source.trainings, start=1):
            say(f"  --command {place}: {training}", err=True)
    for unread in reading.unread:
        say(f"not read: {' '.join(unread.words)}: {unread.reason}", err=True)
    for note in (*source.notes, *reading.notes):
        say(f"{'warning' if note.startswith(LEFT_OUT) else 'note'}: {note}", err=True)
    for sentence in (each for each in reading.missing if each.partition(":")[0] not in keys):
        say(f"missing: {sentence}", err=True)
    for unset in source.unset:
        say(f"missing: ${unset.name} of {source.path}:{unset.line}; add --set {unset.name}=VALUE", err=True)
    for problem in () if source.command is None else source.command.launch_problems:
        say(f"differs: {source.path}:{problem.line}: {problem.problem}; llmlaunch starts the ranks itself", err=True)
    if reading.not_rendered is not None:
        say(f"note: the recipe can be checked and not submitted: {reading.not_rendered}", err=True)
