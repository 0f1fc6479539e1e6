"""Which reader reads a command."""

from __future__ import annotations

from llmlaunch.command_lines.command import Reading, TrainerCommand
from llmlaunch.command_lines.other_trainers import MEGATRON_DEEPSPEED, not_read, refuse_other_trainer

__all__ = ["read_command"]

# One of these stands in every command line of a trainer of Megatron's kind, none in one of Hugging Face's.
MEGATRON = frozenset(
    {"num-layers", "micro-batch-size", "tensor-model-parallel-size", "use-checkpoint-args", "yaml-cfg"}
)
DEEPSPEED = frozenset({"deepspeed", "deepspeed-config"})


def read_command(command: TrainerCommand, *, of_a_run: bool = False) -> Reading:
    """Return the recipe of a command, read by the reader of its kind. `of_a_run` is whether the command ran and was
    measured: its record then validates the formula, also of a trainer that no recipe is made for.

    Raises:
        NoVerdict: the trainer is one that is not read.
        UserError: the command is no training that a recipe describes.
    """
    refuse_other_trainer(command.trainer, command.arguments, command.place)
    flags = {_flag(word) for word in command.arguments if word.startswith("--")}
    if flags & MEGATRON and not flags & DEEPSPEED:
        from llmlaunch.frameworks.megatron.command_line import read_megatron

        return read_megatron(command)
    if flags & MEGATRON and not of_a_run:
        raise not_read(MEGATRON_DEEPSPEED, command.place)
    from llmlaunch.frameworks.deepspeed.command_line import read_deepspeed

    return read_deepspeed(command)


def _flag(word: str) -> str:
    return word[2:].split("=", 1)[0].replace("_", "-")
