"""What is trained per step, independent of how it is split."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PRECISIONS", "Workload"]

PRECISIONS = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class Workload:
    """One training step: `global_batch_size` sequences of `sequence_length` tokens in `precision`."""

    sequence_length: int
    global_batch_size: int
    precision: str = "bf16"

    @property
    def tokens_per_step(self) -> int:
        return self.sequence_length * self.global_batch_size
