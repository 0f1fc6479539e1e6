"""What restarts may use: failures within an hour, lost GPU-hours; and the same step twice is the program's fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.node.restart_bounds import Bounds, bounds_of
from llmlaunch.rundir.attempt import Attempt

RUN = {"nodes": 2, "devices_per_node": 4}
HOUR = 3600.0
NOW = 1_795_000_000.0
NAN = {"kind": "crash", "node": "n1", "line": "RuntimeError: iteration 8: found NaN in local forward loss calculation"}
WAITS = {"kind": "hung", "suspects": {"n1": ["flight_recorder"]}}


class History:
    """Attempts of a run, each begun when the one before had ended; the last ends now."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.attempts: list[Attempt] = []
        self.hours: list[float] = []

    def attempt(self, hours: float, from_step: int, last_step: int | None, **status: Any) -> History:
        name = f"7.{len(self.attempts)}"
        folder = self.directory / "attempts" / name
        folder.mkdir(parents=True)
        self.hours.append(hours)
        (folder / "attempt.json").write_text(json.dumps({"attempt": name, "from_step": from_step}))
        (folder / "progress.json").write_text(json.dumps({"step": last_step}))
        (folder / "status.json").write_text(json.dumps({"attempt": name, "state": "failed", **status}))
        self.attempts.append(Attempt(self.directory, name))
        return self

    def bounds(self, saved_step: int = 0) -> Bounds:
        ended = NOW
        for attempt, hours in reversed(list(zip(self.attempts, self.hours, strict=True))):
            attempt.began["started_at"] = ended - hours * HOUR
            attempt.status.setdefault("ended_at", ended)
            ended -= hours * HOUR
        return bounds_of(self.attempts, RUN, saved_step, NOW)


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path)


def test_failures_of_the_last_hour_count_and_orderly_ends_do_not(history: History) -> None:
    history.attempt(2.0, 0, 10)  # ended 2 h ago
    history.attempt(1.75, 0, 10, state="stopped")
    for _ in range(3):
        history.attempt(0.08, 0, 10)
    history.attempt(0.01, 0, 10, next={"action": "fallback"})  # another layout, no restart
    assert history.bounds().failures_of_hour == 3


def test_time_whose_steps_no_checkpoint_held_is_lost_on_every_device(history: History) -> None:
    history.attempt(10.0, 0, 100)  # 50 of 100 steps were saved: 5 h lost
    history.attempt(2.0, 50, None)  # made no step: 2 h lost
    history.attempt(4.0, 50, 90, state="stopped")  # all were saved
    history.attempt(1.0, 90, 100)  # none was: 1 h
    assert history.bounds(saved_step=90).lost_gpu_hours == pytest.approx(8 * (5 + 2 + 0 + 1))


def test_an_attempt_that_was_killed_without_a_verdict_lost_the_time_to_its_last_step(history: History) -> None:
    history.attempt(3.0, 0, 100, state=None)
    history.attempts[0].progress["at"] = NOW - 1 * HOUR
    history.attempts[0].status.clear()
    history.attempts[0].began["started_at"] = NOW - 3 * HOUR
    assert bounds_of(history.attempts, RUN, 0, NOW).lost_gpu_hours == pytest.approx(8 * 2)


@pytest.mark.parametrize(
    ("before", "last", "step"),
    [
        pytest.param(NAN, NAN, 149, id="the same exception"),
        pytest.param(NAN, {**NAN, "node": "n7", "line": NAN["line"].replace("8", "9")}, 149, id="on another node"),
        pytest.param(NAN, {**NAN, "line": "ValueError: no such token"}, None, id="another exception"),
        pytest.param(NAN, {**NAN, "kind": "ecc", "sick": True}, None, id="another kind"),
        pytest.param({"kind": "ecc"}, {"kind": "ecc"}, None, id="the machine's fault"),
        pytest.param({"kind": "crash", "consequence": True}, {"kind": "crash", "consequence": True}, None, id="killed"),
        pytest.param({"kind": "hung"}, {"kind": "hung"}, 149, id="a hang that nobody is blamed for"),
        pytest.param({"kind": "bad_loss"}, {"kind": "bad_loss"}, 149, id="a loss that trainers ended for"),
        pytest.param(WAITS, {**WAITS, "suspects": {"n2": ["no_answer"]}}, 149, id="a hang of two nodes"),
        pytest.param(WAITS, WAITS, None, id="a hang of one node, which is then left out"),
    ],
)
def test_the_same_step_twice(history: History, before: dict[str, Any], last: dict[str, Any], step: int | None) -> None:
    history.attempt(1.0, 0, 149, cause=before).attempt(1.0, 100, 149, cause=last)
    assert history.bounds(100).same_step == step


def test_another_step_or_an_attempt_between_that_ended_in_order_is_not_the_same_twice(history: History) -> None:
    history.attempt(1.0, 0, 149, cause=NAN).attempt(1.0, 100, 150, cause=NAN)
    assert history.bounds(100).same_step is None
    history.attempt(1.0, 100, 149, state="stopped").attempt(1.0, 149, 150, cause=NAN)
    assert history.bounds(149).same_step is None


@pytest.mark.parametrize(
    ("used", "sentence"),
    [
        (Bounds(), ""),
        (Bounds(10, 384.0), ""),
        (Bounds(11, 0.0), "11 failures within an hour (restart.per_hour: 10)"),
        (Bounds(0, 384.6), "384.6 GPU-hours are lost (restart.lost_gpu_hours: 384)"),
    ],
)
def test_bounds_are_told_by_the_key_that_sets_them(used: Bounds, sentence: str) -> None:
    assert used.reached({"per_hour": 10, "lost_gpu_hours": 384.0}) == sentence
    assert Bounds(99, 1e6).reached({"times": 20}) == ""  # a run that was rendered before there were these keys


def test_the_same_step_is_named() -> None:
    assert "died after step 149" in Bounds(same_step=149).reached({})


def test_hours_on_fewer_nodes_are_fewer_gpu_hours(history: History) -> None:
    history.attempt(1.0, 0, None)
    assert history.bounds().lost_gpu_hours == 8.0
    history.attempts[0].began["nodes"] = ["n1"]
    assert history.bounds().lost_gpu_hours == 4.0
    history.attempts[0].began["nodes"] = ["n1", "n2", "spare"]
    assert history.bounds().lost_gpu_hours == 8.0
