"""Public records scored against predictions, those of trainers that nobody can launch included."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from llmlaunch.accuracy import scoring
from llmlaunch.accuracy.scoring import ScoredRecord
from llmlaunch.calibration.records import Record
from llmlaunch.cluster.profile import Cluster
from validation.cases import case_or_reason


def scores_of(records: Iterable[Record], clusters: Mapping[str, Cluster]) -> list[ScoredRecord]:
    """Return the score of every record, in order."""
    return [score(record, clusters) for record in records]


def score(record: Record, clusters: Mapping[str, Cluster]) -> ScoredRecord:
    """Price one public record. `clusters` are the machines of known accelerators (`cluster.cards.machines`)."""
    return scoring.score(record, case_or_reason(record, clusters), clusters)
