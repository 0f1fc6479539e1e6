"""Public measurement records as inputs of the estimator, those of trainers that nobody can launch included."""

from __future__ import annotations

from collections.abc import Mapping

from llmlaunch.calibration.cases import Case
from llmlaunch.calibration.pool import reason_unless_priced
from llmlaunch.calibration.records import Record
from llmlaunch.calibration.stated import cases
from llmlaunch.cluster.profile import Cluster
from validation.trainers import PUBLIC_TRAINERS


def case_of(record: Record, clusters: Mapping[str, Cluster] = cases.NO_MACHINES) -> Case:
    """Return the estimator's inputs for a public record. Raises Unsupported with the reason if it cannot be priced."""
    return cases.case_of(record, clusters, PUBLIC_TRAINERS)


def case_or_reason(record: Record, clusters: Mapping[str, Cluster]) -> Case | str:
    """Return the estimator's inputs for a public record, or why it cannot be priced."""
    return reason_unless_priced(lambda: case_of(record, clusters))
