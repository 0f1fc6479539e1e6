"""Which reader reads a command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module

from llmlaunch.command_lines.command import Reading, TrainerCommand
from llmlaunch.command_lines.shell_state import file_text
from llmlaunch.command_lines.trainers import not_read, trainer_of


def read_command(command: TrainerCommand) -> Reading:
    """Return the recipe of a command, read by the reader of its trainer.

    Raises:
        NoVerdict: the trainer is one that is not read.
        UserError: the command is no training that a recipe describes.
    """
    trainer = trainer_of(command.trainer, command.arguments, partial(_source, command))
    if not trainer.reader:
        raise not_read(trainer.name, command.place)
    module, _, function = trainer.reader.partition(":")
    reader: Callable[[TrainerCommand], Reading] = getattr(import_module(module), function)
    return reader(replace(command, family=trainer.name))


def _source(command: TrainerCommand) -> str:
    """Return the text of the trainer's script, empty where it is not here."""
    return command.files.get(command.trainer) or file_text(command.folder / command.trainer) or ""
