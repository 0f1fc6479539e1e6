"""A job that somebody already has, as its script or its arguments say it: read into a recipe and planned as it is."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmlaunch.app.evidence import Notify, ignore
from llmlaunch.app.planned_run import PlannedRun, plan
from llmlaunch.command_lines.command import TrainerCommand
from llmlaunch.command_lines.reading import read_command
from llmlaunch.command_lines.recipe_file import RecipeSource, read_source, recipe_text
from llmlaunch.documents.yaml_strict import parse_document
from llmlaunch.errors import UserError
from llmlaunch.recipe.load import load_written

__all__ = ["ExistingJob", "job_of_arguments", "job_of_script", "reading_lines"]

MEGATRON_TRAINER = "pretrain_gpt.py"


@dataclass(frozen=True)
class ExistingJob:
    """A job as it was read, and its plan: the layout is the job's own."""

    source: RecipeSource
    run: PlannedRun
    notes: tuple[str, ...]


def job_of_arguments(
    arguments: str, cluster: str | None, overrides: Sequence[str] = (), notify: Notify = ignore
) -> ExistingJob:
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
) -> ExistingJob:
    """Plan the training that a shell script starts; nothing of it is executed. `variables` are values of what the
    script's caller sets, its arguments by their numbers; `number` chooses among several trainings.

    Raises:
        UserError: the script cannot be read, starts no training, or does not say all that a plan needs.
    """
    values = variables or {}
    named = {name: value for name, value in values.items() if not name.isdigit()}
    most = max((int(name) for name in values if name.isdigit()), default=0)
    arguments = [values.get(str(place), "") for place in range(1, most + 1)]
    return _planned(read_source(path, arguments, named, number), cluster, overrides, notify)


def _planned(source: RecipeSource, cluster: str | None, overrides: Sequence[str], notify: Notify) -> ExistingJob:
    command = source.command
    place, folder = (str(source.path), source.path.parent) if command is None else (command.place, command.folder)
    text, notes = recipe_text(source, source.path, cluster, overrides, option="")
    recipe = load_written(parse_document(text, f"the recipe read of {place}"), (), folder)
    return ExistingJob(source, plan(recipe, notify=notify, replan=True), notes)


def reading_lines(job: ExistingJob) -> list[str]:
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
    if reading.not_rendered is not None:
        lines.append(f"note: {source.path}: it can be checked and not rendered: {reading.not_rendered}")
    return lines
