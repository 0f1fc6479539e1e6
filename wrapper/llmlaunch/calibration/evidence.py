"""What records say of each configuration that ran: its peaks by quantity, stage and attempt, and what runs that died
would have needed. Ranks and repeats of one configuration come together here, so that each counts once."""

from __future__ import annotations

import json
import marshal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmlaunch.calibration.read import problem
from llmlaunch.calibration.selection import CONFIGURATION, left_out, ran_out, table_of, took_back_its_cache

__all__ = ["ALLOCATED", "DEVICE", "OUTSIDE", "RESERVED", "Configuration", "Evidence", "gather"]

Record = Mapping[str, Any]

DEVICE, RESERVED, ALLOCATED, OUTSIDE = "device", "reserved", "allocated", "outside"
OBSERVED = {RESERVED: "reserved_peak_bytes", ALLOCATED: "allocated_peak_bytes", OUTSIDE: "outside_torch_bytes"}
# What a prediction depends on. Two records that agree in it are priced once.
PRICED_BY = (*CONFIGURATION, "num_microbatches", "backend_version")
SAID = ("id", "peak_kind", "peak_bytes", "pipeline_rank", "run_state", "observed")
# Of one backend and card the newest configurations count: that many settle two numbers, drivers and frameworks change,
# and what is beyond them costs neither time nor memory.
MOST = 10_000
NOT_OF_A_DEVICE = ("host", "host_oom", "fits")


@dataclass
class Configuration:
    """One configuration that ran, filled record by record. `record` is the first of them.

    `peaks` are bytes by attempt, of the worst rank, by quantity and pipeline rank (None: that of the worst).
    `full` are attempts whose allocator gave its cache back: a larger card would have seen a higher peak. `needs` are
    lower bounds of what runs that died needed, as (quantity, pipeline rank, bytes). `said` is a line for each record:
    equal lines are equal data."""

    record: Record
    said: list[str] = field(default_factory=list)
    peaks: dict[tuple[str, int | None], dict[str, int]] = field(default_factory=dict)
    full: set[str] = field(default_factory=set)
    needs: list[tuple[str, int | None, int]] = field(default_factory=list)

    @property
    def died(self) -> bool:
        return bool(self.needs)


@dataclass
class Evidence:
    """All configurations, and how many records are left out for which reason."""

    configurations: list[Configuration]
    left_out: Counter[str]


def gather(records: Iterable[Record]) -> Evidence:
    """Reads each record once, the newest first, and keeps one of each configuration."""
    found: dict[bytes, Configuration] = {}
    held: Counter[tuple[str | None, str]] = Counter()
    why: Counter[str] = Counter()
    for record in records:
        reason = _why_not(record)
        if reason is not None:
            why[reason] += 1
            continue
        key = _key(record)
        one = found.get(key)
        if one is None:
            pool = (table_of(record), record["gpu"])
            held[pool] += 1
            if held[pool] > MOST:
                why[f"older than the newest {MOST} configurations"] += 1
                continue
            one = found[key] = Configuration(record)
        _take(one, record)
    return Evidence(list(_merged(found.values())), why)


def _why_not(record: Record) -> str | None:
    """The store takes over any JSON object with an id: numbers of some may be words."""
    try:
        return _not_a_peak(record) or left_out(record)
    except (AttributeError, TypeError, ValueError):
        return "no whole measurement record"


def _not_a_peak(record: Record) -> str | None:
    kind = record.get("peak_kind")
    if problem(record) is not None or table_of(record) is None or not isinstance(record.get("gpu"), str):
        return "no measurement of a backend we price"
    if kind in NOT_OF_A_DEVICE:
        return f"{kind}: says no need of a device"
    if kind == "resident" or record["gpu"] == "cpu":
        return "resident memory rests on what an idle trainer holds on its machine, which each plan measures anew"
    return None if kind in (DEVICE, RESERVED, ALLOCATED, "oom") else f"peak kind {kind} is not priced"


def _key(record: Record) -> bytes:
    """Fast, and different where only the order of keys is; `_merged` sees to those."""
    return marshal.dumps([record.get(name) for name in PRICED_BY], 2)


def _merged(found: Iterable[Configuration]) -> Iterator[Configuration]:
    by_text: dict[str, Configuration] = {}
    for one in found:
        text = json.dumps([one.record.get(name) for name in PRICED_BY], sort_keys=True)
        kept = by_text.setdefault(text, one)
        if kept is not one:
            _join(kept, one)
    return iter(by_text.values())


def _join(kept: Configuration, other: Configuration) -> None:
    kept.said += other.said
    kept.full |= other.full
    kept.needs += other.needs
    for place, by_attempt in other.peaks.items():
        for attempt, peak in by_attempt.items():
            _note(kept, place, attempt, peak)


def _take(one: Configuration, record: Record) -> None:
    one.said.append("\t".join(str(record.get(name)) for name in SAID))
    stage = record.get("pipeline_rank")
    stage = stage if type(stage) is int else None
    attempt = f"{record['run_id']}/{record.get('attempt')}" if record.get("run_id") else str(record["id"])
    if ran_out(record):
        one.needs.append(_need(record, stage))
        said = record.get("numbers")
        _note(one, (OUTSIDE, stage), attempt, said.get("non_torch_bytes") if isinstance(said, Mapping) else None)
        return
    if took_back_its_cache(record):
        one.full.add(attempt)
    kind, seen = str(record["peak_kind"]), record.get("observed")
    _note(one, (kind, stage), attempt, record.get("peak_bytes"))
    if kind == DEVICE and isinstance(seen, Mapping):
        for quantity, name in OBSERVED.items():
            _note(one, (quantity, stage), attempt, seen.get(name))


def _note(one: Configuration, place: tuple[str, int | None], attempt: str, peak: object) -> None:
    if type(peak) is int and peak >= 0:
        by_attempt = one.peaks.setdefault(place, {})
        by_attempt[attempt] = max(peak, by_attempt.get(attempt, 0))


def _need(record: Record, stage: int | None) -> tuple[str, int | None, int]:
    """What the allocator's message says was allocated and asked for beside it; else the card, which was full."""
    numbers = record.get("numbers")
    said = numbers if isinstance(numbers, Mapping) else {}
    held, asked = said.get("allocated_bytes"), said.get("asked_bytes")
    if type(held) is int and type(asked) is int:
        return RESERVED, stage, held + asked
    card = said.get("total_bytes") or record.get("gpu_memory_bytes")
    return DEVICE, stage, card if type(card) is int else 0
