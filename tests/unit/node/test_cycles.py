"""Restarts by ft_launcher: each is an attempt of its own, judged while the step goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.node.cycles import END, NEXT, CycleWatch, attempt_of_cycle
from support.node_rig import ATTEMPT, NODE, NodeRig, alive, until

JOB = ATTEMPT.partition(".")[0]
SECOND = f"{JOB}.1"
RESTART = {"by": "requeue", "within": "ft_launcher", "times": 20, "fruitless": 2, "backoff_seconds": 60}
# Asked for the nodes of the job, given a list of fewer, asked whether a node starts a task: its name says.
SLURM = """\
#!/bin/sh
echo "$(basename "$0") $*" >>"$CALLS"
case $(basename "$0") in
  squeue) echo list ;;
  scontrol) [ "$1" = update ] || printf '%s\\n' $ALLOCATED ;;
  srun) for word; do case $word in --nodelist=lost*) exit 1 ;; esac; done ;;
esac
"""


@pytest.mark.parametrize(
    ("first", "cycle", "attempt"),
    [("7.0", "0", "7.0"), ("7.0", "2", "7.2"), ("7_3.4", "1", "7_3.5"), ("7.0", "", "7.0"), ("7.0", "x", "7.0")],
)
def test_a_restart_by_ft_launcher_is_the_attempt_after(first: str, cycle: str, attempt: str) -> None:
    assert attempt_of_cycle(first, {"TORCHELASTIC_RESTART_COUNT": cycle}) == attempt


def test_its_rank_wrapper_writes_and_logs_for_that_attempt(cpu_node: NodeRig) -> None:
    cpu_node.write_attempt("ranks/.keep", "")
    cpu_node.write("logs/.keep", "")
    wrapper = restarted_rank(cpu_node, 'echo "$LLMLAUNCH_ATTEMPT $DUMPS"; exit 3', DUMPS=f"/run/attempts/{ATTEMPT}/x")
    assert wrapper.wait() == 3
    own = cpu_node.run_directory / "attempts" / SECOND
    assert json.loads((own / "ranks" / f"{NODE}.jsonl").read_text().splitlines()[-1])["exit_code"] == 3
    assert (own / "failed").exists()
    log = cpu_node.run_directory / "logs" / f"{SECOND}.{NODE}.log"
    assert log.read_text() == f"{SECOND} /run/attempts/{SECOND}/x\n"
    assert [path.name for path in cpu_node.attempt_directory.iterdir()] == ["ranks"]


def test_a_rank_that_ends_well_leaves_no_word_of_failure(cpu_node: NodeRig) -> None:
    assert restarted_rank(cpu_node, "exit 0").wait() == 0
    assert not (cpu_node.run_directory / "attempts" / SECOND / "failed").exists()


def test_a_launcher_that_is_killed_leaves_no_trainer_behind(cpu_node: NodeRig) -> None:
    words = [sys.executable, "-I", "-S", str(cpu_node.archive), "rank", *cpu_node.place, "--node", NODE, "--cycles"]
    launch = f"import subprocess; subprocess.Popen({[*words, '--', 'sleep', '600']!r}).wait()"
    launcher = subprocess.Popen([sys.executable, "-c", launch], env=cpu_node.environment(RANK="0", LOCAL_RANK="0"))
    record = cpu_node.until_record()
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    until(lambda: not alive(record["pid"]) and not alive(record["program_pid"]), "the end of wrapper and trainer")


def restarted_rank(rig: NodeRig, script: str, **variables: str) -> Any:
    """The wrapper of a rank that ft_launcher has started for the second time."""
    place = (*rig.place, "--node", NODE, "--cycles")
    variables |= {"RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_RESTART_COUNT": "1"}
    return rig.start("rank", *place, "--", "sh", "-c", script, **variables)


class Step:
    """A step of ft_launcher on nodes whose first attempt has made steps, and the watchdog's view of it."""

    def __init__(self, rig: NodeRig, calls: Path) -> None:
        self.rig = rig
        self.calls_path = calls

    def begin(self, *nodes: str) -> CycleWatch:
        progress = {"step_patterns": [], "promised": True, "steps": 40}
        run = {"schema": 1, "nodes": len(nodes), "devices_per_node": 1, "restart": RESTART, "progress": progress}
        self.rig.write("run.json", run)
        self.rig.write_attempt("attempt.json", {"attempt": ATTEMPT, "nodes": nodes, "started_at": 1.0})
        self.rig.write_attempt("progress.json", {"step": 7})
        for rank, node in enumerate(nodes):
            self.rig.write_rank(self.record(rank, node))
        return CycleWatch(self.rig.run_directory, ATTEMPT, ".", len(nodes))

    @staticmethod
    def record(rank: int, node: str, **changes: Any) -> dict[str, Any]:
        return {"rank": rank, "local_rank": 0, "node": node, "pid": 1, "started_at": 2.0, "ended_at": None, **changes}

    def fail(self, rank: int, node: str, line: str = "") -> None:
        self.rig.write_rank(self.record(rank, node, ended_at=3.0, exit_code=1, signal=None))
        self.rig.write(f"logs/{ATTEMPT}.{node}.log", line)
        self.rig.write_attempt("failed", "")

    def begin_next(self, *nodes: str) -> None:
        for rank, node in enumerate(nodes):
            self.rig.write_rank(self.record(rank, node), SECOND)

    def calls(self) -> list[str]:
        return self.calls_path.read_text().splitlines() if self.calls_path.exists() else []

    def of(self, attempt: str, name: str) -> dict[str, Any]:
        path = self.rig.run_directory / "attempts" / attempt / name
        return dict(json.loads(path.read_text())) if path.exists() else {}


@pytest.fixture
def step(cpu_node: NodeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Step:
    """SLURM's commands are scripts that answer by names; tests/slurm/test_same_allocation.py has the real ones."""
    commands, calls = tmp_path / "commands", tmp_path / "slurm-calls"
    commands.mkdir()
    for name in ("squeue", "scontrol", "srun"):
        (commands / name).write_text(SLURM)
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(calls))
    monkeypatch.setenv("SLURM_JOB_ID", JOB)
    monkeypatch.setattr(sys, "argv", [str(cpu_node.archive)])
    monkeypatch.chdir(tmp_path)
    return Step(cpu_node, calls)


def test_a_lost_node_is_blamed_and_given_back_and_the_next_attempt_written_down(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALLOCATED", "a lost1 c d")
    watch = step.begin("a", "lost1", "c")
    assert watch.look(0.0) == ""
    step.fail(0, "a", "RuntimeError: Connection closed by peer\n")
    step.fail(2, "c", "RuntimeError: Connection closed by peer\n")
    assert [watch.look(at) for at in (1.0, 3.0)] == ["", ""]
    assert step.of(ATTEMPT, "status.json") == {}  # the others may still end
    assert watch.look(7.0) == ""
    status = step.of(ATTEMPT, "status.json")
    assert (status["state"], status["cause"]["kind"], status["cause"]["nodes"]) == ("failed", "node_fail", ["lost1"])
    assert (status["next"]["action"], status["next"]["nodes"]) == ("restart", ["a", "c", "d"])
    assert f"scontrol update JobId={JOB} NodeList=a,c,d" in step.calls()
    assert [call for call in step.calls() if call.startswith("srun") and "nodelist=d" in call] == []
    step.begin_next("a", "c", "d")
    assert watch.look(8.0) == NEXT
    assert step.of(SECOND, "attempt.json")["nodes"] == ["a", "c", "d"]


def test_where_a_restart_would_end_the_same_way_the_step_is_ended_and_nothing_written(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job's own script then judges it, and knows other ways."""
    monkeypatch.setenv("ALLOCATED", "a b")
    watch = step.begin("a", "b")
    step.fail(0, "a", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    assert watch.look(0.0) == ""
    step.begin_next("a", "b")  # ft_launcher does not know
    assert watch.look(6.0) == END
    assert step.of(ATTEMPT, "status.json") == {} == step.of(SECOND, "attempt.json")


def test_where_too_few_nodes_are_left_the_step_is_ended(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLOCATED", "a lost1")
    watch = step.begin("a", "lost1")
    step.fail(0, "a", "RuntimeError: Connection closed by peer\n")
    assert [watch.look(at) for at in (0.0, 6.0)] == ["", END]


def test_a_node_at_fault_is_kept_out_of_the_next_rendezvous(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLOCATED", "a b c")
    watch = step.begin("a", "b")
    step.fail(1, "b", "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered\n")
    assert [watch.look(at) for at in (0.0, 6.0)] == ["", ""]
    names = [path.name for path in (step.rig.run_directory / "health" / JOB).iterdir() if path.read_text()]
    assert names == ["segment_health_check.b.b"]


def test_a_launcher_whose_place_a_spare_node_took_does_not_fail_the_job(step: Step) -> None:
    step.begin("a", "b")
    for rank, node in enumerate("ab"):
        step.rig.write_rank(step.record(rank, node, ended_at=3.0, exit_code=0))
    step.rig.done("a", "b")
    assert step.rig.finish(2, 137)[:1] == (0,)
    assert step.of(ATTEMPT, "status.json")["state"] == "succeeded"


def test_where_ft_launcher_gives_up_the_job_goes_on_with_every_node_it_still_has(step: Step) -> None:
    """With the spare ones last. A lost node that was given back before is not given back again."""
    step.begin("a", "lost1", "c")
    step.fail(0, "a", "RuntimeError: Connection closed by peer\n")
    step.fail(2, "c", "RuntimeError: Connection closed by peer\n")
    finish = step.rig.start_finish(3, 1, "--wait", "0", "--within")
    answer, _ = finish.communicate("a\nc\nd\ne\n", timeout=60)
    assert answer.splitlines()[-1] == "next restart 0 a,c,d,e"
    assert step.of(ATTEMPT, "status.json")["cause"]["nodes"] == ["lost1"]


def test_the_exit_code_of_no_restart_is_the_end(step: Step) -> None:
    step.begin("a", "b")
    step.fail(0, "a", "RuntimeError: Connection closed by peer\n")
    code, status, _ = step.rig.finish(2, 93)
    assert (code, status["next"]["action"]) == (93, "end")
    assert "exit code 93" in status["next"]["why"]


def test_a_training_that_was_told_to_stop_is_not_started_again(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLOCATED", "a b")
    watch = step.begin("a", "b")
    step.rig.write_attempt("told/a", "USR1\n")
    step.fail(0, "a", "OSError: disk\n")
    assert [watch.look(at) for at in (0.0, 20.0)] == ["", ""]  # the others save
    assert watch.look(61.0) == END


def test_a_restart_that_does_not_come_is_not_waited_for_for_ever(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLOCATED", "a b c")
    watch = step.begin("a", "b")
    step.fail(0, "a", "RuntimeError: Connection closed by peer\n")
    assert [watch.look(at) for at in (0.0, 6.0, 170.0)] == ["", "", ""]
    assert watch.look(181.0) == END


def test_where_too_few_launchers_are_left_nobody_waits_for_a_restart(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALLOCATED", "a b c")
    watch = step.begin("a", "b")
    step.fail(0, "a", "RuntimeError: Connection closed by peer\n")
    step.rig.write_attempt("causes/b.json", {})  # its launcher has ended; there is a spare node
    assert [watch.look(at) for at in (0.0, 6.0, 7.0)] == ["", "", ""]
    step.rig.write_attempt("causes/a.json", {})
    assert watch.look(8.0) == END
