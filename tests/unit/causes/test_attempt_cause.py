"""What ended an attempt: the first cause of all nodes, from the files they left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.causes import attempt_cause
from llmlaunch.causes.attempt_cause import cause_of
from llmlaunch.causes.cause import cause
from llmlaunch.rundir.attempt import Attempt

ATTEMPT = "7.0"
OOM = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 8.00 GiB of which 1.00 GiB is free."
)
PEER = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:2345"
TRACEBACK = "Traceback (most recent call last):\n  File x\n"


def rank(number: int, node: str, at: float | None, code: int | None = 1, signal: str | None = None) -> dict[str, Any]:
    end = {"ended_at": at, "signal": signal, "exit_code": None if signal else code}
    return {"rank": number, "local_rank": number % 2, "node": node, "visible_devices": None, **end}


class Run:
    """A run directory of two nodes, as an attempt leaves it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.folder = directory / "attempts" / ATTEMPT
        for name in ("causes", "done"):
            (self.folder / name).mkdir(parents=True)
        (directory / "logs").mkdir()
        (self.folder / "attempt.json").write_text(json.dumps({"schema": 1, "nodes": ["n1", "n2"]}))

    def log(self, node: str, text: str) -> None:
        (self.directory / "logs" / f"{ATTEMPT}.{node}.log").write_text(text)

    def node_cause(self, node: str, kind: str, line: str = "-", **more: Any) -> None:
        (self.folder / "causes" / f"{node}.json").write_text(json.dumps(cause(kind, node, line, "log", **more)))

    def cause(self, *ranks: dict[str, Any], code: int = 1, state: str = "") -> dict[str, Any]:
        first = cause_of(Attempt(self.directory, ATTEMPT), ranks, code, state)
        assert first is not None
        return first


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_nothing_ended_what_succeeded(run: Run) -> None:
    run.log("n1", TRACEBACK + "ValueError: a warning somebody printed")
    assert cause_of(Attempt(run.directory, ATTEMPT), [rank(0, "n1", 5.0, 0)], 0) is None


def test_what_kept_the_training_from_beginning_is_in_the_log_of_preparing(run: Run) -> None:
    refused = "Megatron-LM refuses its arguments: unrecognized arguments: --foo 3"
    (run.folder / "prepare.log").write_text(f"note: a note\n{refused}\n  said by megatron/training/arguments.py\n")
    cause = run.cause()
    assert (cause["kind"], cause["line"], cause["node"], cause["sick"]) == ("bad_arguments", refused, None, False)
    run.node_cause("n1", "oom", at=50.0)
    assert run.cause(rank(0, "n1", 50.0))["kind"] == "oom"  # it began after all


@pytest.mark.parametrize(
    ("node1", "node2", "first"),
    [
        pytest.param({"kind": "nccl", "at": 90.0}, {"kind": "oom", "at": 50.0}, "oom", id="the earlier"),
        pytest.param({"kind": "disk_full", "at": 10.0}, {"kind": "oom", "at": 50.0}, "disk_full", id="of any kind"),
        pytest.param({"kind": "crash", "at": 50.0}, {"kind": "ecc", "at": 51.5}, "ecc", id="a device at the same time"),
        pytest.param(
            {"kind": "nccl", "at": 10.0, "consequence": True}, {"kind": "crash", "at": 50.0}, "crash",
            id="a cause before what follows from it",
        ),
    ],
)  # fmt: skip
def test_which_cause_of_two_nodes_comes_first(
    run: Run, node1: dict[str, Any], node2: dict[str, Any], first: str
) -> None:
    run.node_cause("n1", **node1)
    run.node_cause("n2", **node2)
    assert run.cause()["kind"] == first


def test_a_hang_comes_after_what_may_have_made_it(run: Run) -> None:
    hung = {"since_seconds": 700.0, "allowed_seconds": 600.0, "what": "a step"}
    (run.folder / "progress.json").write_text(json.dumps({"schema": 1, "hung": hung}))
    assert run.cause()["kind"] == "hung"
    assert run.cause()["line"] == "no progress for 700 s, waiting for a step"
    run.node_cause("n1", "nccl", consequence=True)
    assert run.cause()["kind"] == "hung"
    run.node_cause("n2", "oom", at=5.0)
    assert run.cause()["kind"] == "oom"


def test_a_node_without_a_finding_is_judged_by_its_log(run: Run) -> None:
    run.log("n1", TRACEBACK + PEER)
    run.log("n2", f"{TRACEBACK}torch.OutOfMemoryError: {OOM}\n{PEER}")
    ranks = [rank(0, "n1", 52.0), rank(1, "n1", 52.0), rank(2, "n2", 53.0, None, "SIGTERM"), rank(3, "n2", 50.0)]
    cause = run.cause(*ranks)
    assert (cause["kind"], cause["node"], cause["rank"]) == ("oom", "n2", 3)
    assert cause["numbers"]["asked_bytes"] == 2 * 2**30


def test_a_network_that_recovered_is_not_what_ended_it(run: Run) -> None:
    port = "n1:7:9 [0] NCCL WARN NET/IB : mlx5_0:1 Got non-fatal async event: port error(10)"
    run.log("n1", f"{port}\n{TRACEBACK}torch.OutOfMemoryError: {OOM}")
    assert run.cause(rank(0, "n1", 50.0))["kind"] == "oom"
    run.log("n1", f"{port}\n{TRACEBACK}{PEER}")
    cause = run.cause(rank(0, "n1", 50.0))
    assert (cause["kind"], cause["sick"]) == ("nccl", True)


def test_every_rank_that_ran_out_is_named_once(run: Run) -> None:
    run.log("n1", "".join(f"[rank{n}]: {TRACEBACK}[rank{n}]: torch.OutOfMemoryError: {OOM}\n" for n in (1, 0, 1)))
    cause = run.cause(rank(0, "n1", 50.0), rank(1, "n1", 50.0))
    assert [entry["rank"] for entry in cause["ranks"]] == [1, 0]


def test_a_kill_that_slurm_counted_after_the_node_had_looked(run: Run) -> None:
    run.node_cause("n1", "crash", "rank 0 was ended by SIGKILL", consequence=True, at=50.0)
    event = "Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed."
    run.log("n1", f"slurmstepd: error: {event}")
    assert run.cause(rank(0, "n1", 50.0, None, "SIGKILL"))["kind"] == "host_oom"


def test_a_program_that_says_nothing(run: Run) -> None:
    ranks = [rank(0, "n1", 50.0, None, "SIGTERM"), rank(1, "n1", 49.0, None, "SIGSEGV")]
    assert run.cause(*ranks)["line"] == "rank 1 was ended by SIGSEGV"


def slurm_output(run: Run, line: str, attempt: str = ATTEMPT) -> None:
    with (run.directory / "slurm-7.out").open("a") as file:
        file.write(f"job: the log of this job is /r/logs/{attempt}.job.log\n{line}\n")


def cancelled(reason: str = "", what: str = "JOB 7") -> str:
    """Return the line that slurmstepd writes when it ends a job or a step."""
    return f"slurmstepd-n1: error: *** {what} ON n1 CANCELLED AT 2026-11-21T12:00:00{reason} ***"


def test_a_lost_node_is_the_one_without_an_end(run: Run) -> None:
    run.log("n1", TRACEBACK + "RuntimeError: something of the network that nobody has seen before")
    slurm_output(run, cancelled(" DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS"))
    cause = run.cause(rank(0, "n1", 50.0), rank(1, "n2", None, None))
    assert (cause["kind"], cause["node"], cause["sick"]) == ("node_fail", "n2", True)


def test_srun_names_the_lost_node(run: Run) -> None:
    (run.directory / "logs" / f"{ATTEMPT}.job.log").write_text("srun: error: Node failure on n2\n")
    assert run.cause(rank(0, "n1", None, None), rank(1, "n2", None, None))["node"] == "n2"


def test_a_node_failure_that_only_the_scheduler_reports(run: Run) -> None:
    cause = run.cause(rank(0, "n1", 50.0, None, "SIGTERM"), rank(1, "n2", None, None), state="NODE_FAIL")
    assert (cause["kind"], cause["node"]) == ("node_fail", "n2")


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("srun: error: n1: task 0: Out Of Memory", "host_oom"),
        (cancelled(" DUE TO TIME LIMIT"), "time_limit"),
        (cancelled(" DUE TO PREEMPTION"), "preempted"),
        (cancelled(), "cancelled"),
    ],
)
def test_slurms_own_words(run: Run, line: str, kind: str) -> None:
    slurm_output(run, line)
    ended = rank(0, "n1", 50.0, None, "SIGTERM")
    assert run.cause(ended)["kind"] == kind
    run.node_cause("n2", "oom", at=5.0)
    assert run.cause(ended)["kind"] == "oom"


def test_a_step_that_is_cancelled_is_srun_at_work_and_no_cause(run: Run) -> None:
    slurm_output(run, cancelled(what="STEP 7.0"))
    run.log("n1", TRACEBACK + "ValueError: bad data")
    assert run.cause(rank(0, "n1", 50.0))["line"] == "ValueError: bad data"


def test_the_words_of_an_attempt_before_a_requeue_are_not_its_own(run: Run) -> None:
    slurm_output(run, cancelled(" DUE TO TIME LIMIT"))
    slurm_output(run, cancelled(" DUE TO NODE FAILURE"), "7.1")
    assert run.cause(rank(0, "n1", 5.0, None, "SIGTERM"))["kind"] == "time_limit"


def test_a_signal_to_a_rank_says_more_than_what_its_peers_heard_of_it(run: Run) -> None:
    run.log("n1", TRACEBACK + PEER)
    run.log("n2", TRACEBACK + PEER)
    killed = rank(3, "n2", 50.0, None, "SIGKILL")
    cause = run.cause(rank(0, "n1", 50.5), rank(2, "n2", 51.0), killed)
    assert (cause["line"], cause["rank"], cause["node"]) == ("rank 3 was ended by SIGKILL", 3, "n2")


def test_logs_are_read_for_a_bounded_time(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_cause, "LOGS_SECONDS", 0.0)
    run.log("n1", f"{TRACEBACK}torch.OutOfMemoryError: {OOM}")
    assert run.cause(rank(0, "n1", 50.0))["line"] == "rank 0 exited with 1"


def test_the_launchers_words_on_its_ranks_say_less_than_their_ends(run: Run) -> None:
    launcher = TRACEBACK + "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"
    run.log("n1", launcher)
    run.log("n2", launcher)
    taken_down = rank(0, "n1", 50.0, None, "SIGTERM")
    assert run.cause(taken_down)["line"] == "rank 0 was ended by SIGTERM"
    assert run.cause(taken_down, rank(2, "n2", 51.0, 7))["line"] == "rank 2 exited with 7"
    run.log("n2", TRACEBACK + PEER)
    assert run.cause(taken_down, rank(2, "n2", 51.0, None, "SIGTERM"))["kind"] == "nccl"


def test_a_cause_file_of_odd_values_is_read_as_far_as_it_makes_sense(run: Run) -> None:
    odd = {"kind": "ecc", "line": 5, "at": "noon", "numbers": [], "sick": "yes", "ranks": 7, "node": "other"}
    (run.folder / "causes" / "n1.json").write_text(json.dumps(odd))
    (run.folder / "causes" / "n2.json").write_text('{"kind": "nonsense"}')
    cause = run.cause(rank(0, "n1", 50.0))
    assert (cause["kind"], cause["node"], cause["line"], cause["at"]) == ("ecc", "n1", "", None)
    assert (cause["numbers"], cause["sick"]) == ({}, False)
