"""What of our Megatron words a CPU cannot do: the short list of changes before they are trained with."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ADDED", "LEFT_OUT", "Change", "words_for_cpu"]


@dataclass(frozen=True)
class Change:
    """A flag added with its values, or left out with as many values as it takes."""

    flag: str
    values: tuple[str, ...]
    why: str


ADDED = (
    Change("--transformer-impl", ("local",), "Transformer Engine computes on CUDA alone"),
    Change("--distributed-backend", ("gloo",), "NCCL connects GPUs"),
    Change("--no-gradient-accumulation-fusion", (), "Apex's CUDA kernel"),
    Change("--no-persist-layer-norm", (), "Apex's CUDA kernel; torch's norms refuse to be asked for it"),
    Change("--no-rope-fusion", (), "Transformer Engine's CUDA kernel"),
    Change("--no-masked-softmax-fusion", (), "Megatron's CUDA kernel"),
)
LEFT_OUT: tuple[Change, ...] = ()


def words_for_cpu(words: tuple[str, ...]) -> tuple[str, ...]:
    """The words of a rendered program after the script's name, as this machine's CPU can train with them."""
    kept = list(words)
    for change in LEFT_OUT:
        while change.flag in kept:
            place = kept.index(change.flag)
            del kept[place : place + 1 + len(change.values)]
    return (*kept, *(word for change in ADDED for word in (change.flag, *change.values)))
