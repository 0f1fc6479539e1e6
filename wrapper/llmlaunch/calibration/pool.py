"""Measured runs gathered by configuration, and as columns beside their predictions, ready to learn from.

A run is a configuration that ran, whatever the number of its ranks and repeats: it counts once. Its peak of a kind is
that of the stage with the highest one, because that is where a card runs out. `worst` is the highest of all repeats,
for margins; `typical` the median of the repeats, for errors and for learning.
"""

from __future__ import annotations

import json
import marshal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

from llmlaunch.calibration.cases import (
    NO_RECORD,
    NO_SIZES,
    SIZES,
    Case,
    Prediction,
    Unsupported,
    case_of,
    model_text,
    predict,
)
from llmlaunch.calibration.records import (
    CONFIGURATION,
    Record,
    accelerator_of,
    card_bytes,
    exclusion_reason,
    problem,
    ran_out,
    retried_allocations,
    table_of,
)
from llmlaunch.cluster.profile import Cluster
from llmlaunch.columns import FloatColumn, IntColumn
from llmlaunch.errors import UserError
from llmlaunch.models.shape import kind_of


def case_or_reason(record: Record, clusters: Mapping[str, Cluster]) -> Case | str:
    """Return the estimator's inputs for a record, or why it cannot be priced. `clusters` are the machines of known
    accelerators (`cluster.cards.machines`). The store takes over any JSON object with an id, so a record may only look
    like a measurement."""
    return reason_unless_priced(lambda: _case(record, clusters))


def reason_unless_priced(case: Callable[[], Case]) -> Case | str:
    """Return the case, or why the record cannot be priced."""
    try:
        priced = case()
        return priced if min(getattr(priced.layout, name) for name in SIZES) >= 1 else NO_SIZES
    except (Unsupported, UserError) as refusal:
        return str(refusal)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
        return NO_RECORD


def _case(record: Record, clusters: Mapping[str, Cluster]) -> Case:
    if "parallelism" not in record or "recipe" in record:
        return case_of(record, clusters)
    from llmlaunch.calibration.stated import cases  # of runs that were measured elsewhere, which few stores have

    return cases.case_of(record, clusters)


DEVICE, RESERVED, ALLOCATED, OUTSIDE = QUANTITIES = ("device", "reserved", "allocated", "outside")
OBSERVED = {RESERVED: "reserved_peak_bytes", ALLOCATED: "allocated_peak_bytes", OUTSIDE: "outside_torch_bytes"}
# What a prediction depends on. Two records that agree in it are priced once.
PRICED_BY = (*CONFIGURATION, "num_microbatches", "backend_version")
DIGESTED = ("id", "peak_kind", "peak_bytes", "pipeline_rank", "run_state", "observed")
# Of one backend and card the newest configurations count: that many settle two numbers, drivers and frameworks change,
# and what is beyond them costs neither time nor memory.
MOST = 10_000
NOT_OF_A_DEVICE = ("host", "host_oom", "fits")


@dataclass
class Configuration:
    """One configuration that ran, filled record by record. `record` is the first of them.

    `peaks` are bytes by attempt, of the worst rank, by quantity and pipeline rank (None: that of the worst). `retried`
    are attempts whose allocator returned its cache to go on: a larger card would have seen a higher peak. `needs` are
    lower bounds of what runs that died needed, as (quantity, pipeline rank, bytes). `lines` has one line for each
    record: equal lines are equal data."""

    record: Record
    lines: list[str] = field(default_factory=list)
    peaks: dict[tuple[str, int | None], dict[str, int]] = field(default_factory=dict)
    retried: set[str] = field(default_factory=set)
    needs: list[tuple[str, int | None, int]] = field(default_factory=list)

    def add(self, record: Record) -> None:
        self.lines.append("\t".join(str(record.get(name)) for name in DIGESTED))
        stage = record.get("pipeline_rank")
        stage = stage if type(stage) is int else None
        attempt = f"{record['run_id']}/{record.get('attempt')}" if record.get("run_id") else str(record["id"])
        if ran_out(record):
            self.needs.append(_need(record, stage))
            numbers = record.get("numbers")
            outside = numbers.get("non_torch_bytes") if isinstance(numbers, Mapping) else None
            self.add_peak((OUTSIDE, stage), attempt, outside)
            return
        if retried_allocations(record):
            self.retried.add(attempt)
        kind, observed = str(record["peak_kind"]), record.get("observed")
        self.add_peak((kind, stage), attempt, record.get("peak_bytes"))
        if kind == DEVICE and isinstance(observed, Mapping):
            for quantity, name in OBSERVED.items():
                self.add_peak((quantity, stage), attempt, observed.get(name))

    def add_peak(self, place: tuple[str, int | None], attempt: str, peak: object) -> None:
        if type(peak) is int and peak >= 0:
            by_attempt = self.peaks.setdefault(place, {})
            by_attempt[attempt] = max(peak, by_attempt.get(attempt, 0))

    def merge(self, other: Configuration) -> None:
        self.lines += other.lines
        self.retried |= other.retried
        self.needs += other.needs
        for place, by_attempt in other.peaks.items():
            for attempt, peak in by_attempt.items():
                self.add_peak(place, attempt, peak)


def _need(record: Record, stage: int | None) -> tuple[str, int | None, int]:
    """Return what the allocator's message says was allocated plus requested, else the card, which was full."""
    numbers = record.get("numbers")
    message = numbers if isinstance(numbers, Mapping) else {}
    allocated, requested = message.get("allocated_bytes"), message.get("asked_bytes")
    if type(allocated) is int and type(requested) is int:
        return RESERVED, stage, allocated + requested
    card = message.get("total_bytes") or record.get("gpu_memory_bytes")
    return DEVICE, stage, card if type(card) is int else 0


def gather(records: Iterable[Record]) -> tuple[list[Configuration], Counter[str]]:
    """Read each record once, the newest first; return the configurations that count, and how many records are left out
    for which reason."""
    by_key: dict[bytes, Configuration] = {}
    sizes: Counter[tuple[str | None, str]] = Counter()
    left_out: Counter[str] = Counter()
    for record in records:
        reason = _reason_left_out(record)
        if reason is not None:
            left_out[reason] += 1
            continue
        key = _key(record)
        if key not in by_key:
            pool = (table_of(record), record["gpu"])
            sizes[pool] += 1
            if sizes[pool] > MOST:
                left_out[f"older than the newest {MOST} configurations"] += 1
                continue
            by_key[key] = Configuration(record)
        by_key[key].add(record)
    return _merged(by_key.values()), left_out


def _reason_left_out(record: Record) -> str | None:
    """The store takes over any JSON object with an id: numbers of some may be texts."""
    try:
        return _not_a_device_peak(record) or exclusion_reason(record)
    except (AttributeError, TypeError, ValueError):
        return NO_RECORD


def _not_a_device_peak(record: Record) -> str | None:
    kind = record.get("peak_kind")
    if problem(record) is not None or table_of(record) is None or not isinstance(record.get("gpu"), str):
        return "no measurement of a backend we price"
    if kind in NOT_OF_A_DEVICE:
        return f"{kind}: says no need of a device"
    if kind == "resident" or record["gpu"] == "cpu":
        return "resident memory rests on what an idle trainer holds on its machine, which each plan measures anew"
    return None if kind in (DEVICE, RESERVED, ALLOCATED, "oom") else f"peak kind {kind} is not priced"


def _key(record: Record) -> bytes:
    """A fast key. It differs where only the order of keys does; `_merged` joins those."""
    return marshal.dumps([record.get(name) for name in PRICED_BY], 2)


def _merged(configurations: Iterable[Configuration]) -> list[Configuration]:
    by_text: dict[str, Configuration] = {}
    for configuration in configurations:
        text = json.dumps([configuration.record.get(name) for name in PRICED_BY], sort_keys=True)
        first = by_text.setdefault(text, configuration)
        if first is not configuration:
            first.merge(configuration)
    return list(by_text.values())


@dataclass(frozen=True)
class PooledRun:
    """One configuration that was priced. `model` is equal for runs of one model, however they are split."""

    model: str
    family: str
    version: str | None
    lines: tuple[str, ...]  # of its records, in any order
    card_bytes: int | None
    died: bool


@dataclass(frozen=True)
class Peaks:
    """Peaks of one quantity, a row for every run and stage that has one, run by run. `runs` are indices into
    `Pool.runs`, `stages` pipeline ranks; the next three are the predictions for the row's stage."""

    runs: IntColumn
    stages: IntColumn
    allocated: FloatColumn
    reserved: FloatColumn
    outside: FloatColumn
    worst: FloatColumn
    typical: FloatColumn  # NaN if the card was full in every attempt
    needed: NDArray[np.bool_]  # of a run that died: it needed at least `worst`


@dataclass(frozen=True)
class Pool:
    """All runs of one backend on one accelerator. `starts` are the indices of each run's first pipeline rank in
    `reserved` and `outside`, the predictions of all ranks."""

    backend: str
    accelerator: str
    runs: tuple[PooledRun, ...]
    starts: IntColumn
    reserved: FloatColumn
    outside: FloatColumn
    peaks: Mapping[str, Peaks]

    def __len__(self) -> int:
        return len(self.runs)


Member = tuple[Configuration, Prediction]


def pools(configurations: Sequence[Configuration], clusters: Mapping[str, Cluster]) -> tuple[list[Pool], Counter[str]]:
    """Return a pool for every backend and accelerator, and how many configurations are not priced for which reason."""
    members: dict[tuple[str, str], list[Member]] = {}
    unpriced: Counter[str] = Counter()
    predictions = predict([case_or_reason(configuration.record, clusters) for configuration in configurations])
    for configuration, prediction in zip(configurations, predictions, strict=True):
        if isinstance(prediction, str):
            unpriced[prediction] += 1
        else:
            key = (str(table_of(configuration.record)), accelerator_of(configuration.record))
            members.setdefault(key, []).append((configuration, prediction))
    return [_pool(*key, members[key], clusters) for key in sorted(members)], unpriced


def _pool(backend: str, accelerator: str, members: Sequence[Member], clusters: Mapping[str, Cluster]) -> Pool:
    sizes = [len(prediction.reserved) for _, prediction in members]
    return Pool(
        backend=backend,
        accelerator=accelerator,
        runs=tuple(_pooled_run(*member, clusters) for member in members),
        starts=np.cumsum([0, *sizes[:-1]]),
        reserved=np.concatenate([prediction.reserved for _, prediction in members]),
        outside=np.concatenate([prediction.outside for _, prediction in members]),
        peaks={quantity: _peaks(quantity, members) for quantity in QUANTITIES},
    )


def _pooled_run(configuration: Configuration, prediction: Prediction, clusters: Mapping[str, Cluster]) -> PooledRun:
    version = configuration.record.get("backend_version")
    return PooledRun(
        model=model_text(prediction.shape),
        family=kind_of(prediction.shape),
        version=version if isinstance(version, str) else None,
        lines=tuple(configuration.lines),
        card_bytes=card_bytes(configuration.record, clusters),
        died=bool(configuration.needs),
    )


def _peaks(quantity: str, members: Sequence[Member]) -> Peaks:
    rows = [row for run, member in enumerate(members) for row in _rows(run, *member, quantity)]
    columns = np.array(rows, dtype=np.float64).reshape(-1, 8).T
    runs, stages, allocated, reserved, outside, worst, typical, needed = columns
    indices = runs.astype(np.int64), stages.astype(np.int64)
    return Peaks(*indices, allocated, reserved, outside, worst, typical, needed.astype(np.bool_))


def _rows(run: int, configuration: Configuration, prediction: Prediction, quantity: str) -> Iterator[tuple[float, ...]]:
    for (measured, stage), by_attempt in configuration.peaks.items():
        if measured == quantity:
            steady = [peak for attempt, peak in by_attempt.items() if attempt not in configuration.retried]
            typical = median(steady) if steady else float("nan")
            yield (run, *_predicted(prediction, quantity, stage), max(by_attempt.values()), typical, False)
    for measured, stage, needed in configuration.needs:
        if measured == quantity:
            yield (run, *_predicted(prediction, quantity, stage), needed, needed, True)


def _predicted(prediction: Prediction, quantity: str, stage: int | None) -> tuple[float, float, float, float]:
    """Return the row's stage and its predictions. Without a stage it is the one with most of the quantity."""
    if stage is None or not 0 <= stage < len(prediction.reserved):
        of_kind = {ALLOCATED: prediction.allocated, RESERVED: prediction.reserved}
        stage = int(np.argmax(of_kind.get(quantity, prediction.reserved + prediction.outside)))
    allocated, reserved, outside = prediction.allocated[stage], prediction.reserved[stage], prediction.outside[stage]
    return stage, float(allocated), float(reserved), float(outside)
