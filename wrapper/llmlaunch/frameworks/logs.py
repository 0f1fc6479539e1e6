"""The lines in which each trainer reports its steps, as regular expressions (parser: rundir/step_lines.py)."""

from __future__ import annotations

from llmlaunch.frameworks.base import ProgressLines
from llmlaunch.rundir.trainer_lines import (
    BY_HAND,
    DEEPSPEED_ENGINE,
    DEEPSPEED_PIPELINE,
    EXPORTING,
    MEGATRON,
    OURS,
    SLOW,
    TRAINER,
)

__all__ = [
    "DEEPSPEED_ENGINE",
    "DEEPSPEED_PIPELINE",
    "any_script_lines",
    "deepspeed_lines",
    "known_trainers_lines",
    "megatron_lines",
]


def megatron_lines() -> ProgressLines:
    """Printed every --log-interval steps by the last rank; of a save, by the first."""
    return ProgressLines((MEGATRON,), SLOW, promised=True)


def deepspeed_lines(exports: bool = False) -> ProgressLines:
    """Those of the script llmlaunch ships."""
    return ProgressLines((OURS,), (*SLOW, EXPORTING) if exports else SLOW, promised=True)


def any_script_lines(steps: int) -> ProgressLines:
    """Those a script of the person's own may print. `steps` is the recipe's: of progress bars, the one that long is
    the training's."""
    bar = rf"\b(?P<step>\d+)/(?P<steps>{steps}) \[\d+:\d+(?::\d+)?<"
    return ProgressLines((OURS, MEGATRON, DEEPSPEED_PIPELINE, DEEPSPEED_ENGINE, bar, TRAINER, BY_HAND), SLOW)


def known_trainers_lines() -> ProgressLines:
    """Return those of the shipped DeepSpeed script and of Megatron-LM: for a run directory that names no patterns."""
    return ProgressLines((OURS, MEGATRON), SLOW)
