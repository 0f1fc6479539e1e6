"""Numbers of foreign text are read, or are unreadable; nothing is raised."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmlaunch.rundir.foreign_values import (
    MOST_WHOLE,
    byte_size_in,
    number_in,
    whole_number_in,
)
from llmlaunch.rundir.values import host_names


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("007", 7), (b"42", 42), (str(MOST_WHOLE), MOST_WHOLE)],
)
def test_whole_numbers_are_read(text: str | bytes, value: int) -> None:
    assert whole_number_in(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *("", "1²", "٣", "-1", "+1", "1.0", " 1", "1_000", "0x10", str(MOST_WHOLE + 1), "9" * 5000, None, b"\xb2"),
    ],
)
def test_any_other_text_is_no_whole_number(text: str | bytes | None) -> None:
    assert whole_number_in(text) is None


@pytest.mark.parametrize(("text", "value"), [("1.5", 1.5), (".5", 0.5), ("2.", 2.0), ("-1e-3", -0.001), (b"7", 7.0)])
def test_finite_numbers_are_read(text: str | bytes, value: float) -> None:
    assert number_in(text) == value


@pytest.mark.parametrize("text", ["", "nan", "-Infinity", "1e999", "9" * 400, "1.2.3", "1_0", "½", None])
def test_any_other_text_is_no_finite_number(text: str | None) -> None:
    assert number_in(text) is None


def test_sizes_that_64_bits_hold_are_read() -> None:
    assert byte_size_in("1.50", 2**30) == 3 * 2**29
    assert byte_size_in("9" * 400, 1) is None
    assert byte_size_in("1e300", 2**30) is None
    assert byte_size_in("-1", 1) is None


@given(st.text(alphabet="[]{}()'\"\\,:+-*1e9j ban\n²", max_size=60))
def test_no_text_raises(text: str) -> None:
    whole_number_in(text)
    number_in(text)


@pytest.mark.parametrize("expression", ["n[1-999999999]", "n[1-90000][1-90000]", "n[" + "9" * 5000 + "]", "n[²]"])
def test_a_host_list_without_end_stays_as_it_is(expression: str) -> None:
    assert host_names(expression) == [expression]


def test_a_host_list_is_expanded() -> None:
    assert host_names("n[1-2,07],m[1-2]x[3]") == ["n1", "n2", "n07", "m1x3", "m2x3"]
