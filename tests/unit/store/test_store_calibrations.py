"""Calibrations are kept, taken into use and left again; what was in use stays on record."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llmlaunch.calibration.calibrations import Calibration, Errors, calibration_id, calibration_of_json
from llmlaunch.calibration.ratios import DEATH, Bound, Score
from llmlaunch.errors import UserError
from llmlaunch.store.calibrations import all_calibrations, find_calibration, in_use, put, use
from llmlaunch.store.database import Store
from support.calibrated import calibration, score
from support.json_schemas import validate

SCHEMA = Path(__file__).resolve().parents[3] / "docs" / "schemas" / "calibration.schema.json"
ERRORS = Errors(0.04, -0.01, 0.125, 0.5, (Bound(0.1, 9, 12, 1.08, 9, 1.09), Bound(0.01, 99, 12, None, 9, None)))


def make_calibration(made_at: float, backend: str = "megatron", accelerator: str = "NVIDIA H100 80GB") -> Calibration:
    scores = (score(1.03, version="0.19", share=0.7), Score(DEATH, "device", "llama", None, None))
    named = calibration_id(backend, accelerator, made_at)
    entry = calibration(scores, backend=backend, accelerator=accelerator, estimator="e" * 64)
    correction = replace(entry.correction, calibration_id=named)
    return replace(
        entry, id=named, made_at=made_at, correction=correction, before=replace(ERRORS, mape=0.1), after=ERRORS
    )


def test_a_calibration_is_the_same_after_json_and_fits_its_schema() -> None:
    entry = make_calibration(1.8e9)
    content = json.loads(json.dumps(entry.as_json(), allow_nan=False))
    validate(content, json.loads(SCHEMA.read_text()))
    assert calibration_of_json(content) == entry
    assert entry.id == "megatron-NVIDIA-H100-80GB-20270115T080000Z"
    with pytest.raises(ValueError, match="schema 2"):
        calibration_of_json({**content, "schema": 2})


def test_all_are_kept_and_one_of_each_backend_and_accelerator_is_in_use(store: Store) -> None:
    first, second, other = make_calibration(1.8e9), make_calibration(1.9e9), make_calibration(1.8e9, "deepspeed")
    with store.write() as connection:
        for entry in (first, second, other):
            put(connection, entry)
        assert in_use(connection, "megatron", first.accelerator) is None
        use(connection, "megatron", first.accelerator, first.id, 1.8e9)
        use(connection, "deepspeed", other.accelerator, other.id, 1.8e9)
        use(connection, "megatron", first.accelerator, second.id, 1.9e9)
    with store.read() as connection:
        assert in_use(connection, "megatron", first.accelerator) == second
        assert in_use(connection, "deepspeed", other.accelerator) == other
        assert in_use(connection, "megatron", "H200") is None
        assert all_calibrations(connection, "megatron") == [first, second]
        assert find_calibration(connection, other.id) == other


def test_what_is_not_there_or_of_another_accelerator_is_refused(store: Store) -> None:
    entry = make_calibration(1.8e9)
    with store.write() as connection:
        put(connection, entry)
        with pytest.raises(UserError, match="no such calibration"):
            use(connection, entry.backend, entry.accelerator, "nonsense", 1.0)
        with pytest.raises(UserError, match="not megatron on H200"):
            use(connection, "megatron", "H200", entry.id, 1.0)
