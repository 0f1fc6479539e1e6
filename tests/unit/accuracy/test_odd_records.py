"""Measurement records whose fields have any form: each is scored, or one message names the line and the field."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmlaunch.accuracy.scoring import score_all
from llmlaunch.calibration.records import problem, read_records
from llmlaunch.cluster.cards import machines
from llmlaunch.errors import UserError
from llmlaunch.report.accuracy_text import accuracy_json, accuracy_text, records_text
from support.measured_runs import run
from support.soak import examples

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 9),
    st.sampled_from([2**40, 2**62, 10**25, 1e18, 1e300, 0.5, -0.5, "", "x", "²", "9" * 400, "\u202e"]),
    st.sampled_from([[], [1], {}, {"a": 1}, [[1]], ["x"]]),
)


def paths(tree: dict[str, Any], within: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the path of every key of a record."""
    below = [path for name, value in tree.items() if isinstance(value, dict) for path in paths(value, (*within, name))]
    return [*((*within, name) for name in tree), *below]


RECORD = run(0, 0.98)


def changed(path: tuple[str, ...], value: Any, record: dict[str, Any]) -> dict[str, Any]:
    record = copy.deepcopy(record)
    within: Any = record
    for name in path[:-1]:
        within = within.get(name) if isinstance(within, dict) else None
    if isinstance(within, dict):
        within[path[-1]] = value
    return record


@examples(20)
@given(st.data())
def test_it_is_scored_or_one_message_says_why_not(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    records = []
    for _ in range(2):
        record = RECORD
        for path in data.draw(st.lists(st.sampled_from(paths(RECORD)), min_size=1, max_size=3)):
            record = changed(path, data.draw(VALUES), record)
        records.append(record)
    file = tmp_path_factory.getbasetemp() / "records.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    try:
        read = read_records(file)
    except UserError:
        return
    scores = score_all(read, machines())
    answer = accuracy_json(scores)
    assert len(answer["records"]) == 2
    assert accuracy_text(answer)
    assert records_text(answer)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("peak_bytes", "80 GB", "a number"),
        ("peak_bytes", True, "a number"),
        ("peak_bytes", 10**25, "a number"),
        ("gpu_memory_bytes", [1], "a number"),
        ("run_id", ["h100"], "a text"),
        ("attempt", {"a": 1}, "a text"),
        ("flags_known", "no", "true or false"),
        ("repeats", 3, "an object"),
    ],
)
def test_a_field_of_another_form_is_named(field: str, value: Any, words: str) -> None:
    said = problem({**RECORD, field: value})
    assert said is not None
    assert said.startswith(f"{field} must be {words} or null, not ")


@pytest.mark.parametrize("name", ["id", "family", "peak_kind", "backend", "gpu"])
@pytest.mark.parametrize("value", [None, 1, ["x"]])
def test_a_name_that_is_none_is_named(name: str, value: Any) -> None:
    assert problem({**RECORD, name: value}) == f"{name} must be a text"
