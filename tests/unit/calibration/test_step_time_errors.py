"""How far step times are off is stated by backend and kind of model, from the records that come with the source."""

from __future__ import annotations

import json

import numpy as np

from llmlaunch.calibration.step_time_errors import TABLE, JobKind, StepTimeError, step_time_error
from support.soak import SOAK
from support.step_time_table import FEWEST, errors_of_kinds, step_time_rows, step_time_table

BACKEND = "" if SOAK else "deepspeed"  # whose records are priced


def test_the_table_is_made_from_the_records_with_the_formula_of_today() -> None:
    shipped, rows = TABLE.read_text(encoding="utf-8"), step_time_rows(BACKEND)
    of_backend = [line.rstrip(",") for line in shipped.splitlines() if f'{{"backend": "{BACKEND}' in line]
    assert rows
    assert of_backend == rows, "run `make step-time-table`"
    assert not SOAK or shipped == step_time_table(), "run `make step-time-table`"


def test_about_two_of_three_runs_of_a_kind_are_within_its_spread() -> None:
    for kind, found in errors_of_kinds(BACKEND).items():
        error = step_time_error(kind)
        assert error is not None
        assert error.runs == len(found)
        assert (error.spread is None) == (len(found) < FEWEST)
        if error.spread is None:
            continue
        within = np.mean([abs(difference) <= 1.1 * error.spread for _, difference in found])
        assert 0.5 < within < 0.97, kind.words


def test_kinds_that_nobody_measured_have_no_figure() -> None:
    known = {JobKind(row["backend"], row["training"], row["model"]) for row in json.loads(TABLE.read_text())["kinds"]}
    for kind in known:
        assert isinstance(step_time_error(kind), StepTimeError)
    assert step_time_error(JobKind("deepspeed", "all parameters", "mixture")) is None
    assert step_time_error(JobKind("megatron", "adapters", "dense")) is None
    assert step_time_error(None) is None
