"""Values of nested mappings by their dotted keys."""

from __future__ import annotations

from typing import Any

from llmlaunch.documents.nested import leaves, put_at, value_at, with_values

VALUES = {"b": {"y": 1, "x": {"z": 2}}, "a": [3], "c": {}}


def test_each_value_has_its_dotted_key() -> None:
    assert dict(leaves(VALUES)) == {"b.y": 1, "b.x.z": 2, "a": [3], "c": {}}
    assert all(value_at(VALUES, key) == value for key, value in leaves(VALUES))
    assert [value_at(VALUES, key) for key in ("b.none", "a.z", "none.none")] == [None, None, None]


def test_values_are_written_with_the_mappings_around_them() -> None:
    written: dict[str, Any] = {}
    for key, value in leaves(VALUES):
        put_at(written, key, value)
    assert written == VALUES


def test_other_values_go_over_and_beside() -> None:
    assert with_values(VALUES, {"b": {"y": 4, "w": 5}, "a": {"n": 6}}) == {
        "b": {"y": 4, "x": {"z": 2}, "w": 5},
        "a": {"n": 6},
        "c": {},
    }
    assert VALUES["b"] == {"y": 1, "x": {"z": 2}}
