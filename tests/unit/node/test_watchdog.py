"""The watchdog of an attempt: what it writes, what it asks of the step, and that it never hurts."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from llmlaunch.node import watchdog as module
from llmlaunch.node.watchdog import Clock, LossJudge
from llmlaunch.rundir.step_lines import Step
from support.node_rig import ATTEMPT, PATIENCE_SECONDS
from support.watched_step import Watched

FAST = 0.5  # seconds without a step that are a hang
Said = pytest.CaptureFixture[str]


def test_progress_is_written_and_the_last_step_too(watched: Watched) -> None:
    watched.watch()
    watched.hear((1, 3.0))
    watched.until(lambda: watched.progress().get("step") == 1, "step 1")
    first = watched.progress()
    assert (first["schema"], first["steps"], first["loss"], first["hung"]) == (1, 40, 3.0, None)
    watched.hear((2, 2.5))
    last = watched.close()
    assert (last["step"], last["loss"]) == (2, 2.5)
    assert last["at"] >= first["at"]
    assert last["tokens_per_second"] == pytest.approx(4096 / last["step_seconds"], rel=0.01)


def test_without_a_step_nothing_is_written(watched: Watched) -> None:
    watched.watch()
    assert watched.close() == {}


def test_a_loss_that_is_nan_is_written_from_the_step_it_began(watched: Watched, capfd: Said) -> None:
    watched.watch()
    watched.hear((1, 3.0))
    watched.hear((2, math.nan), (3, math.nan))
    progress = watched.close()
    assert capfd.readouterr().err == "llmlaunch: watchdog: the loss is NaN since step 2\n"
    assert (progress["step"], progress["loss"]) == (3, None)
    assert progress["not_finite"] == {"loss": "nan", "since_step": 2}
    bad = progress["bad_loss"]
    assert (progress["good_step"], bad["kind"], bad["loss"]) == (1, "not_finite", "nan")


def test_a_spike_is_said_once_and_ends_nothing(watched: Watched, capfd: Said) -> None:
    watched.watch()
    for step in range(1, 101):
        watched.hear((step, 3.0 + step % 7 / 100))
    for step in range(101, 141):
        watched.hear((step, 9.5))
    bad = watched.close()["bad_loss"]
    assert watched.step.asked == []
    said = capfd.readouterr().err
    assert said == "llmlaunch: watchdog: the loss has spiked since step 101, now 9.5; it was 3.03\n"
    assert (bad["kind"], bad["good_step"], bad["usual"], bad["recovered_step"]) == ("spike", 100, 3.03, None)
    assert 3.3 <= bad["limit"] < 9.5


def test_a_judge_of_the_loss_that_fails_costs_its_judgement_alone(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, capfd: Said
) -> None:
    def broken(self: LossJudge, step: Step) -> str:
        raise ArithmeticError("no such number")

    monkeypatch.setattr(LossJudge, "judge", broken)
    watched.watch()
    watched.hear((1, 3.0))
    watched.hear((2, 2.0))
    assert watched.close()["step"] == 2
    assert capfd.readouterr().err.count("the loss is judged no more: ArithmeticError: no such number") == 1


NANS = ((2, math.nan), (3, math.nan))


@pytest.mark.parametrize(("action", "ends"), [("stop", True), ("rollback", True), ("tell", False)])
def test_a_loss_that_stays_nan_ends_the_step_without_a_save_where_the_recipe_says_so(
    watched: Watched, action: str, ends: bool, capfd: Said
) -> None:
    watched.watch({"on_bad_loss": {"action": action}})
    watched.hear((1, 3.0))
    for step in (*NANS, (4, math.nan)):
        watched.hear(step)
    progress = watched.close()
    assert watched.step.asked == ([("end", 0.0)] if ends else [])  # a TERM asks for a save
    assert progress["bad_loss"]["ended"] is ends
    assert capfd.readouterr().err.count("for its loss, without a save") == int(ends)


def test_one_nan_that_is_followed_by_a_number_ends_nothing(watched: Watched) -> None:
    watched.watch({"on_bad_loss": {"action": "stop"}})
    for step in ((1, 3.0), (2, math.nan), (3, 3.0)):
        watched.hear(step)
    assert watched.step.asked == []


@pytest.mark.parametrize("counts", [False, True])
def test_a_spike_ends_the_step_only_where_the_recipe_counts_it(watched: Watched, counts: bool) -> None:
    watched.watch({"on_bad_loss": {"action": "stop", "spike": counts}})
    for step in range(1, 41):
        watched.hear((step, 3.0 if step <= 30 else 9.0))
    assert watched.step.asked == ([("end", 0.0)] if counts else [])
    assert watched.close()["bad_loss"]["since_step"] == 31


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks are waited for a shorter time."""
    monkeypatch.setattr(module, "DUMP_SECONDS", 0.3)


@pytest.mark.usefixtures("quick")
def test_a_hang_is_written_down_asked_for_its_stacks_and_ended(watched: Watched, capfd: Said) -> None:
    watched.watch(floor_seconds=FAST)
    watched.hear((1, 3.0))
    watched.hear((2, 3.0))
    watched.until(lambda: len(watched.step.asked) == 2, "the end of the hang")
    assert watched.step.asked == ["stacks", ("end", module.TERM_SECONDS)]
    hung = watched.close()["hung"]  # also when the step has ended
    assert (hung["what"], hung["where"]) == ("a step", "")
    assert hung["since_seconds"] >= hung["allowed_seconds"] >= FAST
    said = capfd.readouterr().err
    assert "hung: no sign of a step" in said
    assert "ending the training step; no rank wrote its stacks" in said


@pytest.mark.usefixtures("quick")
def test_a_file_system_that_hangs_holds_no_hang_up(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FILES_SECONDS", 0.3)
    watched.watch(floor_seconds=FAST)
    answers = threading.Event()
    watched.disk.give(lambda: bool(answers.wait(PATIENCE_SECONDS)) and None)
    watched.hear((1, 3.0))
    watched.hear((2, 3.0))
    watched.until(lambda: len(watched.step.asked) == 2, "the end of the hang")
    answers.set()
    watched.look()
    assert watched.step.asked == ["stacks", ("end", module.TERM_SECONDS)]  # once


@pytest.mark.usefixtures("quick")
def test_a_step_that_comes_while_stacks_are_written_saves_the_training(watched: Watched, capfd: Said) -> None:
    watched.watch(floor_seconds=FAST)
    watched.hear((1, 3.0))
    watched.hear((2, 3.0))
    watched.until(lambda: watched.step.asked, "the question where it is")
    watched.hear((3, 3.0), slow=True)
    watched.look(1.5)
    assert watched.step.asked == ["stacks"]
    assert "a step completed after all" in capfd.readouterr().err
    progress = watched.close()
    assert (progress["step"], progress["hung"]) == (3, None)


def test_what_a_step_says_once_it_is_ended_changes_nothing(watched: Watched) -> None:
    watched.watch({"on_bad_loss": {"action": "stop"}})
    for step in ((1, 3.0), *NANS, (4, 3.0)):
        watched.hear(step)
    assert watched.close()["step"] == 3


def test_trainers_that_did_not_load_the_checkpoint_are_ended_before_they_save_over_it(watched: Watched) -> None:
    watched.write(f"attempts/{ATTEMPT}/attempt.json", {"tracker_step": 20})
    watched.watch()
    watched.hear((1, 11.0))
    assert watched.step.asked == [("end", module.TERM_SECONDS)]
    assert watched.close()["behind"] == {"first_step": 1, "checkpoint_step": 20}


def test_trainers_that_go_on_after_the_checkpoint_are_left_in_peace(watched: Watched) -> None:
    watched.write(f"attempts/{ATTEMPT}/attempt.json", {"tracker_step": 20})
    watched.watch()
    watched.hear((21, 3.0), (22, 3.0))
    assert watched.step.asked == []
    assert watched.close()["behind"] is None


def test_seconds_in_which_it_stood_still_itself_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM suspends a job's processes all together."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock = Clock(longest_tick=12.0)
    now += 2.0
    assert clock.now() == 2.0
    now += 7200.0
    assert clock.now() == 14.0
    now += 2.0
    assert clock.now() == 16.0


@pytest.mark.parametrize("announced", [True, False])
def test_a_slow_save_is_no_hang(watched: Watched, announced: bool) -> None:
    watched.watch(floor_seconds=0.2)
    watched.hear((1, 3.0))
    watched.hear((2, 3.0), slow=announced)
    watched.step.is_stopping = not announced  # it was told to save
    watched.look(1.0)
    assert watched.step.asked == []
    assert watched.close()["hung"] is None


def test_the_stop_file_is_passed_on_once(watched: Watched, capfd: Said) -> None:
    watched.watch()
    (watched.run / "stop").touch()
    watched.until(lambda: watched.step.asked, "the word")
    watched.look()
    assert watched.step.asked == ["stop"]
    assert "stop is there: asking the trainers to save and stop" in capfd.readouterr().err


def test_a_script_that_says_nothing_known_is_left_alone_and_said_so_once(watched: Watched, capfd: Said) -> None:
    watched.watch(promised=False, first_step_seconds=0.1, floor_seconds=0.1)
    watched.look(1.0)
    assert watched.step.asked == []
    assert capfd.readouterr().err.count("no log line reports a step") == 1


def test_a_disk_that_is_full_does_not_matter(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(module, "replace_json", full)
    watched.watch()
    watched.hear((1, 3.0))
    (watched.run / "stop").touch()
    watched.until(lambda: watched.step.asked, "the word")
    assert watched.close() == {}


def test_nothing_is_asked_of_a_step_that_has_ended(watched: Watched) -> None:
    """What the thread for files has found meanwhile comes too late."""
    watched.watch()
    held = threading.Event()
    watched.disk.give(lambda: bool(held.wait(PATIENCE_SECONDS)) and None)
    watched.look(0.2)
    (watched.run / "stop").touch()
    watched.watchdog.close()
    held.set()
    assert watched.disk.finish(PATIENCE_SECONDS)
    watched.look()
    assert watched.step.asked == []


def test_old_checkpoints_are_removed_beside_the_training_when_the_tracker_names_a_newer_one(
    watched: Watched, tmp_path: Path, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(archive)])
    folder = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        (folder / f"step-{step}").mkdir(parents=True)
        (folder / f"step-{step}" / "mp_rank_00_model_states.pt").write_bytes(b"x")
    (folder / "latest").write_text("step-3")
    watched.watch({"checkpoint": {"path": str(folder), "tracker": "latest", "promised": True, "keep": 2}})
    watched.hear((4, 3.0))
    watched.until(lambda: len(list(folder.iterdir())) == 3, "the oldest is gone")
    assert {path.name for path in folder.iterdir()} == {"latest", "step-2", "step-3"}
