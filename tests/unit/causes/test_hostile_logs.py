"""Logs that were made to take for ever: what the expressions are given is counted. No line is given to one longer than
it is read, and twice the text is at most about twice the work. Nothing is asserted of seconds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmlaunch.causes import log_scan
from llmlaunch.causes.log_scan import MESSAGE_LINES, READ_CHARACTERS, scan
from support.soak import examples

UNITS = [
    "[rank3]: ", "\x1b[0;", "out of memory ",
    "[rank7]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate " + "9" * 400 + " GiB\n",
    "\n", "\x1b]\n",
    'Traceback (most recent call last):\n  File "a.py", line 1, in load\nValueError: x\n',
    "During handling of the above exception, another exception occurred:\n",
    "caught collective operation timeout OpType=ALLREDUCE\n", "NCCL error: unhandled system error\nLast error:\n",
    "pin_memory\nCUDA out of memory\n",
]  # fmt: skip
TEXT_CHARACTERS = 2**14


class Counted:
    """An expression that notes what it is given."""

    def __init__(self, expression: re.Pattern[str], given: list[int]) -> None:
        self._expression, self._given = expression, given

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._expression, name)
        if not callable(method):
            return method

        def noting(*arguments: Any) -> Any:
            self._given.append(len(arguments[-1]))
            return method(*arguments)

        return noting


def counted(value: Any, given: list[int]) -> Any:
    """The value of a module with every expression in it counted, in lists and tuples, too."""
    if isinstance(value, re.Pattern):
        return Counted(value, given)
    if isinstance(value, list):
        return [counted(item, given) for item in value]
    if type(value) is tuple:
        return tuple(counted(item, given) for item in value)
    return value


@pytest.fixture
def given_characters(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    given: list[int] = []
    module: ModuleType = log_scan
    for name, value in list(vars(module).items()):
        if isinstance(value, (re.Pattern, list)):
            monkeypatch.setattr(module, name, counted(value, given))
    return given


def work(text: str, given: list[int]) -> int:
    given.clear()
    scan(text)
    return sum(given) + len(given)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("form", ["as it is", "in lines of 4,095 characters"])
def test_a_hostile_log_costs_what_its_length_costs(unit: str, form: str, given_characters: list[int]) -> None:
    text = unit * (TEXT_CHARACTERS // len(unit))
    if form != "as it is":
        line = text.replace("\n", " ")[: READ_CHARACTERS - 1] + "\n"
        text = line * (TEXT_CHARACTERS // len(line))
    once = work(text, given_characters)
    assert max(given_characters, default=0) <= MESSAGE_LINES * READ_CHARACTERS + MESSAGE_LINES  # a broken message
    twice = work(text + text, given_characters)
    assert twice <= 2.5 * once + 1000 * READ_CHARACTERS


@examples(40, 2000)
@given(
    st.lists(
        st.sampled_from([*UNITS, "killed\n", "Error: ", "x" * 300, "\u202e", "\x00", "NVRM: Xid (PCI:0): " + "7" * 99]),
        max_size=12,
    )
)
def test_any_mixture_of_them_is_read(parts: list[str]) -> None:
    for hit in scan("".join(parts)):
        assert len(hit.line) <= 400
        assert hit.line.isprintable()


def test_a_number_of_400_digits_loses_no_cause() -> None:
    (hit,) = scan("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate " + "9" * 400 + " GiB")
    assert (hit.kind, hit.numbers) == ("oom", {})
