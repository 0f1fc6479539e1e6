"""Runs that died of want of memory or of a node: records, causes in words, nodes at fault."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from llmlaunch.store.collect import collect
from llmlaunch.store.database import Store
from llmlaunch.store.measurements import contents
from llmlaunch.store.runs import list_runs, set_state
from llmlaunch.store.sick_nodes import DAY_SECONDS, forgive, sick_nodes_of, suspects_of
from support.store_run_dirs import GIB, STARTED, RunDir, fallback_chain, gpu

LINE = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
NUMBERS = {"asked_bytes": 2 * GIB, "total_bytes": 80 * GIB}
NEXT_DAY = STARTED + DAY_SECONDS


def records(store: Store, kind: str | None = None) -> list[dict[str, Any]]:
    listed = [json.loads(content) for content in contents(store)]
    return [record for record in listed if kind in (None, record["peak_kind"])]


def cause(kind: str, node: str = "n0", **more: Any) -> dict[str, Any]:
    fields = {"schema": 1, "kind": kind, "node": node, "rank": None, "line": LINE, "numbers": NUMBERS, "sick": False}
    return fields | {"consequence": False, "at": STARTED + 90} | more


def failed_run(path: Path, kind: str = "gpu", run_id: str = "a-1", **more: Any) -> RunDir:
    """Two nodes of two ranks each on two pipeline stages, all of which failed."""
    run = RunDir(path, kind=kind, nodes=2, pipeline=2, run_id=run_id)
    run.write("attempts/77.0/attempt.json", {"schema": 1, "nodes": ["n0", "n1"], "cluster": "blue"})
    run.ranks(exit_code=1)
    run.status(state="failed", exit_code=1, **more)
    return run


def test_every_rank_that_ran_out_is_a_record_with_its_layouts_prediction(store: Store, tmp_path: Path) -> None:
    run = failed_run(tmp_path / "run")
    ranks = [{"rank": rank, "line": f"{LINE} {rank}", "numbers": NUMBERS} for rank in (2, 3)]
    run.write("attempts/77.0/causes/n1.json", cause("oom", "n1", rank=2, ranks=ranks))
    run.line("n1", gpus=[gpu(i, "n1", 79, process_peak_bytes={str(1002 + i): 70 * GIB}) for i in range(2)])
    for _ in range(2):  # twice is once
        collect(store, [run.path])
        deaths = records(store, "oom")
        assert [(r["id"], r["global_rank"], r["pipeline_rank"]) for r in deaths] == [
            ("a-1/77.0/rank2/oom", 2, 1),
            ("a-1/77.0/rank3/oom", 3, 1),
        ]
    (first, _) = deaths
    assert first["peak_bytes"] is None
    assert first["predicted_bytes"] == 11 * GIB
    assert (first["numbers"], first["line"], first["node"]) == (NUMBERS, f"{LINE} 2", "n1")
    assert (first["gpu_uuid"], first["run_state"], first["model"]["num_layers"]) == ("GPU-n1-0", "failed", 2)


def test_it_is_the_layout_that_ran_which_ran_out(store: Store, tmp_path: Path) -> None:
    run = fallback_chain(tmp_path / "run")
    run.write("attempts/77.0/causes/n0.json", cause("oom", rank=1))
    collect(store, [run.path])
    (record,) = records(store, "oom")
    assert (record["attempt"], record["pipeline_rank"], record["predicted_bytes"]) == ("77.0", 1, 11 * GIB)
    assert list_runs(store)[0].cause is None  # the fallback trained to the end


def test_a_rank_nobody_knows_is_recorded_by_its_node(store: Store, tmp_path: Path) -> None:
    run = failed_run(tmp_path / "run")
    run.write("attempts/77.0/causes/n1.json", cause("oom", "n1"))
    collect(store, [run.path])
    (record,) = records(store, "oom")
    assert (record["id"], record["global_rank"], record["pipeline_rank"]) == ("a-1/77.0/n1/oom", None, None)
    assert record["rank_scope"] == "unknown"


def test_main_memory_is_recorded_by_node_and_is_no_gpu_measurement(store: Store, tmp_path: Path) -> None:
    run = failed_run(tmp_path / "run")
    run.write("attempts/77.0/causes/n0.json", cause("host_oom", rank=1, numbers={"oom_kills": 1}))
    collect(store, [run.path])
    (record,) = records(store, "host_oom")
    assert (record["id"], record["peak_bytes"], record["numbers"]) == ("a-1/77.0/n0/host_oom", None, {"oom_kills": 1})
    assert records(store, "oom") == []


def test_a_job_that_could_not_speak_is_judged_by_its_log(store: Store, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run", kind="gpu")
    run.ranks(exit_code=1)
    (run.path / "logs" / "77.0.n0.log").write_text(f"[rank1]: Traceback (most recent call last):\n[rank1]: {LINE}\n")
    collect(store, [run.path])
    set_state(store, list_runs(store)[0].run_id, "failed")
    collect(store)
    (listed,) = list_runs(store)
    assert (listed.cause, listed.why) == ("oom", f"out of GPU memory (rank 1 on n0): {LINE}")
    assert [record["global_rank"] for record in records(store, "oom")] == [1]


def test_the_verdicts_cause_is_shown(store: Store, tmp_path: Path) -> None:
    run = failed_run(tmp_path / "run", cause=cause("hung"), why="no progress")
    (run.path / "attempts/77.0/status.json").write_text((run.path / "status.json").read_text())
    collect(store, [run.path])
    (listed,) = list_runs(store)
    assert (listed.cause, listed.why) == ("hung", "no progress")


def test_a_lost_node_whose_job_could_not_speak(store: Store, tmp_path: Path) -> None:
    """The batch host itself: no status.json, no words in slurm-77.out, only the scheduler's."""
    run = RunDir(tmp_path / "run", nodes=2)
    run.write("attempts/77.0/attempt.json", {"schema": 1, "nodes": ["n0", "n1"], "cluster": "blue"})
    for rank in range(4):
        dead = {"ended_at": None, "exit_code": None} if rank < 2 else {"exit_code": None, "signal": "SIGTERM"}
        run.rank(rank, **dead)
    collect(store, [run.path])
    set_state(store, list_runs(store)[0].run_id, "failed", "NODE_FAIL")
    for _ in range(2):
        collect(store, [run.path])
        (listed,) = list_runs(store)
        assert (listed.cause, listed.why) == ("node_fail", "the node failed (n0): SLURM says NODE_FAIL")
        (node,) = sick_nodes_of(store, 0.0)
        assert (node.cluster, node.node, node.kind, node.run_id) == ("blue", "n0", "node_fail", listed.run_id)


def test_a_sick_node_is_left_out_for_a_week_and_longer_each_time(store: Store, tmp_path: Path) -> None:
    for number, days in ((1, 7), (2, 14), (3, 28), (4, 56), (5, 60)):
        run = failed_run(tmp_path / str(number), run_id=f"a-{number}")
        at = STARTED + number
        run.write("attempts/77.0/causes/n1.json", cause("ecc", "n1", sick=True, at=at, line="uncorrectable ECC error"))
        for _ in range(2):
            collect(store, [run.path])
        (node,) = sick_nodes_of(store, NEXT_DAY)
        assert (node.until - node.since) / DAY_SECONDS == days
        assert (node.since, node.failures, node.run_id) == (at, number, f"a-{number}")
    assert sick_nodes_of(store, STARTED + 61 * DAY_SECONDS) == []


def hang_on(path: Path, run_id: str, day: int, **more: Any) -> RunDir:
    """A run that hung for want of a rank of n1, `day` days after the first."""
    run = failed_run(path, run_id=run_id)
    hung = cause("hung", "n1", at=STARTED + day * DAY_SECONDS, suspects={"n1": ["flight_recorder"]}, **more)
    run.write("attempts/77.0/status.json", {"attempt": "77.0", "state": "failed", "exit_code": 1, "cause": hung})
    return run


def test_a_node_that_others_waited_for_is_suspected_and_left_out_the_second_time(store: Store, tmp_path: Path) -> None:
    collect(store, [hang_on(tmp_path / "1", "a-1", day=0).path])
    assert sick_nodes_of(store, NEXT_DAY) == []
    (suspect,) = suspects_of(store, NEXT_DAY)
    assert (suspect.node, suspect.kind, (suspect.until - suspect.since) / DAY_SECONDS) == ("n1", "hung", 14)
    assert suspects_of(store, STARTED + 15 * DAY_SECONDS) == []
    collect(store, [hang_on(tmp_path / "2", "a-2", day=3).path])
    (node,) = sick_nodes_of(store, STARTED + 4 * DAY_SECONDS)
    assert (node.node, node.failures, (node.until - node.since) / DAY_SECONDS) == ("n1", 1, 7)
    assert suspects_of(store, STARTED + 4 * DAY_SECONDS) == []
    assert forgive(store, "n1", NEXT_DAY) == 2
    assert suspects_of(store, STARTED + 4 * DAY_SECONDS) == []


def test_a_sign_that_is_older_than_two_weeks_no_longer_counts(store: Store, tmp_path: Path) -> None:
    collect(store, [hang_on(tmp_path / "1", "a-1", day=0).path, hang_on(tmp_path / "2", "a-2", day=20).path])
    assert sick_nodes_of(store, STARTED + 21 * DAY_SECONDS) == []
    assert [node.node for node in suspects_of(store, STARTED + 21 * DAY_SECONDS)] == ["n1"]


def test_two_kinds_of_sign_in_one_attempt_are_enough(store: Store, tmp_path: Path) -> None:
    run = hang_on(tmp_path / "run", "a-1", day=0)
    run.write("attempts/77.0/causes/n1.json", cause("file_system", "n1", sick=True, line="Stale file handle"))
    collect(store, [run.path])
    assert [node.node for node in sick_nodes_of(store, NEXT_DAY)] == ["n1"]


def test_crashes_of_one_run_are_one_sign(store: Store, tmp_path: Path) -> None:
    run = failed_run(tmp_path / "run")
    crash = cause("crash", "n1", suspects={"n1": ["crash"]})
    for number in range(3):
        run.write(f"attempts/77.{number}/status.json", {"attempt": f"77.{number}", "state": "failed", "cause": crash})
    collect(store, [run.path])
    assert sick_nodes_of(store, NEXT_DAY) == []
    assert [node.node for node in suspects_of(store, NEXT_DAY)] == ["n1"]


def test_nodes_of_another_cluster_are_its_own(store: Store, tmp_path: Path) -> None:
    run = failed_run(tmp_path / "run")
    run.write("attempts/77.0/causes/n1.json", cause("xid", "n1", sick=True))
    collect(store, [run.path])
    assert [node.node for node in sick_nodes_of(store, NEXT_DAY, ["blue", ""])] == ["n1"]
    assert sick_nodes_of(store, NEXT_DAY, ["red"]) == []


def test_forgiven_is_forgiven_until_it_fails_again(store: Store, tmp_path: Path) -> None:
    run = failed_run(tmp_path / "run")
    run.write("attempts/77.0/causes/n1.json", cause("gpu_lost", "n1", sick=True))
    collect(store, [run.path])
    assert forgive(store, "n9", NEXT_DAY) == 0
    assert forgive(store, "n1", NEXT_DAY, "red") == 0
    assert forgive(store, "n1", NEXT_DAY) == 1
    (run.path / "status.json").touch()
    collect(store, [run.path])
    assert sick_nodes_of(store, NEXT_DAY) == []
    again = failed_run(tmp_path / "again", run_id="a-2")
    again.write("attempts/77.0/causes/n1.json", cause("gpu_lost", "n1", sick=True))
    collect(store, [again.path])
    (node,) = sick_nodes_of(store, NEXT_DAY)
    assert (node.failures, (node.until - node.since) / DAY_SECONDS) == (1, 7)


def test_a_run_that_succeeded_accuses_nobody(store: Store, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.ranks()
    run.status()
    run.write("attempts/77.0/causes/n0.json", cause("ecc", sick=True))
    collect(store, [run.path])
    assert sick_nodes_of(store, 0.0) == []
    assert list_runs(store)[0].cause is None


def test_a_node_the_preflight_found_unfit_is_sick_though_the_run_went_on_without_it(
    store: Store, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    run.ranks()
    run.status()
    run.write("attempts/77.0/causes/n7.json", cause("preflight", "n7", sick=True, line="3 of 4 devices"))
    collect(store, [run.path])
    (node,) = sick_nodes_of(store, 0.0)
    assert (node.node, node.reason) == ("n7", "3 of 4 devices")
    assert list_runs(store)[0].cause is None


def test_each_attempt_is_compared_with_the_layout_it_ran(store: Store, tmp_path: Path) -> None:
    collect(store, [fallback_chain(tmp_path / "run").path])
    predicted = [
        (r["attempt"], r["pipeline_rank"], r["predicted_bytes"] // GIB, r["run_state"], r.get("micro_batch_size"))
        for r in records(store)
    ]
    assert predicted == [
        ("77.0", 0, 10, "failed", None),
        ("77.0", 1, 11, "failed", None),
        ("77.1", 0, 8, "succeeded", 1),
        ("77.1", 0, 8, "succeeded", 1),
    ]
    (run,) = list_runs(store)  # shown with what its last layout needed
    assert (run.state, run.attempt, run.predicted_bytes, run.measured_bytes) == ("succeeded", "77.1", 8 * GIB, 9 * GIB)


def test_a_layout_that_cannot_be_read_lends_nobody_its_prediction(store: Store, tmp_path: Path) -> None:
    run = fallback_chain(tmp_path / "run")
    (run.path / "fallback" / "1" / "run.json").write_text("{")
    (outcome,) = collect(store, [run.path])
    assert [r["attempt"] for r in records(store)] == ["77.0", "77.0"]
    assert "attempt 77.1 ran another layout, whose run.json cannot be read" in str(outcome.reason)


def test_a_layout_out_of_the_run_directory_is_not_followed(store: Store, tmp_path: Path) -> None:
    run = fallback_chain(tmp_path / "run")
    run.write("attempts/77.1/attempt.json", {"layout": "../other"})
    (outcome,) = collect(store, [run.path])
    assert "which is no fallback/NUMBER" in str(outcome.reason)
    assert [r["attempt"] for r in records(store)] == ["77.0", "77.0"]


def test_between_two_layouts_the_run_goes_on(store: Store, tmp_path: Path) -> None:
    run = fallback_chain(tmp_path / "run")
    verdict = (run.path / "attempts" / "77.0" / "status.json").read_text()
    (run.path / "status.json").write_text(verdict)
    shutil.rmtree(run.path / "attempts" / "77.1")
    (outcome,) = collect(store, [run.path])
    assert outcome.state == "running"
    set_state(store, str(outcome.run_id), "cancelled")
    (outcome,) = collect(store, [run.path])
    assert outcome.state == "cancelled"
