"""A recorded answer is taken for the same question to the same versions alone. A framework that answers otherwise is
noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import recorded
from support.recorded import Recorded

QUESTION, VERSIONS = "how many?", {"torch": "2.13.0"}


@pytest.fixture(autouse=True)
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One question with its answer."""
    monkeypatch.setattr(recorded, "ANSWERS", tmp_path)
    monkeypatch.setattr(recorded, "RECORDING", True)
    with recorded.recorded("numbers", VERSIONS) as answers:
        answers.answer(QUESTION, lambda: {"all": [7, "seven seas", "seven seas"]}, "seven")
    monkeypatch.setattr(recorded, "RECORDING", False)
    monkeypatch.setattr(recorded, "SOAK", False)


def never() -> None:
    raise AssertionError("the framework was asked")


def test_the_answer_is_the_recorded_one() -> None:
    assert Recorded("numbers", VERSIONS, ()).answer(QUESTION, never, "seven") == {"all": [7, *["seven seas"] * 2]}


@pytest.mark.parametrize(
    ("versions", "question", "message"),
    [
        ({"torch": "2.14.0"}, QUESTION, "is of {'torch': '2.13.0'}, installed are {'torch': '2.14.0'}"),
        (VERSIONS, "how many now?", "has no answer to seven"),
    ],
)
def test_another_version_and_another_question_name_the_command(
    versions: dict[str, str], question: str, message: str
) -> None:
    with pytest.raises(pytest.fail.Exception, match="make answers") as failure:
        Recorded("numbers", versions, ()).answer(question, never, "seven")
    assert message in str(failure.value)


def test_a_live_question_is_asked_and_must_have_the_same_answer() -> None:
    answers = Recorded("numbers", VERSIONS, ("seven",))
    with pytest.raises(AssertionError, match="seven: the framework answers otherwise"):
        answers.answer(QUESTION, lambda: {"all": [8]}, "seven")


def test_all_questions_are_asked_where_all_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "SOAK", True)
    assert Recorded("numbers", VERSIONS, ()).asks(QUESTION, "seven")
