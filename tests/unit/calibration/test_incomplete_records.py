"""A null in a measured record is filled in and said, or the record is refused with a reason: never a crash."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.accuracy.scoring import score

DATA = Path(__file__).parents[2] / "data" / "measurements"
TOLD = ("id", "family", "peak_kind", "backend", "source", "repeats")


def one_of_each_backend() -> list[dict[str, Any]]:
    """A record of every backend and kind of peak, with and without experts."""
    records: dict[object, dict[str, Any]] = {}
    for file in ("fit.jsonl", "outcomes.jsonl"):
        for line in (DATA / file).read_text("utf-8").splitlines():
            record = json.loads(line)
            key = (record["backend"], record["peak_kind"], bool(record["model"]["moe"]), bool(record["model"]["mla"]))
            records.setdefault(key, record)
    return list(records.values())


RECORDS = one_of_each_backend()


def without_one(record: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The record with each field set to null in turn."""
    for name, value in record.items():
        if name in TOLD:
            continue
        if not isinstance(value, dict):
            yield name, {**record, name: None}
            continue
        for part, inner in value.items():
            yield f"{name}.{part}", {**record, name: {**value, part: None}}
            if isinstance(inner, dict):
                for size in inner:
                    yield f"{name}.{part}.{size}", {**record, name: {**value, part: {**inner, size: None}}}


@pytest.mark.parametrize("record", RECORDS, ids=[f"{r['backend']}-{r['id']}" for r in RECORDS])
def test_any_field_may_be_unknown(record: dict[str, Any]) -> None:
    for field, incomplete in without_one(record):
        result = score(incomplete, {}).as_json()
        if result["supported"]:
            assert result["predicted_bytes"] > 0, field
        else:
            assert result["reason"], field


@pytest.mark.parametrize("record", RECORDS, ids=[f"{r['backend']}-{r['id']}" for r in RECORDS])
def test_an_absent_field_of_a_section_is_as_unknown_as_null(record: dict[str, Any]) -> None:
    for field, null in without_one(record):
        section, _, name = field.partition(".")
        if name and "." not in name:
            absent = {**record, section: {key: value for key, value in record[section].items() if key != name}}
            assert score(absent, {}).as_json() == score(null, {}).as_json(), field


@pytest.mark.parametrize("field", ["num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"])
def test_a_size_that_follows_from_nothing_is_asked_for_by_name(field: str) -> None:
    record = RECORDS[0]
    result = score({**record, "model": {**record["model"], field: None}}, {}).as_json()
    assert result["reason"] == f"model.{field} is not recorded"


def test_what_is_worked_out_is_said() -> None:
    record = next(r for r in RECORDS if r["backend"] == "megatron-lm")
    unknown = {**record, "parallelism": {**record["parallelism"], "data": None, "context": None}}
    result = score(unknown, {}).as_json()
    assert result["assumed"]["parallelism.context"] == 1
    assert result["assumed"]["parallelism.data"] == record["parallelism"]["data"] * record["parallelism"]["context"]
