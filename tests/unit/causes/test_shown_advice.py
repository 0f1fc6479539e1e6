"""Advice as every screen shows it: of a run that llmlaunch did not submit, nothing that only llmlaunch could do."""

from __future__ import annotations

import pytest

from llmlaunch.causes.cause import advice, advice_to
from llmlaunch.causes.kinds import KINDS


def test_no_resume_and_no_key_of_a_recipe_to_who_started_the_job() -> None:
    for kind in KINDS:
        text = advice_to({"kind": kind}, submitted=False)
        assert not any(word in text for word in ("resume", "on_oom", "on_bad_loss")), kind
        assert text.endswith(".") or not text
        assert advice_to({"kind": kind}, submitted=True) == advice({"kind": kind})


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("preempted", "Nothing is wrong with the job: submit your script again."),
        ("port_taken", "Another program used the port."),
        ("node_fail", "llmlaunch keeps new jobs away from the node. Tell your administrators."),
    ],
)
def test_what_is_left_is_whole_sentences(kind: str, text: str) -> None:
    assert advice_to({"kind": kind}, submitted=False) == text


def test_nothing_is_advised_where_no_cause_is_known() -> None:
    assert advice_to({}, submitted=True) == ""
