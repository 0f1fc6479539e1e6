"""The watchdog beside a child of its own: what it writes, whom it signals, and that it never hurts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.node.loss_judge import LossJudge
from llmlaunch.node.process_tree import Process, kill_tree
from llmlaunch.node.watchdog import AttemptWatchdog, Clock, _arguments
from llmlaunch.rundir.step_lines import Step
from support.node_rig import ATTEMPT, NODE, NodeRig, alive, until

PROGRESS = {
    "step_patterns": [r"\bstep (?P<step>\d+)/(?P<steps>\d+) \| loss (?P<loss>\S+)"],
    "slow_patterns": [r"\bsaving step \d+"],
    "promised": True,
    "steps": 40,
    "tokens_per_step": 4096,
    "floor_seconds": 0.5,
    "first_step_seconds": 600.0,
    "saving_seconds": 600.0,
}
# Notes each signal it hears; ends at TERM.
TRAINING_STEP = """
import signal, sys, time
from pathlib import Path
heard = Path(sys.argv[1])
def hear(number, frame):
    with heard.open("a") as file:
        file.write(signal.Signals(number).name + "\\n")
    if number == signal.SIGTERM:
        sys.exit(1)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGURG):
    signal.signal(number, hear)
heard.touch()
while True:
    time.sleep(0.01)
"""


class Watched:
    """A run directory, a training step that does nothing, and the watchdog beside it."""

    def __init__(self, rig: NodeRig, directory: Path) -> None:
        self.rig = rig
        self.heard_path = directory / "heard"
        self.log = rig.write(f"logs/{ATTEMPT}.{NODE}.log", "")
        self.child = subprocess.Popen([sys.executable, "-c", TRAINING_STEP, str(self.heard_path)])
        until(self.heard_path.exists, "the training step")
        self.watchdog: Any = None

    def watch(
        self, *options: str, nodes: int = 1, restart: object = None, checkpoint: object = None, **progress: object
    ) -> None:
        self.watch_with({"nodes": nodes, "restart": restart, "checkpoint": checkpoint}, *options, **progress)

    def watch_with(self, run: dict[str, Any], *options: str, **progress: object) -> None:
        described = {"nodes": 1, "devices_per_node": 1, "progress": {**PROGRESS, **progress}, **run}
        self.rig.write("run.json", described)
        child = ("--layout", ".", "--child", str(self.child.pid), "--poll", "0.05")
        self.watchdog = self.rig.start("watchdog", *self.rig.place, *child, *options)

    def write_log(self, line: str) -> None:
        with self.log.open("a") as file:
            file.write(f"{line}\n")

    def touch_stop_file(self) -> None:
        (self.rig.run_directory / "stop").touch()

    def steps(self, first: int, last: int) -> None:
        """One step after the other, each read before the next."""
        for step in range(first, last + 1):
            self.write_log(f"step {step}/40 | loss 3.0")
            until(lambda step=step: self.progress().get("step") == step or step > 1, f"step {step}")

    def progress(self) -> dict[str, Any]:
        path = self.rig.attempt_directory / "progress.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def heard(self) -> list[str]:
        return self.heard_path.read_text().split()

    def ended(self) -> str:
        """Wait for the watchdog and return its stderr."""
        _, stderr = self.watchdog.communicate(timeout=120)
        assert self.watchdog.returncode == 0, stderr
        return str(stderr)

    def terminated(self) -> str:
        self.watchdog.send_signal(signal.SIGTERM)
        return self.ended()

    def end_child(self) -> None:
        self.child.kill()
        self.child.wait()


@pytest.fixture
def watched(cpu_node: NodeRig, tmp_path: Path) -> Iterator[Watched]:
    step = Watched(cpu_node, tmp_path)
    yield step
    step.end_child()


def test_progress_is_written_and_the_last_step_too(watched: Watched) -> None:
    watched.watch(floor_seconds=600.0)
    watched.steps(1, 1)
    first = watched.progress()
    assert (first["schema"], first["step"], first["steps"], first["loss"], first["hung"]) == (1, 1, 40, 3.0, None)
    watched.write_log("step 2/40 | loss 2.5")
    watched.end_child()
    assert watched.ended() == ""
    last = watched.progress()
    assert (last["step"], last["loss"]) == (2, 2.5)
    assert last["at"] >= first["at"]
    assert last["tokens_per_second"] == pytest.approx(4096 / last["step_seconds"], rel=0.01)


def test_a_loss_that_is_nan_is_written_from_the_step_it_began(watched: Watched) -> None:
    watched.watch(floor_seconds=600.0)
    watched.steps(1, 1)
    watched.write_log("step 2/40 | loss nan\nstep 3/40 | loss nan")
    watched.end_child()
    assert watched.ended() == "llmlaunch: watchdog: the loss is NaN since step 2\n"
    text = (watched.rig.attempt_directory / "progress.json").read_text()
    progress = json.loads(text, parse_constant=pytest.fail)
    assert (progress["step"], progress["loss"]) == (3, None)
    assert progress["not_finite"] == {"loss": "nan", "since_step": 2}
    assert (progress["good_step"], progress["bad_loss"]["kind"], progress["bad_loss"]["loss"]) == (
        1,
        "not_finite",
        "nan",
    )


def test_a_spike_in_a_log_that_grows_is_said_once_and_ends_nothing(watched: Watched) -> None:
    watched.watch(floor_seconds=600.0)
    for step in range(1, 101):
        watched.write_log(f"step {step}/200 | loss {3.0 + step % 7 / 100}")
    for step in range(101, 141):
        watched.write_log(f"step {step}/200 | loss 9.5")
    until(lambda: watched.progress().get("step") == 140, "the last step")
    assert watched.child.poll() is None
    watched.end_child()
    assert watched.ended() == "llmlaunch: watchdog: the loss has spiked since step 101, now 9.5; it was 3.03\n"
    bad = watched.progress()["bad_loss"]
    assert (bad["kind"], bad["good_step"], bad["usual"], bad["recovered_step"]) == ("spike", 100, 3.03, None)
    assert 3.3 <= bad["limit"] < 9.5


def test_a_judge_of_the_loss_that_fails_costs_its_judgement_alone(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(self: LossJudge, step: Step) -> str:
        raise ArithmeticError("no such number")

    monkeypatch.setattr(LossJudge, "judge", broken)
    watched.rig.write("run.json", {"nodes": 1, "devices_per_node": 1, "progress": PROGRESS})
    child = ["--layout", ".", "--child", str(watched.child.pid)]
    watchdog = AttemptWatchdog(_arguments([*map(str, watched.rig.place), *child]))
    watched.write_log("step 1/40 | loss 3.0\nstep 2/40 | loss 2.0")
    watchdog._look(everywhere=True)
    assert watched.progress()["step"] == 2
    assert capfd.readouterr().err.count("the loss is judged no more: ArithmeticError: no such number") == 1


def kill_or_leave(watched: Watched, policy: dict[str, Any], *lines: str) -> str:
    """Watch a training whose rank is a child of its launcher, and return what the watchdog said."""
    watched.watch_with({"on_bad_loss": policy}, floor_seconds=600.0)
    watched.steps(1, 1)
    for line in lines:
        watched.write_log(line)
    if policy["action"] == "tell":
        until(lambda: watched.progress().get("step") == len(lines) + 1, "the last step")
        watched.end_child()
    return watched.ended()


NAN_LINES = ("step 2/40 | loss nan", "step 3/40 | loss nan")


def test_a_loss_that_stays_nan_ends_the_step_without_a_save_where_the_recipe_says_so(watched: Watched) -> None:
    said = kill_or_leave(watched, {"action": "stop"}, *NAN_LINES)
    assert "ending the training step for its loss, without a save" in said
    assert watched.progress()["bad_loss"]["ended"] is True
    assert "SIGUSR1" not in watched.heard()  # which asks for a save


def test_it_goes_on_with_nan_where_the_recipe_only_has_it_told(watched: Watched) -> None:
    said = kill_or_leave(watched, {"action": "tell"}, *NAN_LINES)
    assert "ending" not in said
    assert watched.progress()["bad_loss"]["ended"] is False


def test_one_nan_that_is_followed_by_a_number_ends_nothing(watched: Watched) -> None:
    watched.watch_with({"on_bad_loss": {"action": "stop"}}, floor_seconds=600.0)
    for line in ("step 1/40 | loss 3.0", "step 2/40 | loss nan", "step 3/40 | loss 3.0"):
        watched.write_log(line)
    until(lambda: watched.progress().get("step") == 3, "step 3")
    assert watched.child.poll() is None


@pytest.mark.parametrize("counts", [False, True])
def test_a_spike_ends_the_step_only_where_the_recipe_counts_it(watched: Watched, counts: bool) -> None:
    watched.watch_with({"on_bad_loss": {"action": "stop", "spike": counts}}, floor_seconds=600.0)
    for step in range(1, 41):
        watched.write_log(f"step {step}/40 | loss {3.0 if step <= 30 else 9.0}")
    if counts:
        assert "without a save" in watched.ended()
        assert watched.progress()["bad_loss"]["since_step"] == 31
    else:
        until(lambda: watched.progress().get("step") == 40, "step 40")
        assert watched.child.poll() is None


def test_without_slurm_the_trainers_are_killed_and_their_script_ends_by_itself(cpu_node: NodeRig) -> None:
    """A SIGTERM to train.sh would ask the trainers to save."""
    rank = cpu_node.rank("sh", "-c", "trap 'touch saved' TERM; while :; do sleep 0.1; done")
    pid = cpu_node.until_record(0)["program_pid"]
    cpu_node.write(
        "run.json", {"nodes": 1, "devices_per_node": 1, "progress": PROGRESS, "on_bad_loss": {"action": "stop"}}
    )
    cpu_node.write(f"logs/{ATTEMPT}.{NODE}.log", "step 1/40 | loss nan\nstep 2/40 | loss nan\n")
    watchdog = cpu_node.start("watchdog", *cpu_node.place, "--layout", ".", "--child", str(rank.pid), "--poll", "0.05")
    assert watchdog.wait(120) == 0
    rank.wait()
    assert not alive(pid)
    assert cpu_node.until_record(0)["signal"] == "SIGKILL"
    assert not (cpu_node.run_directory / "saved").exists()


def test_a_hang_is_written_down_asked_for_its_stacks_and_ended(watched: Watched) -> None:
    watched.watch()
    watched.steps(1, 1)
    watched.write_log("step 2/40 | loss 3.0")
    stderr = watched.ended()
    assert watched.heard() == ["SIGUSR2", "SIGTERM"]
    hung = watched.progress()["hung"]
    assert hung["what"] == "a step"
    assert hung["since_seconds"] >= hung["allowed_seconds"] >= 0.5
    assert "hung: no sign of a step" in stderr


def test_trainers_that_did_not_load_the_checkpoint_are_ended_before_they_save_over_it(watched: Watched) -> None:
    watched.rig.write_attempt("attempt.json", {"tracker_step": 20})
    watched.watch()
    watched.write_log("step 1/40 | loss 11.0")
    until(lambda: watched.child.poll() is not None, "its end")
    assert "SIGTERM" in watched.heard()
    assert watched.progress()["behind"] == {"first_step": 1, "checkpoint_step": 20}


def test_trainers_that_go_on_after_the_checkpoint_are_left_in_peace(watched: Watched) -> None:
    watched.rig.write_attempt("attempt.json", {"tracker_step": 20})
    watched.watch(floor_seconds=600.0)
    watched.steps(21, 22)
    assert watched.child.poll() is None
    watched.end_child()
    assert watched.ended() == ""
    assert watched.progress()["behind"] is None


def test_a_step_that_comes_while_stacks_are_written_saves_the_training(watched: Watched) -> None:
    watched.watch()
    watched.steps(1, 1)
    watched.write_log("step 2/40 | loss 3.0")
    until(watched.heard, "the question where it is")
    watched.write_log("step 3/40 | loss 3.0\nsaving step 3")
    watched.rig.write_attempt("stacks/0.txt", "not here any more")
    until(lambda: watched.progress().get("step") == 3, "the step")
    assert "a step completed after all" in watched.terminated()
    assert watched.heard() == ["SIGUSR2"]
    assert watched.progress()["hung"] is None


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


def test_a_slow_save_is_no_hang(watched: Watched) -> None:
    watched.watch(floor_seconds=0.2)
    watched.write_log("step 1/40 | loss 3.0")
    watched.write_log("step 2/40 | loss 3.0\nsaving step 2")
    with pytest.raises(subprocess.TimeoutExpired):
        watched.watchdog.wait(0.8)
    assert watched.heard() == []
    assert watched.terminated() == ""
    assert watched.progress()["hung"] is None


def test_the_stop_file_is_passed_on_once_to_the_shell(watched: Watched) -> None:
    watched.watch("--shell", str(watched.child.pid), floor_seconds=600.0)
    watched.touch_stop_file()
    until(watched.heard, "the signal")
    watched.steps(1, 1)
    assert watched.heard() == ["SIGUSR1"]
    assert "stop is there: asking the trainers to save and stop" in watched.terminated()


def test_the_shell_is_asked_for_a_verdict_once_when_every_node_has_ended_and_the_step_lingers(watched: Watched) -> None:
    """And what lingers is no hang."""
    watched.watch("--shell", str(watched.child.pid), "--linger", "0.5", floor_seconds=0.1, first_step_seconds=600.0)
    watched.steps(1, 1)
    watched.rig.done(NODE)
    until(watched.heard, "the signal")
    watched.touch_stop_file()
    until(lambda: "SIGUSR1" in watched.heard(), "another look")
    watched.terminated()
    assert watched.heard() == ["SIGURG", "SIGUSR1"]


def test_where_a_node_failed_and_others_do_not_end_the_step_is_ended_if_it_is_to_start_again_here(
    watched: Watched,
) -> None:
    """Which is long before SLURM has noticed that a node is gone."""
    watched.rig.write_attempt("causes/faulty.json", {})  # left out by the preflight
    watched.watch(nodes=2, restart={"within": "job"}, floor_seconds=600.0)
    watched.rig.rank("true").wait()
    watched.steps(1, 1)
    assert watched.heard() == []
    watched.rig.write_attempt(f"causes/{NODE}.json", {})
    assert "a node has failed and others have not ended" in watched.ended()
    assert watched.heard() == ["SIGTERM"]


def test_what_was_written_before_the_training_is_no_end_of_a_node(watched: Watched) -> None:
    """The kernel's counters of each node, and why the preflight left out another."""
    for name in (f".{NODE}.before.json", "node9.json"):
        watched.rig.write_attempt(f"causes/{name}", {})
    watched.watch("--shell", str(watched.child.pid), "--linger", "0", floor_seconds=600.0)
    watched.touch_stop_file()
    until(watched.heard, "the signal")
    watched.steps(1, 1)  # it has looked again since
    assert watched.heard() == ["SIGUSR1"]
    watched.terminated()


def test_a_script_that_says_nothing_known_is_left_alone_and_said_so_once(watched: Watched) -> None:
    watched.watch(promised=False, first_step_seconds=0.1)
    watched.write_log("hello")
    until(lambda: watched.watchdog.stderr.readable(), "the watchdog")
    watched.touch_stop_file()
    until(watched.heard, "the signal")
    with pytest.raises(subprocess.TimeoutExpired):
        watched.watchdog.wait(0.3)
    assert watched.terminated().count("no log line reports a step") == 1
    assert watched.heard() == ["SIGUSR1"]


def test_its_own_mistakes_end_it_alone(watched: Watched) -> None:
    watched.watch(step_patterns=["[a"])
    assert "watchdog: ended by error: unterminated character set" in watched.ended()
    assert watched.child.poll() is None
    assert watched.heard() == []


def test_a_disk_that_is_full_does_not_matter(watched: Watched) -> None:
    watched.rig.attempt_directory.parent.mkdir()
    watched.rig.attempt_directory.write_text("no folder")
    watched.watch()
    watched.write_log("step 1/40 | loss 3.0")
    watched.touch_stop_file()
    until(watched.heard, "the signal")
    watched.write_log("step 2/40 | loss 3.0")
    assert "ending the training step" in watched.ended()


def test_what_outlives_term_is_killed_with_all_below(cpu_node: NodeRig) -> None:
    deaf = "trap '' TERM; sleep 600 & wait; sleep 600"
    shell = subprocess.Popen(["bash", "-c", deaf])
    below = until(lambda: _children(shell.pid), "the sleeper")
    kill_tree(Process(shell.pid))
    assert shell.wait() == -signal.SIGKILL
    until(lambda: not any(alive(pid) for pid in below), "the end of the sleeper")


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_old_checkpoints_are_removed_beside_the_training_when_the_tracker_names_a_newer_one(
    watched: Watched, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        (folder / f"step-{step}").mkdir(parents=True)
        (folder / f"step-{step}" / "mp_rank_00_model_states.pt").write_bytes(b"x")
    (folder / "latest").write_text("step-3")
    checkpoint = {"path": str(folder), "tracker": "latest", "promised": True, "keep": 2}
    watched.watch_with({"checkpoint": checkpoint}, floor_seconds=600.0)
    watched.steps(1, 4)
    until(lambda: len(list(folder.iterdir())) == 3, "the oldest is gone")
    assert {path.name for path in folder.iterdir()} == {"latest", "step-2", "step-3"}
    assert "removed the checkpoint" in watched.terminated()
