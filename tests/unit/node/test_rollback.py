"""After a loss that went bad: which checkpoint the next attempt begins with, and which batches it leaves out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_begin import Run

from llmlaunch.node.rollback import BadLoss, _skip, bad_loss_of, skip_argument, skipped_steps
from llmlaunch.rundir.attempt import Attempt
from llmlaunch.rundir.attempt_files import Cause
from llmlaunch.rundir.schema import sound
from support.soak import examples

ROLLBACK = {"action": "rollback", "spike": False, "skip_batches": 20, "times": 2}


@pytest.fixture
def run(tmp_path: Any) -> Run:
    return Run(tmp_path)


def goes_bad(run: Run, since: int, good: int, attempt: str = "7.0", from_step: int = 0, kind: str = "spike") -> None:
    numbers = {"since_step": since, "good_step": good}
    cause = {"kind": "bad_loss", "numbers": numbers, "source": "watchdog", "consequence": False}
    after = {"action": "rollback", "why": "the loss was bad"}
    tracker_step = int(run.tracker.read_text().rpartition("-")[2])
    run.failed(attempt, from_step=from_step, cause=cause, next=after, tracker_step=tracker_step)
    progress = {"bad_loss": {"kind": kind, "recovered_step": None}}
    (run.folder / "attempts" / attempt / "progress.json").write_text(json.dumps(progress))


def names(run: Run) -> list[str]:
    return sorted(path.name for path in run.tracker.parent.iterdir() if path.is_dir())


def skipped(run: Run, attempt: str) -> list[int]:
    begun = Attempt(run.folder, attempt)
    return skipped_steps(skip_argument(begun.skips, begun.from_step))


def describe(run: Run, **changes: Any) -> None:
    run.describe(restart=None, on_bad_loss={**ROLLBACK, **changes}, progress={"steps": 1000})


def test_after_a_spike_it_goes_back_a_hundred_steps_and_leaves_out_the_batches_around_the_bad_one(run: Run) -> None:
    describe(run)
    for step in (300, 400, 500):
        run.save(step)
    goes_bad(run, since=451, good=450)
    assert run.first_step("7.1", ".") == 300  # 400 is only 50 steps before
    assert run.tracker.read_text() == "step-300"
    assert names(run) == ["step-300", "step-400.bad-loss", "step-500.bad-loss"]
    assert skipped(run, "7.1") == list(range(441, 461))
    record = run.record("7.1")
    assert record["rollback"]["to_step"] == 300
    assert record["skips"] == [[441, 460]]
    assert "the loss was bad from step 451 on; going back to the checkpoint of step 300" in record["note"]


def test_after_nan_the_newest_before_the_bad_step_serves(run: Run) -> None:
    describe(run)
    for step in (300, 400, 500):
        run.save(step)
    goes_bad(run, since=451, good=450, kind="not_finite")
    assert run.first_step("7.1", ".") == 400
    assert names(run) == ["step-300", "step-400", "step-500.bad-loss"]
    assert skipped(run, "7.1") == list(range(441, 461))


def test_nan_near_the_step_of_an_earlier_rollback_goes_back_further(run: Run) -> None:
    describe(run)
    for step in (300, 400):
        run.save(step)
    goes_bad(run, since=451, good=450, kind="not_finite")
    assert run.first_step("7.1", ".") == 400
    status = '{"attempt": "7.1", "state": "failed", "exit_code": 1, "cause": %s}'
    cause = '{"kind": "bad_loss", "source": "watchdog", "numbers": {"since_step": 471, "good_step": 470}}'
    (run.folder / "attempts" / "7.1" / "status.json").write_text(status % cause)
    assert run.first_step("7.2", ".") == 300


def test_the_newest_before_a_spike_serves_where_none_is_older(run: Run) -> None:
    describe(run)
    run.save(440)
    run.save(460)
    goes_bad(run, since=451, good=450)
    assert run.first_step("7.1", ".") == 440
    assert skipped(run, "7.1") == list(range(441, 461))


def test_a_loss_that_is_bad_on_a_second_gpu_too_is_rolled_back(run: Run) -> None:
    """Megatron-LM saved step 450 to compute step 451 on another GPU; the attempt from there judged it."""
    describe(run)
    for step in (300, 450):
        run.save(step)
    run.failed("7.1", from_step=450, cause={"kind": "unexpected_result"}, next={"action": "rollback"}, tracker_step=450)
    assert run.first_step("7.2", ".") == 450
    assert names(run) == ["step-300", "step-450"]
    assert skipped(run, "7.2") == list(range(451, 471))


def test_between_two_logged_steps_all_that_may_be_bad_is_left_out(run: Run) -> None:
    describe(run, skip_batches=10)
    run.save(300)
    goes_bad(run, since=500, good=400)  # log_interval: 100
    run.begin("7.1", ".")
    assert skipped(run, "7.1") == list(range(396, 501))


def test_a_checkpoint_that_is_torn_is_passed_by(run: Run) -> None:
    describe(run)
    run.save(200)
    run.save(300)
    (run.tracker.parent / "step-300" / "mp_rank_00_model_states.pt").write_bytes(b"PK\x03\x04 torn")
    run.save(500)
    goes_bad(run, since=451, good=450)
    assert run.first_step("7.1", ".") == 200


def test_stop_goes_on_from_before_when_a_person_resumes_it_and_leaves_nothing_out(run: Run) -> None:
    describe(run, action="stop")
    run.save(300)
    run.save(500)
    goes_bad(run, since=451, good=450)
    assert run.first_step("8.0") == 300
    assert names(run) == ["step-300", "step-500.bad-loss"]
    assert skipped(run, "8.0") == []


def test_tell_changes_no_checkpoint(run: Run) -> None:
    describe(run, action="tell")
    run.save(300)
    run.save(500)
    goes_bad(run, since=451, good=450)
    assert run.first_step("8.0") == 500
    assert names(run) == ["step-300", "step-500"]


def test_the_checkpoints_of_a_script_of_ones_own_are_left_alone(run: Run) -> None:
    describe(run, action="stop")
    run.describe(
        restart=None,
        on_bad_loss={**ROLLBACK, "action": "stop"},
        checkpoint={"path": str(run.tracker.parent), "tracker": "latest", "promised": False, "interval": 100},
    )
    run.save(300)
    run.save(500)
    goes_bad(run, since=451, good=450)
    assert run.first_step("8.0") == 500
    assert names(run) == ["step-300", "step-500"]


def test_what_was_left_out_once_is_left_out_again_after_any_other_end(run: Run) -> None:
    describe(run)
    run.save(300)
    goes_bad(run, since=451, good=450)
    run.begin("7.1", ".")
    (run.folder / "attempts" / "7.1" / "status.json").write_text(
        '{"attempt": "7.1", "state": "failed", "exit_code": 1, "cause": {"kind": "nccl"}}'
    )
    run.begin("8.0")
    assert skipped(run, "8.0") == list(range(441, 461))
    run.save(450)
    run.begin("9.0")
    assert skipped(run, "9.0") == list(range(451, 461))


def test_a_second_rollback_leaves_out_both(run: Run) -> None:
    describe(run)
    run.save(300)
    goes_bad(run, since=451, good=450)
    run.begin("7.1", ".")
    status = '{"attempt": "7.1", "state": "failed", "exit_code": 1, "cause": %s}'
    cause = '{"kind": "bad_loss", "source": "watchdog", "numbers": {"since_step": 471, "good_step": 470}}'
    (run.folder / "attempts" / "7.1" / "status.json").write_text(status % cause)
    run.begin("7.2", ".")
    assert run.record("7.2")["skips"] == [[441, 460], [461, 480]]
    assert skipped(run, "7.2") == list(range(441, 481))


def test_checkpoints_set_aside_twice_keep_both(run: Run) -> None:
    describe(run)
    for attempt in ("7.0", "7.1"):
        run.save(300)
        run.save(500)
        if attempt == "7.0":
            goes_bad(run, since=451, good=450)
            run.begin("7.1", ".")
    cause = '{"kind": "bad_loss", "source": "watchdog", "numbers": {"since_step": 481, "good_step": 480}}'
    (run.folder / "attempts" / "7.1" / "status.json").write_text(
        f'{{"attempt": "7.1", "state": "failed", "exit_code": 1, "cause": {cause}}}'
    )
    run.begin("7.2", ".")
    assert names(run) == ["step-300", "step-500.bad-loss", "step-500.bad-loss.2"]


@pytest.mark.parametrize("numbers", [None, [], {"since_step": "x", "good_step": -1e400}, {"since_step": True}])
def test_a_record_that_is_torn_goes_back_nowhere_it_should_not(run: Run, numbers: Any) -> None:
    bad = bad_loss_of(sound(Cause, {"kind": "bad_loss", "numbers": numbers, "source": "watchdog"}), {}, 300)
    assert bad == BadLoss(since_step=300, good_step=299, at_once=True)
    assert (
        bad_loss_of(sound(Cause, "bad_loss"), {}, 0)
        is bad_loss_of({"kind": "oom"}, {}, 0)
        is bad_loss_of(None, {}, 0)
        is None
    )


def test_trainers_that_end_by_themselves_name_the_step_and_the_log_the_last_good_one() -> None:
    cause = {"kind": "bad_loss", "numbers": {"since_step": 451}, "source": "log"}
    assert bad_loss_of(cause, {"good_step": 450}, 300) == BadLoss(451, 450, at_once=False)
    assert bad_loss_of(cause, {}, 450) == BadLoss(451, 449, at_once=True)
    # with a line every hundred steps none was logged yet
    assert bad_loss_of(cause, {}, 440) == BadLoss(451, 440, at_once=False)


@examples(40, 2000)
@given(st.integers(1, 300), st.integers(0, 400), st.integers(0, 200), st.integers(1, 200), st.integers(700, 1000))
def test_what_is_left_out_has_the_bad_step_and_never_the_last_nor_what_was_trained(
    count: int, step: int, between: int, stride: int, steps: int
) -> None:
    bad = BadLoss(since_step=step + between + stride, good_step=step + between, at_once=False)
    skip = _skip({"skip_batches": count}, bad, step, steps)
    if bad.since_step >= steps:
        assert skip is None or skip[1] < steps
        return
    assert skip is not None
    first, last = skip
    assert step < first <= bad.good_step + 1 <= bad.since_step <= last < steps


@pytest.mark.parametrize(("kind", "step"), [("spike", 300), ("not_finite", 340)])
def test_a_checkpoint_that_does_not_stay_serves_after_nan_alone(run: Run, kind: str, step: int) -> None:
    """It is as young as the damage of a spike may be."""
    describe(run)
    place, tracker = run.tracker.parent, "latest_checkpointed_iteration.txt"
    checkpoint = {"path": str(place), "tracker": tracker, "non_persistent": "non_persistent"}
    run.describe(restart=None, on_bad_loss=ROLLBACK, progress={"steps": 1000}, checkpoint=checkpoint)
    for name in ("iter_0000300", "non_persistent/iter_0000340", "non_persistent/iter_0000460"):
        (place / name).mkdir(parents=True)
        (place / name / "common.pt").write_bytes(b"x")
    (place / tracker).write_text("300")
    (place / "non_persistent" / tracker).write_text("460")
    run.tracker.write_text("460")  # what goes_bad reads
    goes_bad(run, since=451, good=450, kind=kind)
    assert run.first_step("7.1", ".") == step
    left = {path.name for path in (place / "non_persistent").glob("iter_*")}
    assert left == ({"iter_0000000", "iter_00000000"} if step == 300 else {"iter_0000340", "iter_0000000"})
    named = place / "non_persistent" / tracker
    assert (named.read_text() if named.exists() else "") == ("" if step == 300 else "340")
