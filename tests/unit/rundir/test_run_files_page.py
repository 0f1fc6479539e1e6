"""The kinds of file of a run directory are few, and the pages about them are made from their schemas."""

from __future__ import annotations

from typing import Any, TypedDict

import pytest

from llmlaunch.rundir import file_names
from llmlaunch.rundir.file_kinds import FILE_KINDS
from llmlaunch.rundir.schema import Bytes, Count, Host, annotations_of, exact, sound
from support.run_files_page import DOCS, directory_page, meanings, run_files_page, with_schema

MOST_KINDS = 38


def test_a_run_directory_has_few_kinds_of_file() -> None:
    assert len(FILE_KINDS) <= MOST_KINDS


def test_the_pages_say_what_the_schemas_say() -> None:
    page, directory = (DOCS / name for name in ("run-files.md", "run-directory.md"))
    assert page.read_text("utf-8") == run_files_page(), "docs/run-files.md is behind the schemas; run: make docs-tables"
    text = directory.read_text("utf-8")
    assert text == directory_page(text), "docs/run-directory.md is behind the kinds of file; run: make docs-tables"


def test_every_name_of_a_file_is_of_a_kind() -> None:
    names = {name: value for name, value in vars(file_names).items() if name.isupper() and isinstance(value, str)}
    written = {value for name, value in names.items() if not name.startswith("EARLIER_")}
    parts = {part for kind in FILE_KINDS for path in kind.path.split(", ") for part in path.split("/")}
    assert written - parts == {file_names.BATCH_LOG_NODE, file_names.SWEEP}  # no file, and one of a sweep's directory


def test_every_key_has_a_meaning() -> None:
    for kind in with_schema():
        assert meanings(kind.schema).keys() == annotations_of(kind.schema).keys(), kind.path


class Device(TypedDict):
    """A device."""

    index: Count


class Reading(TypedDict, total=False):
    """What a file says."""

    node: Host | None
    peak_bytes: Bytes | None
    samples: Count
    why: str
    lost: bool
    value: float | str | None
    devices: list[Device]
    by_pid: dict[str, Bytes]
    record: dict[str, Any]


def test_a_value_of_another_type_counts_as_null_or_empty() -> None:
    wrong = {
        "node": "a b", "peak_bytes": True, "samples": -1, "why": 3, "lost": 1, "value": [], "devices": {}, "by_pid": 0,
    }  # fmt: skip
    assert sound(Reading, wrong) == {
        "node": None, "peak_bytes": None, "why": "", "lost": False, "value": None, "devices": [], "by_pid": {},
    }  # fmt: skip
    assert sound(Reading, []) is None


def test_unknown_keys_and_unsound_items_are_left_out() -> None:
    given = {"devices": [{"index": 1, "colour": "red"}, {"index": None}, {}, 7], "by_pid": {"1": 5, "2": "x"}, "new": 1}
    assert sound(Reading, given) == {"devices": [{"index": 1}], "by_pid": {"1": 5}}
    assert sound(Reading, {"value": "nan", "node": "n1"}) == {"value": "nan", "node": "n1"}
    assert sound(Reading, {"record": {"id": None}}) == {"record": {"id": None}}


def test_what_must_be_exact_is_refused_for_any_value_of_another_type() -> None:
    assert exact(Reading, {"samples": 3, "new": 1}) == {"samples": 3}
    for wrong in ({"samples": True}, {"by_pid": {"1": None}}, {"why": None}, []):
        with pytest.raises(TypeError):
            exact(Reading, wrong)
