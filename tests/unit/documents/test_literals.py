"""Literals that a program printed are read, or are unreadable; nothing is raised."""

from __future__ import annotations

import json
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmlaunch.documents.literals import UNREADABLE, is_deeper_than, literal_in


@pytest.mark.parametrize(
    "value", [None, True, 4, -1.5, "a text", [1, [2, "x"]], (1, 2), {"a": [1], 2: None}, {1, 2}, [], {}, ""]
)
def test_values_that_a_program_prints_are_read(value: object) -> None:
    assert literal_in(repr(value)) == value


@pytest.mark.parametrize(
    "text", ["/data/my corpus", "torch.bfloat16", "swiglu", "[unclosed", "a {[]: 1} b", "f(1)", "---"]
)
def test_text_that_prints_no_value_stays_text(text: str) -> None:
    assert literal_in(text) == text


@pytest.mark.parametrize(
    "text",
    [
        *("{[]: 1}", "{[1]}", "1+1j", "b'abc'", "[1, b'x']", "{'a': 1j}", "1e999", "[1e999]", "9" * 20),
        *("-" + "9" * 5000, "[" * 100 + "]" * 100, "(" * 4000, "[" + "1," * 5000 + "]"),
    ],
)
def test_values_that_nothing_can_hold_are_unreadable(text: str) -> None:
    assert literal_in(text) is UNREADABLE


def test_an_odd_escape_in_a_printed_text_is_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert literal_in(r"'\d'") == r"\d"


def test_depth_is_counted_without_recursion() -> None:
    value: object = 1
    for _ in range(5000):
        value = [value]
    assert is_deeper_than(value)
    assert not is_deeper_than([[1], {"a": [2]}], 3)
    assert is_deeper_than([[1], {"a": [2]}], 2)


@given(st.text(alphabet="[]{}()'\"\\,:+-*1e9j ban\n²", max_size=60))
def test_no_text_raises(text: str) -> None:
    value = literal_in(text)
    assert value is UNREADABLE or json.dumps(repr(value))
