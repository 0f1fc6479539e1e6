"""Public records scored against predictions, those of trainers that nobody can launch included."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from llmlaunch.accuracy import scoring
from llmlaunch.accuracy.scoring import ScoredRecord
from llmlaunch.calibration.cases import Case
from llmlaunch.calibration.records import Record
from llmlaunch.cluster.profile import Cluster, Link
from llmlaunch.memory.job import Job
from validation.trainers import PUBLIC_TRAINERS

__all__ = ["score", "scores_of", "timed_job"]

# Bytes a second that each device has of its node's adapters, by family. Jean Zay's A100 nodes have four Omni-Path
# adapters of 100 Gb/s for eight devices (BigScience's chronicles), ATorch's machines 800 Gb/s a node (its README).
FABRICS = {"bigscience-steps": 6.25e9, "atorch-steps": 12.5e9}


def scores_of(records: Iterable[Record], clusters: Mapping[str, Cluster]) -> list[ScoredRecord]:
    """Return the score of every record, in order."""
    return [score(record, clusters) for record in records]


def score(record: Record, clusters: Mapping[str, Cluster]) -> ScoredRecord:
    """Price one public record. `clusters` are the machines of known accelerators (`cluster.cards.machines`)."""
    return scoring.score(record, _on_its_fabric(record, clusters), trainers=PUBLIC_TRAINERS)


def timed_job(record: Record, case: Case, clusters: Mapping[str, Cluster]) -> tuple[Job, Cluster] | None:
    """Return the job and the cluster whose step is timed, or None if the record's card is not known."""
    return scoring.timed_job(record, case, _on_its_fabric(record, clusters))


def _on_its_fabric(record: Record, clusters: Mapping[str, Cluster]) -> Mapping[str, Cluster]:
    fabric = FABRICS.get(record["family"])
    if fabric is None:
        return clusters
    return {
        name: replace(cluster, fabric_link=Link(fabric, cluster.fabric_link.latency_seconds))
        for name, cluster in clusters.items()
    }
