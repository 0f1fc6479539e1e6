"""A step of an attempt as the job sees it: a real process that speaks as srun's nodes do, and what it is told."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmlaunch.node import training_step
from llmlaunch.node.event_loop import EventLoop
from llmlaunch.node.training_step import NodeStep, StepEnd, open_log
from llmlaunch.rundir.step_lines import Step, StepNews
from support.node_rig import alive, until

# Speaks for the nodes; answers for those by the name of well*, refuses for refused*, and hangs for others.
SRUN = """\
#!/bin/bash
for word; do
  case $word in
    --nodelist=*) echo "${word#--nodelist=} ${SLURM_NTASKS_PER_NODE:-}" >>"$0.asked" ;;&
    --nodelist=well*) exit 0 ;;
    --nodelist=refused*) exit 1 ;;
    --nodelist=*) exec sleep 600 ;;
  esac
done
heard() { while read -r line; do echo "$line" >>"$0.heard"; [[ $line != "$1" ]] || return 0; done; exit 1; }
beat() { while :; do echo "$1 alive"; sleep 0.05; done & }
ended() { for name; do echo "$name ended 0"; done; }
trap 'kill $(jobs -p) 2>/dev/null' EXIT
eval "$1"
"""


class Steps:
    """Starts steps and runs them to their end."""

    def __init__(self, folder: Path, loop: EventLoop) -> None:
        self.loop, self.command = loop, folder / "srun"
        self.command.write_text(SRUN)
        self.command.chmod(0o755)
        self.heard_steps: list[StepNews] = []
        self.error = folder / "error"

    def step(self, *nodes: str, trains: bool = True) -> NodeStep:
        return NodeStep(self.loop, nodes, self.heard_steps.append, trains)

    def start(self, step: NodeStep, script: str, late_end_seconds: float | None = None, command: str = "srun") -> None:
        with open_log(str(self.error)) as error:
            step.start([command, script], dict(os.environ), error, late_end_seconds)

    def run(self, step: NodeStep, script: str, act: Callable[[], None] | None = None, **more: float) -> StepEnd:
        """Start the step, `act` when a node has spoken, and return how it ended."""
        self.start(step, script, **more)
        if act is not None:
            self.when_heard(act)
        self.loop.run(lambda: step.is_over)
        return step.finish()

    def when_heard(self, act: Callable[[], None]) -> None:
        """Act once the step has reported a step of the training."""

        def look() -> None:
            if self.heard_steps:
                act()
            else:
                self.loop.after(0.02, look)

        look()

    def lines(self, what: str) -> list[str]:
        """What it was told ("heard"), or which nodes were asked for a sign ("asked")."""
        path = self.command.with_name(f"srun.{what}")
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    before = signal.getsignal(signal.SIGCHLD)
    loop = EventLoop((), lambda number: None, lambda: None)
    yield loop
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, before)


@pytest.fixture
def steps(tmp_path: Path, loop: EventLoop, monkeypatch: pytest.MonkeyPatch) -> Steps:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name, seconds in (("BEAT", 0.2), ("OTHERS", 0.3), ("KILL", 0.5), ("LINGER", 0.5), ("ANSWER", 1.0)):
        monkeypatch.setattr(training_step, f"{name}_SECONDS", seconds)
    return Steps(tmp_path, loop)


SPOKEN = "echo 'a steps [[[1, 40, 3.0, null, null]], false]'"


def test_nodes_that_all_end_well_are_done_and_their_steps_are_heard(steps: Steps) -> None:
    end = steps.run(steps.step("a", "b"), f"echo a alive; {SPOKEN}; ended b a")
    assert end == StepEnd(0, ("b", "a"))
    assert steps.heard_steps == [StepNews([Step(1, 40, 3.0)], False)]


def test_the_port_of_the_first_node_is_handed_to_all(steps: Steps) -> None:
    assert steps.run(steps.step("a"), "echo a port 29500; heard 'port 29500'; ended a").code == 0


def test_the_first_failure_ends_the_others_with_time_to_say_why(steps: Steps) -> None:
    script = "echo a failed 7; heard end; echo b ended 143; heard kill; echo a ended 7"
    end = steps.run(steps.step("a", "b"), script)
    assert (end.code, end.done, end.silent) == (7, (), ())
    assert steps.lines("heard") == ["end", "kill"]


def test_a_failure_while_a_late_node_is_waited_for_ends_it_all_the_same(steps: Steps) -> None:
    script = "ended a; echo b failed 9; heard end; echo b ended 9"
    started = time.monotonic()
    end = steps.run(steps.step("a", "b"), script, late_end_seconds=600.0)
    assert (end.code, end.done) == (9, ("a",))
    assert time.monotonic() - started < 300.0


def test_a_node_that_ends_much_later_than_the_first_is_ended(steps: Steps) -> None:
    end = steps.run(steps.step("a", "b"), "ended a; heard end; echo b ended 143", late_end_seconds=0.2)
    assert (end.code, end.done) == (143, ("a",))


def test_trainers_that_save_may_end_as_late_as_they_like(steps: Steps) -> None:
    step = steps.step("a", "b")
    script = f"{SPOKEN}; heard save; ended a; sleep 1; ended b"
    assert steps.run(step, script, step.save, late_end_seconds=0.1) == StepEnd(0, ("a", "b"))
    assert steps.lines("heard") == ["save"]


def test_a_step_that_is_told_to_save_before_it_starts_hears_it_first(steps: Steps) -> None:
    step = steps.step("a")
    step.save()
    assert steps.run(step, "heard save; ended a").code == 0


def test_stacks_are_asked_for(steps: Steps) -> None:
    step = steps.step("a")
    assert steps.run(step, f"{SPOKEN}; heard stacks; ended a", step.ask_for_stacks).code == 0


def test_term_gives_the_trainers_time_and_none_kills_at_once(steps: Steps) -> None:
    step = steps.step("a")
    script = f"{SPOKEN}; heard kill; echo a ended 137"
    assert steps.run(step, script, lambda: step.end(0.3)).code == 137
    assert steps.lines("heard") == ["end", "kill"]
    steps.command.with_name("srun.heard").unlink()
    steps.heard_steps.clear()
    step = steps.step("a")
    assert steps.run(step, script, lambda: step.end(0.0)).code == 137
    assert steps.lines("heard") == ["kill"]


def test_a_step_that_does_not_end_is_left_and_its_srun_gone(steps: Steps, capfd: pytest.CaptureFixture[str]) -> None:
    step = steps.step("a", "b")
    script = f"echo $$ >{steps.error}.pid; trap '' TERM; ended a; {SPOKEN}; while :; do sleep 0.1; done"
    end = steps.run(step, script, lambda: step.end(0.0))
    assert (end.code, end.done, end.silent) == (1, ("a",), ("b",))
    assert "the training step does not end; it is left; no end was heard of b" in capfd.readouterr().err
    assert not alive(int(steps.error.with_suffix(".pid").read_text()))


def test_an_srun_that_lingers_when_all_nodes_have_ended_is_left_without_a_failure(steps: Steps) -> None:
    assert steps.run(steps.step("a"), "ended a; exec sleep 600") == StepEnd(0, ("a",))


@pytest.mark.parametrize(("end", "code"), [("exit 3", 3), ("kill -9 $$", 137)])
def test_an_srun_that_dies_gives_its_own_code(steps: Steps, end: str, code: int) -> None:
    assert steps.run(steps.step("a", "b"), f"ended a; {end}") == StepEnd(code, ("a",), ("b",))


def test_the_code_of_the_first_rank_that_failed_counts_more_than_srun_s(steps: Steps) -> None:
    assert steps.run(steps.step("a"), "echo a failed 7; echo a ended 7; exit 1").code == 7


def test_what_is_said_last_is_heard_though_the_process_is_gone(steps: Steps) -> None:
    step = steps.step("a")
    steps.start(step, "ended a")
    until(lambda: step.is_over, "the end of the process")
    assert step.finish() == StepEnd(0, ("a",))


def test_lines_of_nobody_and_without_sense_cost_no_other(steps: Steps, capfd: pytest.CaptureFixture[str]) -> None:
    script = "printf 'srun: error: no\\na ended x\\na steps {\\na port\\na dance\\n\\n'; ended a"
    assert steps.run(steps.step("a"), script) == StepEnd(0, ("a",))
    said = capfd.readouterr().err
    assert "of the step: srun: error: no" in said
    assert "of the step: a ended x (ValueError:" in said


def test_nodes_that_are_told_by_somebody_else_are_noted_once(steps: Steps) -> None:
    told: list[str] = []
    step = steps.step("a", "b")
    step.on_told = told.append
    end = steps.run(step, "echo a told TERM; echo b told TERM; ended a b")
    assert (end, told) == (StepEnd(0, ("a", "b"), was_told=True), ["TERM"])


def test_a_command_that_is_not_there_is_an_oserror(steps: Steps) -> None:
    step = steps.step("a")
    with pytest.raises(FileNotFoundError):
        steps.start(step, "", command="no such command")
    assert step.is_over
    assert step.finish().silent == ("a",)


# --- nodes that say nothing ---


def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_step, "START_SECONDS", 0.0)


@pytest.mark.parametrize("name", ["refused1", "hangs1"])
def test_a_silent_node_that_starts_no_task_is_lost_and_the_others_are_ended(
    steps: Steps, name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    silent(monkeypatch)
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "8")
    lost: list[tuple[str, ...]] = []
    step = steps.step("a", name)
    step.on_lost = lambda: lost.append(step.lost)
    end = steps.run(step, "beat a; heard end; echo a ended 143; exec sleep 600")
    assert (end.code, end.silent, end.lost, lost) == (1, (name,), (name,), [(name,)])
    assert f"{name} was silent for" in capfd.readouterr().err
    assert set(steps.lines("asked")) == {f"{name} "}  # without the job's options


def test_a_silent_node_that_answers_goes_on(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    silent(monkeypatch)
    end = steps.run(steps.step("a", "well1"), "beat a; sleep 3; ended a well1")
    assert end == StepEnd(0, ("a", "well1"))
    assert "well1 " in steps.lines("asked")


def test_where_all_nodes_are_silent_it_is_not_the_nodes(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    silent(monkeypatch)
    end = steps.run(steps.step("refused1", "refused2"), "sleep 3; ended refused1 refused2")
    assert end == StepEnd(0, ("refused1", "refused2"))


@pytest.mark.parametrize("by", ["the job", "the steps"])
def test_a_node_that_falls_silent_while_slurm_ends_the_job_is_not_lost(
    steps: Steps, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent(monkeypatch)
    step = steps.step("a", "refused1")
    if by == "the job":
        step.is_job_ending = True
        script = "beat a; sleep 3; ended a; exit 143"
    else:
        script = "echo a told TERM; beat a; sleep 3; ended a; exit 143"
    end = steps.run(step, script)
    assert (end.code, end.silent, end.lost) == (143, ("refused1",), ())


def test_of_another_step_than_the_training_s_no_node_is_asked_and_told_to_save_it_is_killed(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent(monkeypatch)
    step = steps.step("a", "refused1", trains=False)
    end = steps.run(step, f"sleep 2; {SPOKEN}; heard kill; exit 5", step.save)
    assert (end.code, steps.lines("asked"), steps.lines("heard")) == (5, [], ["kill"])


def test_without_slurm_nobody_is_asked(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    silent(monkeypatch)
    command = steps.command.rename(steps.command.with_name("another"))
    command.with_name("srun").write_text("#!/bin/sh\nexit 1\n")
    step = steps.step("a", "refused1")
    steps.start(step, "sleep 2; ended a refused1", command="another")
    steps.loop.run(lambda: step.is_over)
    assert step.finish().code == 0


def test_nothing_of_a_step_hits_the_next(steps: Steps) -> None:
    """Neither its timers nor its descriptors."""
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    first = steps.step("a")
    assert steps.run(first, "echo a failed 3; echo a ended 3; exec sleep 600").code == 3
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    second = steps.step("a")
    assert steps.run(second, "sleep 1.5; ended a") == StepEnd(0, ("a",))
    assert steps.lines("heard") == []
