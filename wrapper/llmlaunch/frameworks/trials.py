"""The small layouts that try a cluster out: what a framework says of each of its six."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

FITS, TIGHT, DIES = "fits", "tight", "dies"
NUMBER_OF_TRIALS = 6


@dataclass(frozen=True)
class Trial:
    """One of the six. `sizes` are the largest sizes of its split; where the devices or the model allow less, less is
    taken. `fill` is the share of the device's memory, beyond what an idle process takes, that it is to be predicted to
    need where `expectation` is FITS."""

    expectation: str
    zero_stage: int
    fill: float = 0.0
    micro_batch_size: int = 1
    recompute: str = "none"
    sequence_factor: int = 1
    sizes: Mapping[str, int] = field(default_factory=dict)
