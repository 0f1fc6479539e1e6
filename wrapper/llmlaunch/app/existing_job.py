"""A job that somebody already has, as its script or its arguments say it: read into a recipe and planned as it is."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmlaunch.app.evidence import Notify, ignore
from llmlaunch.app.planned_run import PlannedRun, plan
from llmlaunch.command_lines.command import Reading, TrainerCommand
from llmlaunch.command_lines.reading import read_command, recipe_of
from llmlaunch.documents.yaml_strict import read_text
from llmlaunch.errors import UserError
from llmlaunch.rundir.values import counted

__all__ = ["ExistingJob", "job_of_arguments", "job_of_script", "reading_lines"]

MEGATRON_TRAINER = "pretrain_gpt.py"


@dataclass(frozen=True)
class ExistingJob:
    """A job as it was read, and its plan: the layout is the job's own."""

    command: TrainerCommand
    reading: Reading
    run: PlannedRun


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
    return _planned(command, cluster, overrides, notify)


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
    return _planned(_training(path, variables or {}, number), cluster, overrides, notify)


def _training(path: Path, variables: Mapping[str, str], number: int | None) -> TrainerCommand:
    """Return the training that a script starts."""
    from llmlaunch.command_lines.launch import trainer_commands
    from llmlaunch.command_lines.shell import read_script

    named = {name: value for name, value in variables.items() if not name.isdigit()}
    places = [int(name) for name in variables if name.isdigit()]
    arguments = [variables.get(str(place), "") for place in range(1, max(places, default=0) + 1)]
    script = read_script(read_text(path), path.name, path.parent, arguments, named)
    commands = trainer_commands(script)
    if not commands:
        raise UserError(f"{path}: starts no training that is known: torchrun, deepspeed, accelerate or python with one")
    if number is not None and number > len(commands):
        raise UserError(f"{path}: --command {number}: it starts {counted(len(commands), 'training')}")
    return commands[-1 if number is None else number - 1]


def _planned(command: TrainerCommand, cluster: str | None, overrides: Sequence[str], notify: Notify) -> ExistingJob:
    reading = read_command(command)
    recipe = recipe_of(reading, command.place, command.folder, cluster, overrides)
    return ExistingJob(command, reading, plan(recipe, notify=notify, replan=True))


def reading_lines(job: ExistingJob) -> list[str]:
    """Return what a person should know of how the job was read, a line each. What rendering it would change is for
    those who make a recipe of it (`llmlaunch init --from`)."""
    reading, place = job.reading, job.command.place
    lines = [f"note: {place}: {note}" for note in reading.notes if not note.startswith("rendering ")]
    lines += [f"warning: {place}: {shlex.join(words.words)}: {words.reason}" for words in reading.unread]
    if reading.not_rendered is not None:
        lines.append(f"note: {place}: it can be checked and not rendered: {reading.not_rendered}")
    return lines
