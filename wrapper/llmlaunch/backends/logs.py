"""What the trainers' logs say of their progress, one line at a time."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Progress", "parse_progress"]


@dataclass(frozen=True)
class Progress:
    """One logged step. None = the line does not say."""

    step: int
    steps: int
    loss: float | None = None
    seconds_per_step: float | None = None
    tokens_per_second: float | None = None
    tflops_per_gpu: float | None = None


_OURS = re.compile(
    r"\bstep (?P<step>\d+)/(?P<steps>\d+) \| loss (?P<loss>\S+)"
    r" \| (?P<seconds>[\d.]+) s/step \| (?P<tokens>\d+) tokens/s"
)
_MEGATRON = re.compile(r"\biteration +(?P<step>\d+)/ *(?P<steps>\d+) \|(?P<rest>.*)")


def parse_progress(line: str) -> Progress | None:
    """The progress a log line reports, or None: the shipped DeepSpeed script's, or Megatron-LM's training line
    (megatron/training/training.py, core 0.19; which of its fields appear depends on the flags)."""
    ours = _OURS.search(line)
    if ours is not None:
        return Progress(
            step=int(ours["step"]),
            steps=int(ours["steps"]),
            loss=_number(ours["loss"]),
            seconds_per_step=_number(ours["seconds"]),
            tokens_per_second=_number(ours["tokens"]),
        )
    megatron = _MEGATRON.search(line)
    if megatron is None:
        return None
    fields = _fields(megatron["rest"])
    milliseconds = fields.get("elapsed time per iteration (ms)")
    return Progress(
        step=int(megatron["step"]),
        steps=int(megatron["steps"]),
        loss=fields.get("lm loss"),
        seconds_per_step=None if milliseconds is None else milliseconds / 1000.0,
        tflops_per_gpu=fields.get("throughput per GPU (TFLOP/s/GPU)"),
    )


def _fields(text: str) -> dict[str, float]:
    """`name: number` between bars; what is no number is left out."""
    found = {}
    for part in text.split("|"):
        name, _, value = part.rpartition(":")
        number = _number(value)
        if name and number is not None:
            found[name.strip()] = number
    return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
