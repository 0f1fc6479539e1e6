"""Calibrations made by hand for tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from llmlaunch.calibration.calibrations import MEMORY, Calibration, Errors, TrainingData, estimator_digest
from llmlaunch.calibration.ratios import Score
from llmlaunch.memory.job import Correction

NO_ERRORS = Errors(0.0, 0.0, 0.0, 0.0, ())


def score(
    ratio: float, family: str = "dense gated", version: str | None = None, kind: str = "device", share: float = 0.3
) -> Score:
    return Score(ratio, kind, family, version, share)


def calibration(
    scores: Sequence[Score] = (),
    torch_share: float = 0.03,
    outside_bytes: float = 0.5 * 2**30,
    backend: str = "megatron",
    accelerator: str = "NVIDIA H100 80GB HBM3",
    number: int = 1,
    estimator: str | None = None,
) -> Calibration[Correction]:
    name = f"{backend}-card-20261121T00000{number}Z"
    return Calibration(
        quantity=MEMORY,
        id=name,
        backend=backend,
        accelerator=accelerator,
        made_at=1.0 * number,
        llmlaunch="0.1.0",
        estimator=estimator_digest() if estimator is None else estimator,
        data=TrainingData(
            runs=len(scores),
            records=len(scores),
            died=0,
            digest="1" * 64,
            families=dict(Counter(s.family for s in scores)),
            versions=dict(Counter(s.version or "unknown" for s in scores)),
        ),
        correction=Correction(torch_share, outside_bytes, name),
        before=NO_ERRORS,
        after=NO_ERRORS,
        scores=tuple(scores),
    )
