"""The corrections of measurement records that are scored: by one calibration, or by those in use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from llmlaunch.app.stored_evidence import stored_calibration
from llmlaunch.calibration.calibrations import Calibration
from llmlaunch.calibration.records import accelerator_of, table_of
from llmlaunch.cluster.profile import Cluster
from llmlaunch.errors import UserError
from llmlaunch.memory.job import NO_CORRECTION, Correction
from llmlaunch.recipe.types import IN_USE, NO_CALIBRATION
from llmlaunch.rundir.values import counted


class Corrections:
    """The correction of each record: that of the calibration in use for its backend and accelerator where `choice` is
    IN_USE, of the calibration with the id `choice` where it is of both, or none. Counts the records of each."""

    def __init__(self, choice: str, clusters: Mapping[str, Cluster]) -> None:
        self._choice, self._clusters = choice, clusters
        self._calibrations: dict[tuple[str, str], Calibration[Correction] | None] = {}
        self._counts: Counter[str] = Counter()

    def of(self, record: Mapping[str, Any]) -> Correction:
        backend = table_of(record)
        if self._choice == NO_CALIBRATION or backend is None or not isinstance(record.get("gpu"), str):
            return NO_CORRECTION
        key = (backend, accelerator_of(record))
        if key not in self._calibrations:
            self._calibrations[key] = self._calibration_of(*key)
        calibration = self._calibrations[key]
        if calibration is None:
            return NO_CORRECTION
        self._counts[calibration.id] += 1
        return calibration.correction

    def _calibration_of(self, backend: str, accelerator: str) -> Calibration[Correction] | None:
        if self._choice == IN_USE:
            return stored_calibration(backend, accelerator)
        named = stored_calibration(backend, accelerator, self._choice)
        if named is None:
            raise UserError(f"--calibration {self._choice}: the store holds none; `llmlaunch calibrate list` shows all")
        return named if (named.backend, named.accelerator) == (backend, accelerator) else None

    def as_json(self) -> dict[str, Any]:
        """Return how many records each calibration corrected; empty where none was asked for: that JSON is frozen."""
        return {} if self._choice == NO_CALIBRATION else {"calibrations": dict(self._counts)}

    def lines(self) -> list[str]:
        """Return what `as_json` says, a sentence a calibration, for a person."""
        if self._choice == NO_CALIBRATION:
            return []
        if not self._counts:
            return [f"--calibration {self._choice}: no record is of a backend and accelerator that has one"]
        return [f"Corrected by calibration {name}: {counted(count, 'record')}" for name, count in self._counts.items()]
