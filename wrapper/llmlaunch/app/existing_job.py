"""A job that somebody already has, as its script or its arguments say it: read into a recipe and planned as it is."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmlaunch.app.evidence import Notify, ignore
from llmlaunch.app.planned_run import PlannedRun, plan
from llmlaunch.command_lines.command import TrainerCommand, Undecided
from llmlaunch.documents.yaml_strict import parse_document
from llmlaunch.errors import NoVerdict, UserError
from llmlaunch.imports.command import read_command
from llmlaunch.imports.recipe_file import RecipeSource, read_source, recipe_text, undecided_keys
from llmlaunch.recipe.load import load_written
from llmlaunch.rundir.foreign_values import is_whole_number
from llmlaunch.verdicts import UNKNOWN

__all__ = [
    "AssumedJob",
    "ExistingJob",
    "UndecidedJob",
    "job_of_arguments",
    "job_of_script",
    "no_verdict_json",
    "reading_lines",
]

MEGATRON_TRAINER = "pretrain_gpt.py"


@dataclass(frozen=True)
class ExistingJob:
    """A job as it was read, and its plan: the layout is the job's own."""

    source: RecipeSource
    run: PlannedRun
    notes: tuple[str, ...]


@dataclass(frozen=True)
class AssumedJob:
    """The plan of a job if a key that was not read has `value`."""

    key: str
    value: int
    run: PlannedRun


@dataclass(frozen=True)
class UndecidedJob:
    """A job of which a key that decides memory was not read, so that there is no verdict: the `reason`, and what each
    value of the key would mean."""

    source: RecipeSource
    name: str
    reason: str
    assumed: tuple[AssumedJob, ...]
    notes: tuple[str, ...]

    @property
    def error(self) -> NoVerdict:
        """The error that `check` ends with."""
        first = self.assumed[-1]
        return NoVerdict.on(self.name, f"{self.reason}; {first.key}={first.value} on the command line, say, decides it")

    def as_json(self) -> dict[str, Any]:
        """Return the answer in the shape of docs/schemas/plan.schema.json without a plan."""
        return no_verdict_json(self.name, self.reason) | {
            "assumed": [
                {"assumption": {each.key: each.value}, "verdict": each.run.verdict, "memory": each.run.json["memory"]}
                for each in self.assumed
            ]
        }


def no_verdict_json(name: str, reason: str) -> dict[str, Any]:
    """Return what `check --json` prints of a job that has no plan, because what decides its memory was not read."""
    return {"recipe": name, "verdict": UNKNOWN, "reason": reason}


def job_of_arguments(
    arguments: str, cluster: str | None, overrides: Sequence[str] = (), notify: Notify = ignore
) -> ExistingJob | UndecidedJob:
    """Plan the training that `pretrain_gpt.py` with these arguments, one text as typed in a shell, would run.

    Raises:
        UserError: the text is no command line, or does not say all that a plan needs.
    """
    try:
        words = shlex.split(arguments)
    except ValueError as error:
        raise UserError(f"--megatron-args: {error}; quote the whole text once, and its parts as in a shell") from None
    if not words:
        raise UserError("--megatron-args: is empty; give the arguments of pretrain_gpt.py")
    command = TrainerCommand(MEGATRON_TRAINER, tuple(words), place="--megatron-args")
    return _planned(RecipeSource(Path(command.place), read_command(command), command), cluster, overrides, notify)


def job_of_script(
    path: Path,
    cluster: str | None,
    overrides: Sequence[str] = (),
    notify: Notify = ignore,
    *,
    variables: Mapping[str, str] | None = None,
    number: int | None = None,
) -> ExistingJob | UndecidedJob:
    """Plan the training that a shell script starts; nothing of it is executed. `variables` are values of what the
    script's caller sets, its arguments by their numbers; `number` chooses among several trainings.

    Raises:
        NoVerdict: the trainer is one that is not read.
        UserError: the script cannot be read, starts no training, or does not say all that a plan needs.
    """
    values = variables or {}
    named = {name: value for name, value in values.items() if not is_whole_number(name)}
    most = max((int(name) for name in values if is_whole_number(name)), default=0)
    arguments = [values.get(str(place), "") for place in range(1, most + 1)]
    return _planned(read_source(path, arguments, named, number, cluster), cluster, overrides, notify)


def _planned(
    source: RecipeSource, cluster: str | None, overrides: Sequence[str], notify: Notify
) -> ExistingJob | UndecidedJob:
    undecided = undecided_keys(source, overrides)
    if undecided:
        return _undecided(source, undecided[0], cluster, overrides, notify)
    return _decided(source, cluster, overrides, notify)


def _undecided(
    source: RecipeSource, undecided: Undecided, cluster: str | None, overrides: Sequence[str], notify: Notify
) -> UndecidedJob:
    """Plan the job with each value of a key that was not read; a value that no layout may have is left out.

    Raises:
        UserError: the job cannot be planned with any value.
    """
    assumed: list[AssumedJob] = []
    notes: tuple[str, ...] = ()
    for value in undecided.values:
        try:
            job = _decided(source, cluster, (*overrides, f"{undecided.key}={value}"), ignore if assumed else notify)
        except UserError:
            continue
        assumed.append(AssumedJob(undecided.key, value, job.run))
        notes = job.notes
    if not assumed:
        _decided(source, cluster, overrides, notify)  # raises the error that names all that is missing
    name = str(source.reading.document["name"])
    return UndecidedJob(source, name, undecided.reason, tuple(assumed), notes)


def _decided(source: RecipeSource, cluster: str | None, overrides: Sequence[str], notify: Notify) -> ExistingJob:
    command = source.command
    place, folder = (str(source.path), source.path.parent) if command is None else (command.place, command.folder)
    text, notes = recipe_text(source, source.path, cluster, overrides, option="")
    recipe = load_written(parse_document(text, f"the recipe read of {place}"), (), folder)
    return ExistingJob(source, plan(recipe, notify=notify, replan=True), notes)


def reading_lines(job: ExistingJob | UndecidedJob) -> list[str]:
    """Return what a person should know of how the job was read, a line each. What rendering it would change is for
    those who make a recipe of it (`llmlaunch init --from`)."""
    source, reading = job.source, job.source.reading
    notes = [note for note in (*source.notes, *reading.notes) if not note.startswith("rendering ")]
    lines = [f"note: {source.path}: {note}" for note in (*notes, *job.notes)]
    lines += [f"warning: {source.path}: {shlex.join(words.words)}: {words.reason}" for words in reading.unread]
    if len(source.trainings) > 1:
        lines.append(
            f"note: {source.path}: starts {len(source.trainings)} trainings (--command N): "
            + "; ".join(source.trainings)
        )
    run = job.run if isinstance(job, ExistingJob) else job.assumed[-1].run
    assumed = run.backend.facts(run.recipe).host.loading_assumed
    lines += [f"note: {source.path}: {assumed}"] if assumed else []
    if reading.not_rendered is not None:
        lines.append(f"note: {source.path}: it can be checked and not rendered: {reading.not_rendered}")
    return lines
