"""Where the time of a run went: the parts add up, and a step counts once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmlaunch.rundir.goodput import AttemptFacts, goodput, goodput_of
from llmlaunch.rundir.run import begun_attempts
from support.soak import examples

START = 1_700_000_000.0
CAUSES = ("crash", "node_fail", "hung", "oom", "preempted", None)


@st.composite
def made_up(draw: st.DrawFn) -> list[AttemptFacts]:
    """Attempts as hostile or torn files may tell of them: times in any order, steps that contradict each other."""

    def moment() -> st.SearchStrategy[float | None]:
        return st.none() | st.floats(START - 1e4, START + 1e6)

    def step() -> st.SearchStrategy[int | None]:
        return st.none() | st.integers(0, 10_000)

    return draw(
        st.lists(
            st.builds(
                AttemptFacts,
                started_at=st.floats(START, START + 1e6),
                from_step=st.integers(0, 10_000),
                state=st.sampled_from(("succeeded", "failed", "stopped", None)),
                cause=st.sampled_from(CAUSES),
                ended_at=moment(),
                first_step=step(),
                first_step_at=moment(),
                to_step=step(),
                last_step_at=moment(),
                step_seconds=st.floats(0, 1e4),
                saved_step=step(),
                skips=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 10_000)), max_size=2).map(tuple),
                nodes=st.integers(1, 64),
            ),
            max_size=6,
        )
    )


@examples(30, 2000)
@given(attempts=made_up())
def test_the_parts_add_up_to_the_allocated_time(attempts: list[AttemptFacts]) -> None:
    whole = goodput(attempts).as_json()
    allocated = sum(max(attempt.end - attempt.started_at, 0.0) for attempt in attempts)
    parts = [whole[f"{name}_seconds"] for name in ("useful", "startup", "other", "end")]
    parts += [stop["seconds"] for stop in whole["stops"]]
    assert whole["allocated_seconds"] == pytest.approx(allocated)
    assert sum(parts) == pytest.approx(allocated, abs=1e-3)
    assert all(part >= 0 for part in parts)
    assert whole["share"] is None or 0 <= whole["share"] <= 1


@examples(30, 2000)
@given(attempts=made_up())
def test_a_step_counts_once(attempts: list[AttemptFacts]) -> None:
    useful = goodput(attempts).as_json()["useful_steps"]
    trained: set[int] = set()
    for attempt in attempts:
        trained |= set(range(attempt.from_step, attempt.from_step + attempt.steps))
    assert 0 <= useful <= len(trained)


def test_a_run_that_crashed_lost_a_node_and_succeeded() -> None:
    crashed = AttemptFacts(
        START, 0, "failed", "crash", START + 1500, 1, START + 110, 120, START + 1400, 10.0, saved_step=100
    )
    lost = AttemptFacts(START + 2000, 100, None, None, None, 110, START + 2200, 150, START + 2600, 10.0)
    done = AttemptFacts(START + 3000, 150, "succeeded", None, START + 3700, 151, START + 3110, 200, START + 3650, 10.0)
    whole = goodput([crashed, lost, done])
    assert whole.as_json() == {
        "share": pytest.approx(2000 / 2800), "allocated_seconds": 1500 + 600 + 700, "useful_seconds": 2000,
        "useful_steps": 200, "startup_seconds": 100 + 100 + 100,
        "stops": [{"cause": "crash", "stops": 1, "repeated_steps": 20, "seconds": 200 + 100},
            {"cause": "unknown", "stops": 1, "repeated_steps": 0, "seconds": 0}],
        "other_seconds": 100 + 0 + 50, "end_seconds": 50, "queue_seconds": 500 + 400,
    }  # fmt: skip


def test_what_lies_between_two_attempts_of_one_allocation_is_paid_for_and_lost_to_the_stop() -> None:
    crashed = AttemptFacts(
        START, 0, "failed", "crash", START + 1500, 1, START + 110, 120, START + 1400, 10.0, saved_step=100, stays=True
    )
    again = AttemptFacts(START + 1520, 100, None, None, None, 101, START + 1630, 150, START + 2120, 10.0)
    whole = goodput([crashed, again])
    assert (whole.allocated_seconds, whole.queue_seconds) == (2120, 0)
    assert whole.stops[0]["seconds"] == 200 + 100 + 20
    from_the_queue = again._replace(started_at=START + 9000, first_step_at=START + 9110, last_step_at=START + 9600)
    assert goodput([crashed, from_the_queue]).queue_seconds == 7500


def test_a_step_whose_batch_was_left_out_is_not_useful() -> None:
    back = AttemptFacts(START, 100, None, None, None, 101, START + 100, 200, START + 700, 10.0, skips=((91, 140),))
    whole = goodput([back])
    assert (whole.as_json()["useful_steps"], whole.useful_seconds, whole.other_seconds) == (60, 600, 10)


def test_what_a_slow_node_costs_is_no_goodput() -> None:
    usual = AttemptFacts(START, 0, "failed", "crash", START + 2000, 1, START + 10, 200, START + 2000, 10.0, 200)
    slow = AttemptFacts(START + 2000, 200, None, None, None, 201, START + 2015, 300, START + 3500, 15.0)
    whole = goodput([usual, slow])
    assert (whole.useful_seconds, whole.other_seconds) == (3000, 500)


def test_an_attempt_that_failed_before_its_first_step_is_lost_to_its_cause() -> None:
    whole = goodput([AttemptFacts(START, 0, "failed", "bad_arguments", START + 60)])
    assert whole.share is None
    assert whole.stops == ({"cause": "bad_arguments", "stops": 1, "repeated_steps": 0, "seconds": 60},)


def test_a_failed_run_keeps_what_it_saved() -> None:
    facts = AttemptFacts(START, 0, "failed", "oom", START + 100, 1, START + 1, 100, START + 100, 1.0, saved_step=60)
    assert goodput([facts]).share == pytest.approx(0.6)
    assert goodput([facts._replace(saved_step=None)]).share == 0


def test_a_run_of_an_earlier_version_has_all_that_its_steps_leave_over_as_start_up() -> None:
    facts = AttemptFacts(START, 0, "succeeded", None, START + 160, None, None, 100, START + 150, 1.0)
    assert (goodput([facts]).startup_seconds, goodput([facts]).other_seconds) == (50, 0)


def test_files_that_are_torn_or_hostile_count_as_nothing(tmp_path: Path) -> None:
    for name, start in {"7.0": START, "7.1": "x", "7.2": START + 9}.items():
        folder = tmp_path / "attempts" / name
        folder.mkdir(parents=True)
        (folder / "attempt.json").write_text(json.dumps({"started_at": start}))
    (tmp_path / "attempts/7.0/progress.json").write_text('{"step": "many", "step_seconds": -1, "at": [1]}')
    (tmp_path / "attempts/7.2/progress.json").write_text("{")
    whole = goodput_of(begun_attempts(tmp_path))
    assert (whole.share, whole.allocated_seconds, whole.queue_seconds) == (None, 0, 9)


def test_an_hour_on_fewer_nodes_weighs_less() -> None:
    """Ten hours on four nodes, half of them useful; then ten on two, all useful."""
    whole = AttemptFacts(
        START, state="failed", ended_at=START + 36_000, to_step=20, first_step_at=START + 900, first_step=1,
        last_step_at=START + 36_000, step_seconds=1800.0, saved_step=10, nodes=4,
    )  # fmt: skip
    fewer = AttemptFacts(
        START + 36_000, from_step=10, state="succeeded", ended_at=START + 72_000, to_step=30, step_seconds=1800.0,
        last_step_at=START + 72_000, nodes=2,
    )  # fmt: skip
    account = goodput([whole, fewer])
    useful = [time.useful_seconds for time in account.attempts]
    assert useful == [pytest.approx(18_000, rel=0.05), pytest.approx(36_000)]
    assert account.share == pytest.approx((4 * useful[0] + 2 * useful[1]) / (4 * 36_000 + 2 * 36_000))
    assert goodput([whole._replace(nodes=2), fewer]).share == pytest.approx(account.useful_seconds / 72_000)
