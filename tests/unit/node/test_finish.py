"""The job's last word: it fails exactly when a trainer failed, and says which."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.node.diagnose import write_cause
from llmlaunch.node.finish import write_summary
from llmlaunch.rundir.summary import AttemptSummary, still_whole, summary_of_json
from support.node_rig import ATTEMPT, NODE, NodeRig


def run(node_side: NodeRig, end: int | str, rank: int, node: str = NODE) -> None:
    """What its node has written of a rank that ended with a code, or by a signal (test_node_ranks.py)."""
    code, signal = (end, None) if isinstance(end, int) else (None, end)
    place = {"v": 1, "rank": rank, "local_rank": 0, "node": node, "pid": 100 + rank, "program_pid": 100 + rank}
    times = {"started_at": 1000.0, "ended_at": 2000.0 + rank}
    node_side.write_rank({**place, **times, "exit_code": code, "signal": signal, "resident_peak_bytes": 2**26 + rank})


def train(node_side: NodeRig) -> None:
    run(node_side, 0, rank=0)
    node_side.done(NODE)


def train_on_two_nodes(node_side: NodeRig) -> None:
    run(node_side, 0, rank=0)
    run(node_side, 0, rank=1, node="node2")


def test_success_needs_code_markers_and_ranks(cpu_node: NodeRig) -> None:
    train_on_two_nodes(cpu_node)
    cpu_node.done(NODE, "node2")
    code, status, stderr = cpu_node.finish(nodes=2, code=0)
    assert code == status["exit_code"] == 0
    assert (status["schema"], status["attempt"], status["state"]) == (1, ATTEMPT, "succeeded")
    assert status["nodes"] == [{"node": NODE, "done": True}, {"node": "node2", "done": True}]
    assert status["ranks"] == [cpu_node.record(0), cpu_node.record(1)]
    assert stderr == f"llmlaunch: attempt {ATTEMPT} succeeded: 2 nodes, 2 ranks\n"


def test_the_launchers_code_is_the_jobs_and_the_ranks_own_is_kept(cpu_node: NodeRig) -> None:
    run(cpu_node, 0, rank=0)
    run(cpu_node, "SIGKILL", rank=1, node="node2")
    code, status, stderr = cpu_node.finish(nodes=2, code=1)
    assert [rank.rank for rank in summary(cpu_node).ranks] == [0, 1]
    assert (code, status["state"], status["exit_code"], status["ranks"][1]["signal"]) == (1, "failed", 1, "SIGKILL")
    assert stderr == f"llmlaunch: attempt {ATTEMPT} failed: rank 1 on node node2 was ended by SIGKILL\n"


@pytest.mark.parametrize(
    ("ends", "done", "nodes", "launcher", "code", "why"),
    [
        pytest.param([7], [NODE], 1, 0, 7, f"rank 0 on node {NODE} exited with 7", id="content launcher"),
        pytest.param(["SIGSEGV"], [NODE], 1, 0, 139, "ended by SIGSEGV", id="a signal as a shell counts it"),
        pytest.param(["SIGTERM", 3, 4], [], 1, 1, 1, "3 (first of 3 failed ranks)", id="who began"),
        pytest.param([], [NODE], 2, 0, 1, "1 node left no trace", id="a node that left nothing"),
        pytest.param([], [], 1, 127, 127, "the launcher returned 127; 1 node left no trace", id="no rank started"),
        pytest.param([0], [NODE], 1, 5, 5, "returned 5, though every trainer ended with 0", id="launcher alone"),
        # a disk too full for rank records does not fail a job that trained to its end
        pytest.param([], [NODE], 1, 0, 0, "1 node, 0 ranks", id="done markers are enough"),
    ],
)
def test_code_and_reason(
    cpu_node: NodeRig, ends: list[int | str], done: list[str], nodes: int, launcher: int, code: int, why: str
) -> None:
    cpu_node.attempt_directory.mkdir(parents=True)
    for rank, end in enumerate(ends):
        run(cpu_node, end, rank=rank)
    cpu_node.done(*done)
    returned, status, _ = cpu_node.finish(nodes, launcher)
    assert returned == status["exit_code"] == code
    assert status["why"].endswith(why)


def test_a_node_without_its_marker_fails_the_job(cpu_node: NodeRig) -> None:
    train_on_two_nodes(cpu_node)
    cpu_node.done(NODE)
    code, status, _ = cpu_node.finish(nodes=2, code=0)
    assert (code, status["why"]) == (1, "node node2 left no done marker")
    assert status["nodes"][1] == {"node": "node2", "done": False}


def test_a_rank_without_an_end_did_not_fail_by_that(cpu_node: NodeRig) -> None:
    cpu_node.write_rank({"rank": 0, "node": NODE, "ended_at": None, "exit_code": None, "signal": None})
    cpu_node.done(NODE)
    code, status, _ = cpu_node.finish(nodes=1, code=0)
    assert (code, status["ranks"][0]["ended_at"]) == (0, None)


def test_other_attempts_do_not_count(cpu_node: NodeRig) -> None:
    train(cpu_node)
    cpu_node.write_rank({"rank": 0, "node": "node9", "exit_code": 1, "signal": None}, attempt="16.0")
    assert cpu_node.finish(nodes=1, code=0)[0] == 0


def test_markers_that_a_file_system_shows_late_are_waited_for(cpu_node: NodeRig) -> None:
    run(cpu_node, 0, rank=0)
    run(cpu_node, 0, rank=1, node="node2")
    cpu_node.done(NODE)
    late = threading.Timer(1.0, lambda: cpu_node.done("node2"))
    late.start()
    assert cpu_node.finish(nodes=2, code=0, marker_seconds=240.0)[0] == 0


def test_a_node_that_was_heard_to_end_well_needs_no_marker(cpu_node: NodeRig) -> None:
    train_on_two_nodes(cpu_node)
    cpu_node.done(NODE)
    code, status, _ = cpu_node.finish(nodes=2, code=0, done=("node2",), marker_seconds=240.0)
    assert (code, [node["done"] for node in status["nodes"]]) == (0, [True, True])


def test_what_ended_it_is_said_in_words(cpu_node: NodeRig) -> None:
    run(cpu_node, 1, rank=0)
    error = "torch.OutOfMemoryError: CUDA out of memory."
    cpu_node.write(f"logs/{ATTEMPT}.{NODE}.log", f"Traceback (most recent call last):\n{error}\n")
    code, status, _ = cpu_node.finish(nodes=1, code=1)
    assert (code, status["cause"]["kind"]) == (1, "oom")
    assert status["why"].endswith(f"; out of GPU memory (rank 0 on {NODE}): {error}")


def test_what_srun_told_the_others_after_one_had_failed_is_no_preemption(cpu_node: NodeRig) -> None:
    run(cpu_node, 1, rank=0)
    fallbacks = [{"layout": "fallback/1", "keeps_checkpoints": False}]
    cpu_node.write("run.json", {"schema": 1, "fallbacks": fallbacks})
    cpu_node.write_attempt("told/node2", "TERM\n")
    cause = {"kind": "oom", "node": NODE, "rank": 0, "line": "CUDA out of memory", "source": "log"}
    cpu_node.write_attempt(f"causes/{NODE}.json", cause)
    _, status, _ = cpu_node.finish(nodes=2, code=1)
    assert (status["cause"]["kind"], status["next"]["action"]) == ("oom", "fallback")


def test_a_crash_before_the_first_step_ends_only_what_never_trained(cpu_node: NodeRig) -> None:
    restart = {"by": "requeue", "times": 20, "fruitless": 2, "backoff_seconds": 0}
    run(cpu_node, 1, rank=0)
    cpu_node.write("run.json", {"schema": 1, "restart": restart})
    assert cpu_node.finish(nodes=1, code=1)[1]["next"]["action"] == "end"
    # killed with its node: it left no status.json
    cpu_node.write("attempts/16.0/attempt.json", {"attempt": "16.0", "started_at": 1.0})
    cpu_node.write("attempts/16.0/progress.json", {"step": 40})
    assert cpu_node.finish(nodes=1, code=1)[1]["next"]["action"] == "requeue"


def test_a_sample_that_ends_two_attempts_in_a_row_at_the_same_step_is_not_tried_a_third_time(cpu_node: NodeRig) -> None:
    restart = {"by": "requeue", "times": 20, "fruitless": 5, "backoff_seconds": 0}
    cpu_node.write("run.json", {"schema": 1, "restart": restart})
    error = "ValueError: sample 17 is empty"
    cpu_node.write("attempts/17.9/attempt.json", {"attempt": "17.9", "started_at": 1.0})
    cpu_node.write_attempt("attempt.json", {"attempt": ATTEMPT, "started_at": 2.0, "nodes": [NODE]})
    before = {"kind": "crash", "node": "node7", "line": error, "source": "log"}
    cpu_node.write("attempts/17.9/status.json", {"attempt": "17.9", "state": "failed", "step": 149, "cause": before})
    run(cpu_node, 1, rank=0)
    cpu_node.write(f"logs/{ATTEMPT}.{NODE}.log", f"Traceback (most recent call last):\n{error}\n")
    cpu_node.write_attempt("progress.json", {"step": 150})
    assert cpu_node.finish(nodes=1, code=1)[1]["next"]["action"] == "requeue"
    cpu_node.write_attempt("progress.json", {"step": 149})
    follows = cpu_node.finish(nodes=1, code=1)[1]["next"]
    assert follows["action"] == "end"
    assert "two attempts in a row died after step 149 in the same way" in follows["why"]


def test_an_attempt_that_could_not_load_its_checkpoint_is_no_vain_one(cpu_node: NodeRig, tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("step-80")
    restart = {"by": "requeue", "times": 20, "fruitless": 1, "backoff_seconds": 0}
    checkpoint = {"path": str(tmp_path), "tracker": "latest"}
    cpu_node.write("run.json", {"schema": 1, "restart": restart, "checkpoint": checkpoint})
    run(cpu_node, 1, rank=0)
    cpu_node.write_attempt("attempt.json", {"attempt": ATTEMPT, "from_step": 80, "started_at": 1.0})
    frame = '  File "/v/deepspeed/runtime/engine.py", line 4535, in load_checkpoint'
    error = f"{frame}\nRuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory"
    cpu_node.write(f"logs/{ATTEMPT}.{NODE}.log", f"Traceback (most recent call last):\n{error}\n")
    _, status, _ = cpu_node.finish(nodes=1, code=1)
    assert (status["cause"]["kind"], status["fruitless"], status["next"]["action"]) == ("checkpoint", 0, "requeue")
    cpu_node.write_attempt("progress.json", {"step": 81})  # it had loaded it
    assert cpu_node.finish(nodes=1, code=1)[1]["next"]["action"] == "end"


def test_an_attempt_that_a_bad_node_ended_is_no_vain_one(cpu_node: NodeRig, tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("step-80")
    restart = {"by": "requeue", "times": 20, "fruitless": 1, "backoff_seconds": 0}
    checkpoint = {"path": str(tmp_path), "tracker": "latest"}
    cpu_node.write("run.json", {"schema": 1, "restart": restart, "checkpoint": checkpoint})
    run(cpu_node, 1, rank=0)
    cpu_node.write_attempt("attempt.json", {"attempt": ATTEMPT, "from_step": 80, "started_at": 1.0})
    cpu_node.write_attempt("progress.json", {"step": 85})
    follows = {}
    for error in ("uncorrectable ECC error encountered", "unspecified launch failure"):
        log = f"Traceback (most recent call last):\ntorch.AcceleratorError: CUDA error: {error}\n"
        cpu_node.write(f"logs/{ATTEMPT}.{NODE}.log", log)
        _, status, _ = cpu_node.finish(nodes=1, code=1)
        follows[status["cause"]["kind"]] = (status["fruitless"], status["next"]["action"])
    assert follows == {"ecc": (0, "requeue"), "illegal_access": (1, "end")}


def finish_stopped(rig: NodeRig, code: int, order: str = "TERM") -> dict[str, Any]:
    """The verdict of a job that was told to stop, and whose launcher returned `code`."""
    return rig.finish(1, code, stop_signal=order)[1]


@pytest.mark.parametrize(("end", "order"), [("SIGTERM", "TERM"), (143, "USR1")])
def test_a_start_that_is_cancelled_is_no_crash(cpu_node: NodeRig, end: int | str, order: str) -> None:
    run(cpu_node, end, rank=0)
    status = finish_stopped(cpu_node, 143, order)
    assert (status["state"], status["cause"], status["exit_code"]) == ("stopped", None, 75)
    assert status["why"] == f"told to stop (SIG{order}) before any step was logged"


def test_a_start_that_is_cancelled_before_any_rank_is_no_crash(cpu_node: NodeRig) -> None:
    cpu_node.attempt_directory.mkdir(parents=True)
    assert finish_stopped(cpu_node, 1)["state"] == "stopped"


def test_a_crash_of_its_own_stays_one_though_it_was_told_to_stop(cpu_node: NodeRig) -> None:
    run(cpu_node, 3, rank=0)
    assert finish_stopped(cpu_node, 3)["state"] == "failed"


def test_who_is_cancelled_after_a_step_and_does_not_save_was_cancelled(cpu_node: NodeRig) -> None:
    run(cpu_node, "SIGTERM", rank=0)
    cpu_node.write_attempt("progress.json", {"step": 4})
    status = finish_stopped(cpu_node, 143)
    assert (status["state"], status["cause"]["kind"]) == ("failed", "cancelled")


def test_a_training_that_the_watchdog_ended_for_its_loss_says_so_and_stays_ended(cpu_node: NodeRig) -> None:
    run(cpu_node, "SIGKILL", rank=0)
    cpu_node.write("run.json", {"schema": 1, "on_bad_loss": {"action": "stop", "times": 2}})
    bad = {"kind": "not_finite", "since_step": 41, "good_step": 40, "loss": "nan", "ended": True}
    cpu_node.write_attempt("attempt.json", {"attempt": ATTEMPT, "from_step": 30, "started_at": 1.0})
    cpu_node.write_attempt("progress.json", {"step": 42, "good_step": 40, "bad_loss": bad})
    status = cpu_node.finish(1, 137)[1]
    assert (status["state"], status["cause"]["kind"], status["cause"]["source"]) == ("failed", "bad_loss", "watchdog")
    assert status["cause"]["numbers"] == {"since_step": 41, "good_step": 40}
    assert "the loss went bad: the loss was NaN since step 41; the watchdog ended the training" in status["why"]
    assert status["next"]["action"] == "end"


@pytest.mark.parametrize(("action", "why"), [("rollback", "no whole checkpoint"), ("stop", "on_bad_loss: stop")])
def test_a_bad_loss_that_a_second_gpu_confirms_is_a_bad_loss(cpu_node: NodeRig, action: str, why: str) -> None:
    run(cpu_node, 17, rank=0)
    cpu_node.write("run.json", {"schema": 1, "on_bad_loss": {"action": action, "times": 2}})
    cpu_node.write_attempt("attempt.json", {"attempt": ATTEMPT, "from_step": 30, "started_at": 1.0})
    verdict = "Rank 0, node n1, device 0, iteration #31: Correct result (but possible Application error) (found NaN)!"
    cpu_node.write(f"logs/{ATTEMPT}.{NODE}.log", f"{verdict}\n")
    write_cause(cpu_node.run_directory, ATTEMPT, NODE, 17, None)
    status = cpu_node.finish(1, 17)[1]
    assert status["cause"]["kind"] == "unexpected_result"
    assert "the loss was bad from step 31 on" in status["next"]["why"]
    assert why in status["next"]["why"]


def test_a_verdict_comes_whatever_the_cause_trips_over(cpu_node: NodeRig) -> None:
    run(cpu_node, 3, rank=0)
    record = cpu_node.attempt_directory / "ranks" / f"{NODE}.jsonl"
    record.write_text(record.read_text().replace('"ended_at": ', '"ended_at": "", "_": '))
    record.write_text(record.read_text() + '{"rank": 1, "node": [], "exit_code": 1}\n')
    code, status, _ = cpu_node.finish(nodes=1, code=3)
    assert (code, status["state"]) == (3, "failed")


# --- the last act -----------------------------------------------------------------------------------------------------


def summary(node_side: NodeRig) -> AttemptSummary:
    attempt = summary_of_json(json.loads((node_side.attempt_directory / "summary.json").read_text()))
    assert attempt is not None
    return attempt


def test_the_last_act_is_a_whole_summary(cpu_node: NodeRig) -> None:
    cpu_node.write("run.json", {"schema": 1, "peak_kind": "resident"})
    train_on_two_nodes(cpu_node)
    cpu_node.done(NODE, "node2")
    assert cpu_node.finish(nodes=2, code=0)[0] == 0
    attempt = summary(cpu_node)
    ranks = [(rank.rank, rank.node, rank.peak_source) for rank in attempt.ranks]
    assert ranks == [(0, NODE, "ru_maxrss"), (1, "node2", "ru_maxrss")]
    assert attempt.ranks[1].peak_bytes == cpu_node.record(1)["resident_peak_bytes"]
    assert still_whole(attempt, cpu_node.run_directory)


def test_a_summary_that_cannot_be_written_changes_nothing(cpu_node: NodeRig) -> None:
    train(cpu_node)
    (cpu_node.attempt_directory / "summary.json").mkdir()
    (cpu_node.attempt_directory / "summary.json" / "in the way").touch()
    code, status, stderr = cpu_node.finish(nodes=1, code=0)
    assert (code, status["state"]) == (0, "succeeded")
    assert "summary.json not written" in stderr
    assert [path.name for path in cpu_node.attempt_directory.glob(".summary*")] == []


def test_a_file_system_that_hangs_is_not_waited_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, scandir = threading.Event(), os.scandir
    monkeypatch.setattr("llmlaunch.rundir.summary.os.scandir", lambda folder: answers.wait() and scandir(folder))
    write_summary(tmp_path, "1.0", patience_seconds=0.1)
    assert "summary.json was not ready in 0.1 s" in capfd.readouterr().err
    answers.set()


def test_a_pipe_among_the_monitors_files_holds_nobody_up(cpu_node: NodeRig) -> None:
    run(cpu_node, 0, rank=0)
    (cpu_node.run_directory / "peaks").mkdir()
    os.mkfifo(cpu_node.run_directory / "peaks" / "node9.jsonl")
    cpu_node.done(NODE)
    assert cpu_node.finish(nodes=1, code=0)[0] == 0
    assert summary(cpu_node).damaged == {"peaks/node9.jsonl": 1}


def test_slow_nodes_for_which_the_trainers_saved_give_their_places_to_spare_ones(cpu_node: NodeRig) -> None:
    policy = {"by": "requeue", "within": "job", "times": 5, "fruitless": 2, "backoff_seconds": 60.0}
    cpu_node.write("run.json", {"schema": 1, "nodes": 2, "restart": {**policy, "slow_nodes": "replace"}})
    train_on_two_nodes(cpu_node)
    cpu_node.write_attempt("attempt.json", {"attempt": ATTEMPT, "nodes": [NODE, "node2"], "started_at": 1.0})
    cpu_node.write_attempt("progress.json", {"step": 40, "steps": 90, "replaced": ["node2"]})
    cpu_node.write_attempt(f"told/{NODE}", "USR1")
    cpu_node.done(NODE, "node2")
    code, status, stderr = cpu_node.finish(2, 0, pool=(NODE, "node2", "node3"))
    assert (code, status["state"], status["left_out"]) == (75, "stopped", ["node2"])
    assert "saved after step 40 of 90, so that spare nodes take the place of node2: too slow" in stderr
    assert status["next"]["action"] == "restart"
    assert sorted(status["next"]["nodes"]) == sorted([NODE, "node3"])
    assert status["next"]["why"] == "continues without the slow nodes"
