"""A trace that skipped some of a training step fails, and says what was skipped."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tracer_modules import tracer_module

honesty, failures = tracer_module("honesty"), tracer_module("failures")

HONEST = honesty.Evidence(
    microbatches=(4, 6),
    forwards=(10, 10),
    backwards=(10, 10),
    steps=2,
    skipped=0,
    parameter_count=1000,
    optimizer_state_count=3000,
    stateless=0,
    peak_phase="backward",
    peak_by_phase={"setup": 1, "forward": 8, "backward": 9, "optimizer step": 5},
)


def test_all_of_a_step_ran() -> None:
    honesty.insist(HONEST)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"parameter_count": 0}, "the rank has no parameters"),
        ({"forwards": (10, 9)}, "9 of 10 forward passes ran through model chunk 1"),
        ({"backwards": (0, 10)}, "0 of 10 backward passes ran through model chunk 0"),
        ({"skipped": 1}, "the optimizer skipped 1 of 2 steps, as after an overflow"),
        ({"steps": 1}, "the optimizer stepped 1 times in 2 iterations"),
        ({"optimizer_state_count": 0}, "the optimizer keeps no states"),
        ({"stateless": 3}, "the optimizer keeps no state of 3 of the tensors that it steps"),
        ({"peak_phase": "nowhere"}, "the phase of the peak, 'nowhere', never happened"),
        ({"peak_by_phase": {"backward": 9, "forward": 8}}, "nothing was allocated in the phase 'optimizer step'"),
    ],
)
def test_what_did_not_run_is_said(change: dict[str, object], said: str) -> None:
    with pytest.raises(failures.Dishonest) as caught:
        honesty.insist(replace(HONEST, **change))
    assert said in str(caught.value)
    assert failures.failure_of(caught.value)["kind"] == "dishonest"


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(failures.Dishonest, match=r"skipped 2 of 2 steps.*no states"):
        honesty.insist(replace(HONEST, skipped=2, optimizer_state_count=0))


def test_a_parser_that_exits_refuses_in_the_words_it_wrote() -> None:
    failure = failures.failure_of(SystemExit(2), "usage: ...\nerror: unrecognized arguments: --of-nobody\n")
    assert (failure["kind"], failure["what"]) == ("refused", "error: unrecognized arguments: --of-nobody")


def test_what_is_not_modelled_is_told_from_what_is_wrong() -> None:
    kinds = [failures.failure_of(error)["kind"] for error in (failures.Unsupported("no"), KeyError("a"))]
    assert kinds == ["unsupported", "error"]
