"""The four verdicts have one home: names, order, colours and exit codes."""

from __future__ import annotations

import pytest

from llmlaunch.errors import NothingSafe, NoVerdict, SchedulerRefused, UserError
from llmlaunch.verdicts import COLOURS, EXIT_CODES, VERDICTS, as_verdict, first_exit_code, worst_verdict


def test_every_verdict_has_a_colour_and_an_exit_code() -> None:
    assert VERDICTS == ("safe", "tight", "unsafe", "unknown")
    assert set(COLOURS) == set(EXIT_CODES) == set(VERDICTS)
    assert EXIT_CODES == {"safe": 0, "tight": 3, "unsafe": 3, "unknown": 5}


def test_the_kinds_of_refusal_have_exit_codes_of_their_own() -> None:
    assert [kind.exit_code for kind in (UserError, NothingSafe, SchedulerRefused, NoVerdict)] == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("codes", "first"),
    [((), 0), ((0, 0), 0), ((3, 0), 3), ((3, 5), 5), ((5, 2), 2), ((3, 5, 2), 2), ((1,), 1)],
)
def test_a_mistake_comes_before_no_verdict_and_that_before_nothing_safe(codes: tuple[int, ...], first: int) -> None:
    assert first_exit_code(codes) == first


def test_the_worst_of_several_counts() -> None:
    assert worst_verdict(["safe", "tight", "safe"]) == "tight"
    assert worst_verdict(["unsafe", "tight"]) == "unsafe"


def test_only_a_verdict_is_read_as_one() -> None:
    assert [as_verdict(value) for value in (*VERDICTS, "maybe", None, 3)] == [*VERDICTS, None, None, None]
