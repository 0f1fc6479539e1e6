"""The measured runs that decide margins, made from tests/data/measurements.

`make evidence-table` writes them to `wrapper/llmlaunch/calibration/evidence.json`, and
tests/unit/calibration/test_evidence.py keeps that file equal to what the formula of today predicts for the same
records.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmlaunch.accuracy.scoring import ScoredRecord, card_memory_bytes
from llmlaunch.calibration.evidence import DIED, FITTED, LIVED, TABLE, EvidenceRun, JobClass
from llmlaunch.calibration.records import CONFIGURATION, Record, exclusion_reason, ran_out, read_records
from llmlaunch.cluster.cards import machines
from llmlaunch.units import GIB
from validation.scoring import scores_of

MEASUREMENTS = Path(__file__).resolve().parents[1] / "data" / "measurements"
FILES = ("fit.jsonl", "outcomes.jsonl", "released.jsonl", "released_outcomes.jsonl")
SMALLEST_BYTES = 8 * GIB  # measured: below, a run says little of those that fill a card
NEAR_SHARE = 0.5  # of the card: from here on planners choose
KINDS = ("device", "reserved", "allocated")  # of measured peaks, the most telling first


@dataclass(frozen=True)
class Observation:
    """One record of a configuration: the kind of its peak (None: an outcome) and what it says."""

    kind: str | None
    run: EvidenceRun


def evidence_records() -> list[Record]:
    """Return the records that the table is made of."""
    return [record for name in FILES for record in read_records(MEASUREMENTS / name)]


def evidence_table() -> str:
    """Return the file as text: a run a line, the citations by source."""
    scores = scores_of(evidence_records(), machines())
    runs = evidence_runs(scores)
    citations: dict[str, list[str]] = {}
    for scored in scores:
        place = str(scored.record["source"]["citation"]).split(":")[0].split("@")[0]
        if place not in citations.setdefault(scored.record["family"], []):
            citations[scored.record["family"]].append(place)
    sources = {name: citations[name][:4] for name in sorted({run.source for run in runs})}
    lines = ",\n".join(json.dumps(row_of(run)) for run in runs)
    head = json.dumps(sources, indent=1)
    columns = json.dumps(
        ["id", "source", "backend", "mixture", "narrow", "capability", "outcome", "predicted", "shortfall"]
    )
    return f'{{"sources": {head},\n"columns": {columns},\n"runs": [\n{lines}\n]}}\n'


def evidence_runs(scores: Iterable[ScoredRecord]) -> list[EvidenceRun]:
    """Return one run for each configuration that says something of others: by the most telling kind of its measured
    peaks the one that exceeds its prediction most, else its outcome."""
    by_configuration: dict[str, list[Observation]] = {}
    for scored in scores:
        observation = _observation(scored)
        if observation is not None:
            by_configuration.setdefault(configuration_key(scored.record), []).append(observation)
    return [run for observations in by_configuration.values() for run in _most_telling(observations)]


def configuration_key(record: Record) -> str:
    """Return a text that is equal for records that agree in everything that was chosen."""
    return json.dumps({key: record.get(key) for key in CONFIGURATION}, sort_keys=True)


def _most_telling(observations: Sequence[Observation]) -> list[EvidenceRun]:
    for kind in KINDS:
        of_kind = [observation.run for observation in observations if observation.kind == kind]
        if of_kind:
            return [max(of_kind, key=lambda run: run.shortfall_bytes)]
    return [max((observation.run for observation in observations), key=lambda run: run.outcome == DIED)]


def _observation(scored: ScoredRecord) -> Observation | None:
    record, job, rank, worst = scored.record, scored.job, scored.rank, scored.worst
    kind = record["peak_kind"]
    if (
        job is None
        or rank is None
        or worst is None
        or exclusion_reason(record) is not None
        or kind in ("host", "host_oom")
    ):
        return None
    if kind == "fits" or ran_out(record):
        card = card_memory_bytes(record)
        if card is None or worst.device_bytes < NEAR_SHARE * card or (kind == "oom" and worst.device_bytes > card):
            return None
        outcome = FITTED if kind == "fits" else DIED
        return Observation(None, _run(record, job, outcome, worst.device_bytes, card - worst.device_bytes))
    measured = scored.measured_bytes or 0
    if measured < SMALLEST_BYTES:
        return None
    shortfall = {
        "device": measured - rank.device_bytes,
        "reserved": measured - rank.reserved_bytes,
        # What the allocator keeps beyond live tensors was not measured, and is taken to grow with them.
        "allocated": round((measured - rank.allocated_bytes) * rank.reserved_bytes / rank.allocated_bytes),
    }[kind]
    return Observation(kind, _run(record, job, LIVED, rank.device_bytes, shortfall))


def _run(record: dict, job: JobClass, outcome: str, predicted: int, shortfall: int) -> EvidenceRun:
    return EvidenceRun(record["id"], record["family"], job, outcome, predicted, shortfall)


def row_of(run: EvidenceRun) -> list[object]:
    job = run.job
    return [
        *(run.id, run.source, job.backend, job.mixture, job.narrow, job.capability),
        *(run.outcome, run.predicted_bytes, run.shortfall_bytes),
    ]


if __name__ == "__main__":
    TABLE.write_text(evidence_table(), encoding="utf-8")
