"""Which reader reads a command."""

from __future__ import annotations

from llmlaunch.command_lines.command import Reading, TrainerCommand

__all__ = ["read_command"]

# One of these stands in every command line of a trainer of Megatron's kind, none in one of Hugging Face's.
MEGATRON = frozenset(
    {"num-layers", "micro-batch-size", "tensor-model-parallel-size", "use-checkpoint-args", "yaml-cfg"}
)
DEEPSPEED = frozenset({"deepspeed", "deepspeed-config"})


def read_command(command: TrainerCommand) -> Reading:
    """Return the recipe of a command, read by the reader of its kind.

    Raises:
        UserError: the command is no training that a recipe describes.
    """
    flags = {_flag(word) for word in command.arguments if word.startswith("--")}
    if flags & MEGATRON and not flags & DEEPSPEED:
        from llmlaunch.command_lines.megatron import read_megatron

        return read_megatron(command)
    from llmlaunch.command_lines.deepspeed import read_deepspeed

    return read_deepspeed(command)


def _flag(word: str) -> str:
    return word[2:].split("=", 1)[0].replace("_", "-")
