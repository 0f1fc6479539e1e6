"""The runs of one backend on one accelerator as columns: what was predicted and measured of each, ready to learn from.

A run is a configuration that ran, whatever the number of its ranks and repeats: it counts once. Its peak of a kind is
that of the stage where it is highest, because that is where a card runs out. `worst` is the highest of all repeats, for
margins; `typical` the median of the repeats, for errors and for learning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmlaunch.calibration.evidence import ALLOCATED, DEVICE, OUTSIDE, RESERVED, Configuration
from llmlaunch.calibration.pricing import Priced, priced
from llmlaunch.calibration.selection import accelerator_of, card_bytes, table_of
from llmlaunch.cluster.profile import Cluster
from llmlaunch.columns import FloatColumn, IntColumn
from llmlaunch.models.families import kind_of

__all__ = ["Peaks", "Pool", "Run", "pools"]

QUANTITIES = (DEVICE, RESERVED, ALLOCATED, OUTSIDE)


@dataclass(frozen=True)
class Run:
    """One configuration. `model` is equal for runs of one model, however they are split; `said` is what its records say
    that counts, in any order."""

    model: str
    family: str
    version: str | None
    said: tuple[str, ...]
    card_bytes: int | None
    died: bool


@dataclass(frozen=True)
class Peaks:
    """Peaks of one quantity, a row for every run and stage that has one, run by run. `runs` are places in
    `Pool.runs`, `stages` pipeline ranks; the next three are what is predicted of the row's stage."""

    runs: IntColumn
    stages: IntColumn
    allocated: FloatColumn
    reserved: FloatColumn
    outside: FloatColumn
    worst: FloatColumn
    typical: FloatColumn  # NaN where every attempt's card was full
    needed: NDArray[np.bool_]  # a run that died: it needed at least `worst`


@dataclass(frozen=True)
class Pool:
    """`starts` are the places of each run's first pipeline rank in `reserved` and `outside`, the predictions of all."""

    backend: str
    accelerator: str
    runs: tuple[Run, ...]
    starts: IntColumn
    reserved: FloatColumn
    outside: FloatColumn
    peaks: Mapping[str, Peaks]

    def __len__(self) -> int:
        return len(self.runs)


def pools(
    configurations: Sequence[Configuration], clusters: Mapping[str, Cluster]
) -> tuple[list[Pool], Mapping[tuple[str, str], Counter[str]]]:
    """A pool for every backend and accelerator, and by these the reasons why configurations are not priced."""
    members: dict[tuple[str, str], list[tuple[Configuration, Priced]]] = {}
    unpriced: dict[tuple[str, str], Counter[str]] = {}
    for one, prediction in zip(configurations, priced([c.record for c in configurations]), strict=True):
        key = (str(table_of(one.record)), accelerator_of(one.record, clusters))
        if isinstance(prediction, str):
            unpriced.setdefault(key, Counter())[prediction] += 1
        else:
            members.setdefault(key, []).append((one, prediction))
    return [_pool(*key, found, clusters) for key, found in sorted(members.items())], unpriced


def _pool(
    backend: str, accelerator: str, found: Sequence[tuple[Configuration, Priced]], clusters: Mapping[str, Cluster]
) -> Pool:
    sizes = [len(prediction.reserved) for _, prediction in found]
    return Pool(
        backend=backend,
        accelerator=accelerator,
        runs=tuple(_run(one, prediction, clusters) for one, prediction in found),
        starts=np.cumsum([0, *sizes[:-1]]),
        reserved=np.concatenate([prediction.reserved for _, prediction in found]),
        outside=np.concatenate([prediction.outside for _, prediction in found]),
        peaks={quantity: _peaks(quantity, found) for quantity in QUANTITIES},
    )


def _run(one: Configuration, prediction: Priced, clusters: Mapping[str, Cluster]) -> Run:
    model: Mapping[str, Any] = one.record["model"]
    version = one.record.get("backend_version")
    return Run(
        model=f"{model.get('name')} {model.get('num_layers')}x{model.get('hidden_size')}",
        family=kind_of(prediction.shape),
        version=version if isinstance(version, str) else None,
        said=tuple(one.said),
        card_bytes=card_bytes(one.record, clusters),
        died=one.died,
    )


def _peaks(quantity: str, found: Sequence[tuple[Configuration, Priced]]) -> Peaks:
    rows = [row for place, (one, prediction) in enumerate(found) for row in _rows(place, one, prediction, quantity)]
    columns = np.array(rows, dtype=np.float64).reshape(-1, 8).T
    runs, stages, allocated, reserved, outside, worst, typical, needed = columns
    places = runs.astype(np.int64), stages.astype(np.int64)
    return Peaks(*places, allocated, reserved, outside, worst, typical, needed.astype(np.bool_))


def _rows(place: int, one: Configuration, prediction: Priced, quantity: str) -> Iterator[tuple[float, ...]]:
    for (said, stage), by_attempt in one.peaks.items():
        if said == quantity:
            steady = [peak for attempt, peak in by_attempt.items() if attempt not in one.full]
            typical = median(steady) if steady else float("nan")
            yield (place, *_predicted(prediction, quantity, stage), max(by_attempt.values()), typical, False)
    for said, stage, needed in one.needs:
        if said == quantity:
            yield (place, *_predicted(prediction, quantity, stage), needed, needed, True)


def _predicted(prediction: Priced, quantity: str, stage: int | None) -> tuple[float, float, float, float]:
    """The row's stage, the one with most of the quantity where none is named, and what is predicted of it."""
    if stage is None or not 0 <= stage < len(prediction.reserved):
        of_kind = {ALLOCATED: prediction.allocated, RESERVED: prediction.reserved}
        stage = int(np.argmax(of_kind.get(quantity, prediction.reserved + prediction.outside)))
    allocated, reserved, outside = prediction.allocated[stage], prediction.reserved[stage], prediction.outside[stage]
    return stage, float(allocated), float(reserved), float(outside)
