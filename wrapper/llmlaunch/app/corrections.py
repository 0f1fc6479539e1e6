"""The corrections that `accuracy --calibration` prices records with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from llmlaunch.app.evidence import stored_calibration
from llmlaunch.calibration.calibrations import Calibration
from llmlaunch.calibration.records import accelerator_of, table_of
from llmlaunch.cluster.profile import Cluster
from llmlaunch.errors import UserError
from llmlaunch.memory.correction import NO_CORRECTION, Correction
from llmlaunch.recipe.types import IN_USE, NO_CALIBRATION
from llmlaunch.rundir.values import counted

__all__ = ["Corrections"]


class Corrections:
    """What each record is priced with: by the calibration in use for its backend and accelerator (`asked` is IN_USE),
    by that of the id where it is of both, or by none. Counts how many records each corrected."""

    def __init__(self, choice: str, clusters: Mapping[str, Cluster]) -> None:
        self._asked, self._clusters = choice, clusters
        self._known: dict[tuple[str, str], Calibration | None] = {}
        self._used: Counter[str] = Counter()

    def of(self, record: Mapping[str, Any]) -> Correction:
        backend = table_of(record)
        if self._asked == NO_CALIBRATION or backend is None or not isinstance(record.get("gpu"), str):
            return NO_CORRECTION
        key = (backend, accelerator_of(record, self._clusters))
        if key not in self._known:
            self._known[key] = self._found(*key)
        calibration = self._known[key]
        if calibration is None:
            return NO_CORRECTION
        self._used[calibration.id] += 1
        return calibration.correction

    def _found(self, backend: str, accelerator: str) -> Calibration | None:
        if self._asked == IN_USE:
            return stored_calibration(backend, accelerator)
        named = stored_calibration(backend, accelerator, self._asked)
        if named is None:
            raise UserError(f"--calibration {self._asked}: the store holds none; `llmlaunch calibrate list` shows all")
        return named if (named.backend, named.accelerator) == (backend, accelerator) else None

    def said(self) -> dict[str, Any]:
        """Records corrected by each calibration; absent where none was asked for, whose JSON is frozen."""
        return {} if self._asked == NO_CALIBRATION else {"calibrations": dict(self._used)}

    def lines(self) -> list[str]:
        """The same for a person."""
        if self._asked == NO_CALIBRATION:
            return []
        if not self._used:
            return [f"--calibration {self._asked}: no record is of a backend and accelerator that has one"]
        return [f"Corrected by calibration {name}: {counted(count, 'record')}" for name, count in self._used.items()]
