"""Which reader reads a command."""

from __future__ import annotations

from llmlaunch.command_lines.command import Reading, TrainerCommand
from llmlaunch.command_lines.other_trainers import refuse_other_trainer, takes_megatron_arguments

__all__ = ["read_command"]


def read_command(command: TrainerCommand) -> Reading:
    """Return the recipe of a command, read by the reader of its kind.

    Raises:
        NoVerdict: the trainer is one that is not read.
        UserError: the command is no training that a recipe describes.
    """
    refuse_other_trainer(command.trainer, command.arguments, command.place)
    if takes_megatron_arguments(command.arguments):
        from llmlaunch.frameworks.megatron.command_line import read_megatron

        return read_megatron(command)
    from llmlaunch.frameworks.deepspeed.command_line import read_deepspeed

    return read_deepspeed(command)
