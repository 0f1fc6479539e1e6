"""Run directories become runs and measurements; what crashed, tore or moved on the way does not stop that."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.rundir.memory_files import summarize
from llmlaunch.store.collect import Outcome, collect, collect_running
from llmlaunch.store.database import Store
from llmlaunch.store.measurements import contents
from llmlaunch.store.runs import Run, list_runs, set_state
from support.store_run_dirs import ATTEMPT, GIB, RUN_ID, STARTED, RunDir, finished_cpu_run, gpu, tear_record


def records(store: Store) -> list[dict[str, Any]]:
    return [json.loads(content) for content in contents(store)]


def peaks(store: Store) -> dict[int, tuple[float, str]]:
    """GiB and source by global rank."""
    return {r["global_rank"]: (r["peak_bytes"] / GIB, r["peak_source"]) for r in records(store)}


def collected(store: Store, *paths: Path) -> Outcome:
    (outcome,) = collect(store, paths or None)
    return outcome


def only_run(store: Store) -> Run:
    (run,) = list_runs(store)
    return run


def everything(store: Store) -> list[Any]:
    with store.read() as connection:
        return [
            connection.exec_driver_sql(f"SELECT * FROM {table} ORDER BY 1").all()
            for table in ("recipes", "plans", "runs", "measurements")
        ]


# --- what is written --------------------------------------------------------------------------------------------------


def test_a_cpu_run_gives_one_record_per_rank(store: Store, tmp_path: Path) -> None:
    run = finished_cpu_run(tmp_path / "run")
    outcome = collected(store, run.path)
    assert (outcome.did, outcome.state, outcome.measurements, outcome.reason) == ("collected", "succeeded", 2, None)
    first = records(store)[0]
    assert first == {
        **run.run["measurement"],
        "id": f"{RUN_ID}/{ATTEMPT}/rank0/resident",
        "peak_kind": "resident",
        "peak_bytes": GIB,
        "pipeline_rank": 0,
        "rank_scope": "stage",
        "schema": 1,
        "run_id": RUN_ID,
        "attempt": ATTEMPT,
        "run_state": "succeeded",
        "started_at": STARTED,
        "node": "n0",
        "global_rank": 0,
        "gpu_uuid": None,
        "baseline_bytes": None,
        "peak_source": "ru_maxrss",
        "predicted_bytes": 10 * GIB,
        "observed": {
            "local_rank": 0,
            "pid": 1000,
            "resident_peak_bytes": GIB,
            "sources": {"peak_bytes": "ru_maxrss", "resident_peak_bytes": "ru_maxrss"},
        },
    }


def test_the_run_is_remembered_with_what_became_of_it(store: Store, tmp_path: Path) -> None:
    run = finished_cpu_run(tmp_path / "run")
    collect(store, [run.path])
    stored = only_run(store)
    assert (stored.run_id, stored.directory, stored.recipe, stored.recipe_digest) == (RUN_ID, run.path, "tiny", "d1")
    assert (stored.state, stored.exit_code, stored.attempt) == ("succeeded", 0, ATTEMPT)
    assert (stored.started_at, stored.ended_at) == (STARTED, STARTED + 101)
    assert (stored.peak_kind, stored.predicted_bytes, stored.measured_bytes) == ("resident", 10 * GIB, 2 * GIB)


def test_a_bare_sbatch_run_is_known_by_its_attempt(store: Store, tmp_path: Path) -> None:
    collect(store, [finished_cpu_run(tmp_path / "run").path])  # no submission.json
    assert (only_run(store).launcher, only_run(store).job_id) == ("slurm", "77")


def test_a_submitted_run_is_known_by_its_submission(store: Store, tmp_path: Path) -> None:
    run = finished_cpu_run(tmp_path / "run")
    run.write("submission.json", {"launcher": "local", "job_id": "12", "submitted_at": STARTED - 5, "cluster": "here"})
    collect(store, [run.path])
    stored = only_run(store)
    assert (stored.launcher, stored.job_id, stored.cluster, stored.submitted_at) == ("local", "12", "here", STARTED - 5)
    assert stored.state == "succeeded"


def test_the_larger_of_kernel_and_monitor_counts_for_a_resident_peak(store: Store, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.rank(0)
    run.rank(1, resident_peak_bytes=None, ended_at=None, exit_code=None)  # its end was never written
    processes = [{"rank": rank, "pid": 1000 + rank, "resident_peak_bytes": 3 * GIB} for rank in (0, 1)]
    run.line("n0", "beat", processes=processes)
    run.status("77.0", "failed", 137)
    collect(store, [run.path])
    assert peaks(store) == {0: (3.0, "monitor, resident"), 1: (3.0, "monitor, resident")}


def test_pipeline_ranks_are_the_outermost(store: Store, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run", nodes=2, devices=4, pipeline=4)
    run.ranks()
    run.status()
    collect(store, [run.path])
    stored = records(store)
    assert [r["pipeline_rank"] for r in stored] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [r["predicted_bytes"] // GIB for r in stored] == [10, 10, 11, 11, 12, 12, 13, 13]
    assert [r["node"] for r in stored] == ["n0"] * 4 + ["n1"] * 4


# --- GPUs and their ranks ---------------------------------------------------------------------------------------------


def gpu_run(path: Path, nodes: int = 1, **rank_changes: Any) -> RunDir:
    run = RunDir(path, kind="gpu", nodes=nodes)
    run.ranks(**rank_changes)
    run.status()
    return run


def test_process_lists_say_which_gpu_a_rank_used(store: Store, tmp_path: Path) -> None:
    run = gpu_run(tmp_path / "run", nodes=2)
    for node, (first, second) in (("n0", ("1001", "1000")), ("n1", ("1002", "1003"))):  # crossed over on n0
        run.line(
            node,
            gpus=[
                gpu(0, node, process_peak_bytes={first: 30 * GIB, "9": GIB}),
                gpu(1, node, process_peak_bytes={second: 40 * GIB, first: GIB}),  # and a stray context
            ],
        )
    collect(store, [run.path])
    stored = records(store)
    assert peaks(store) == {rank: (gib, "nvml process") for rank, gib in enumerate((40.0, 30.0, 30.0, 40.0))}
    assert [r["gpu_uuid"] for r in stored] == ["GPU-n0-1", "GPU-n0-0", "GPU-n1-0", "GPU-n1-1"]
    assert {r["baseline_bytes"] for r in stored} == {GIB}
    assert {r["peak_kind"] for r in stored} == {"device"}


def test_without_process_lists_a_whole_node_goes_by_pci_order(store: Store, tmp_path: Path) -> None:
    run = gpu_run(tmp_path / "run")
    run.line("n0", gpus=[gpu(1, peak_gib=30, baseline_gib=None), gpu(0, peak_gib=20)])
    collect(store, [run.path])
    assert peaks(store) == {0: (19.0, "nvml device - baseline"), 1: (29.5, "nvml device - reserved")}


def test_visible_devices_name_the_gpu_by_index_or_uuid(store: Store, tmp_path: Path) -> None:
    four = [gpu(index, peak_gib=10 * (index + 1)) for index in range(4)]
    run = gpu_run(tmp_path / "index", visible_devices="2,0")
    run.line("n0", gpus=four)
    collect(store, [run.path])
    assert {rank: peak for rank, (peak, _) in peaks(store).items()} == {0: 29.0, 1: 9.0}
    other = RunDir(tmp_path / "uuid", kind="gpu", run_id="other-1")
    other.ranks(visible_devices="GPU-n0-3,GPU-n0")  # the second could be any of four
    other.status()
    other.line("n0", gpus=four)
    collect(store, [other.path])
    assert [(r["global_rank"], r["gpu_uuid"]) for r in records(store) if r["run_id"] == "other-1"] == [(0, "GPU-n0-3")]


def test_on_a_shared_node_no_gpu_is_guessed(store: Store, tmp_path: Path) -> None:
    run = gpu_run(tmp_path / "run")
    run.line("n0", gpus=[gpu(index) for index in range(4)])
    outcome = collected(store, run.path)
    assert outcome.measurements == 0
    assert "named none of the processes" in str(outcome.reason)
    assert only_run(store).no_peak_reason == outcome.reason


def test_more_than_the_device_has_is_no_measurement(store: Store, tmp_path: Path) -> None:
    run = gpu_run(tmp_path / "run")
    run.line("n0", gpus=[gpu(0, process_peak_bytes={"1000": 17 * 2**40}), gpu(1, device_peak_bytes=17 * 2**40)])
    collect(store, [run.path])
    assert peaks(store) == {0: (19.0, "nvml device - baseline")}


# --- crashes and torn files -------------------------------------------------------------------------------------------


def test_a_monitor_that_began_again_does_not_lower_a_peak(store: Store, tmp_path: Path) -> None:
    run = gpu_run(tmp_path / "run")
    run.line("n0", "beat", gpus=[gpu(0, peak_gib=60), gpu(1, peak_gib=50)])
    run.line("n0", "start", gpus=[gpu(0, peak_gib=40, baseline_gib=40), gpu(1, peak_gib=40, baseline_gib=40)])
    run.line("n0", "gpu_lost", gpu=gpu(1, peak_gib=55, lost=True))
    collect(store, [run.path])
    assert peaks(store) == {0: (59.0, "nvml device - baseline"), 1: (54.0, "nvml device - baseline")}


def test_a_failed_run_is_collected_as_failed(store: Store, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.rank(0, exit_code=None, signal="SIGKILL")
    run.rank(1, exit_code=1)
    run.status(state="failed", exit_code=137, why="rank 0 on node n0 was ended by SIGKILL")
    assert collected(store, run.path).state == "failed"
    stored = only_run(store)
    assert (stored.state, stored.exit_code, stored.why) == ("failed", 137, "rank 0 on node n0 was ended by SIGKILL")
    assert {r["run_state"] for r in records(store)} == {"failed"}
    assert len(records(store)) == 2


def test_a_torn_rank_record_is_replaced_by_the_copy_in_status_json(store: Store, tmp_path: Path) -> None:
    run = finished_cpu_run(tmp_path / "run")
    tear_record(run.path / f"attempts/{ATTEMPT}/ranks/n0.jsonl", rank=1)
    outcome = collected(store, run.path)
    assert outcome.measurements == 2
    assert "ranks/n0.jsonl: 1 of its lines cannot be read" in str(outcome.reason)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ({"event": "no_nvml", "code": 9, "why": "Driver Not Loaded"}, "n0: NVML did not answer (Driver Not Loaded)"),
        ({"event": "gpu_skipped", "index": 0, "code": 4}, "n0: GPU 0 could not be opened (NVML code 4)"),
        ({"event": "end"}, "the monitors of attempt 77.0 saw no GPU"),
    ],
)
def test_a_run_without_a_peak_says_why(store: Store, tmp_path: Path, event: dict[str, Any], reason: str) -> None:
    run = gpu_run(tmp_path / "run")
    run.line("n0", **event)
    assert collected(store, run.path).reason == reason
    assert only_run(store).no_peak_reason == reason
    assert only_run(store).measured_bytes is None


def test_no_monitor_and_no_trainer_say_so(store: Store, tmp_path: Path) -> None:
    run = gpu_run(tmp_path / "run")
    assert collected(store, run.path).reason == f"the monitors of attempt {ATTEMPT} wrote nothing"
    nothing = RunDir(tmp_path / "nothing", run_id="n-1")
    nothing.write("status.json", {"schema": 1, "attempt": "5.0", "state": "failed", "exit_code": 1})
    assert collected(store, nothing.path).reason == "attempt 5.0 started no trainer and no monitor"


# --- again, later, elsewhere ------------------------------------------------------------------------------------------


def test_collecting_twice_changes_nothing(store: Store, tmp_path: Path) -> None:
    run = finished_cpu_run(tmp_path / "run")
    collect(store, [run.path])
    before = everything(store)
    assert collected(store, run.path).did == "unchanged"
    assert collected(store).did == "unchanged"
    (run.path / "status.json").touch()  # looked at again, found the same
    assert collected(store).did == "collected"
    after = everything(store)
    assert after[:2] == before[:2]
    assert after[3] == before[3]


def test_a_running_attempt_waits_unless_it_is_named(store: Store, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    running = {"ended_at": None, "exit_code": None, "resident_peak_bytes": None}
    run.ranks(**running)
    run.line("n0", "beat", processes=[{"rank": 0, "pid": 1000, "resident_peak_bytes": GIB}])
    named = collected(store, run.path)
    assert (named.did, named.state, named.measurements) == ("collected", "running", 1)
    assert "has not ended yet: these are its peaks so far" in str(named.reason)
    assert collected(store).did == "waiting"
    run.line("n0", "beat", processes=[{"rank": 0, "pid": 1000, "resident_peak_bytes": 2 * GIB}])
    assert collected(store).did == "waiting"
    assert peaks(store)[0][0] == 1.0
    collect(store, [run.path])
    assert peaks(store)[0][0] == 2.0
    run.ranks()
    run.line("n0", "end", processes=[{"rank": 0, "pid": 1000, "resident_peak_bytes": 4 * GIB}])
    run.status()
    assert collected(store).did == "collected"
    assert {rank: peak for rank, (peak, _) in peaks(store).items()} == {0: 4.0, 1: 2.0}
    assert only_run(store).state == "succeeded"


def test_the_first_steps_of_a_run_that_goes_on_are_collected_where_they_are_asked_for(
    store: Store, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    run.ranks(ended_at=None, exit_code=None, resident_peak_bytes=None)
    run.line("n0", "beat", processes=[{"rank": 0, "pid": 1000, "resident_peak_bytes": GIB}])
    run.write("attempts/77.0/progress.json", {"step": 20, "steps": 1000, "step_seconds": 3.5})
    collect(store, [run.path])
    run.write("attempts/77.0/progress.json", {"step": 40, "steps": 1000, "step_seconds": 3.25})
    assert collected(store).did == "waiting"
    assert [outcome.did for outcome in collect_running(store)] == ["collected"]
    [record] = [json.loads(content) for content in contents(store)]
    assert (record["step_seconds"], record["run_state"]) == (3.25, "running")


def test_an_attempt_that_was_requeued_is_over_when_the_next_begins(store: Store, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.ranks("77.0", exit_code=None, signal="SIGTERM")
    run.ranks("77.1", started_at=STARTED + 500, ended_at=None, exit_code=None)
    collect(store, [run.path])  # named: the running one too
    assert {(r["attempt"], r["run_state"]) for r in records(store)} == {("77.0", "failed"), ("77.1", "running")}
    run.ranks("77.1", started_at=STARTED + 500, resident_peak_bytes=7 * GIB)
    run.status("77.1", ended_at=STARTED + 900)
    collect(store)
    assert len(records(store)) == 4
    assert only_run(store).measured_bytes == 7 * GIB  # the newest attempt's
    assert only_run(store).attempt == "77.1"


def test_a_run_submitted_again_is_waiting_again(store: Store, tmp_path: Path) -> None:
    run = finished_cpu_run(tmp_path / "run")
    collect(store, [run.path])
    run.write("submission.json", {"launcher": "slurm", "job_id": "78", "submitted_at": STARTED + 1000})
    collect(store)
    assert (only_run(store).state, only_run(store).job_id, only_run(store).exit_code) == ("submitted", "78", None)
    assert len(records(store)) == 2


def test_a_launcher_may_say_that_a_silent_run_is_over(store: Store, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.ranks(ended_at=None, exit_code=None, resident_peak_bytes=None)
    run.line("n0", "beat", processes=[{"rank": 0, "pid": 1000, "resident_peak_bytes": GIB}])
    collect(store, [run.path])
    set_state(store, RUN_ID, "lost", "node n0 went down", ended_at=STARTED + 60)
    outcome = collected(store)
    assert (outcome.did, outcome.state) == ("collected", "lost")
    assert (only_run(store).state, only_run(store).why) == ("lost", "node n0 went down")
    assert collected(store).did == "unchanged"
    run.status()  # it was not lost after all
    assert collected(store).state == "succeeded"
    assert only_run(store).why is None


def test_what_begins_after_the_launchers_word_is_running_again(store: Store, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.ranks()
    collect(store, [run.path])
    set_state(store, RUN_ID, "cancelled", ended_at=STARTED + 60)
    assert collected(store).state == "cancelled"
    run.ranks("78.0", started_at=STARTED + 500, ended_at=None, exit_code=None)  # a bare sbatch
    outcome = collected(store)
    assert (outcome.did, outcome.state) == ("collected", "running")  # the attempt before
    assert "78.0 has not ended yet" in str(outcome.reason)
    run.status("78.0", "failed", 1)
    assert collected(store).state == "failed"
    run.ranks("79.0", started_at=STARTED + 900, ended_at=None, exit_code=None)
    assert collected(store).state == "running"


def test_a_job_that_was_cancelled_in_the_queue_never_started(store: Store, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    collect(store, [run.path])
    set_state(store, RUN_ID, "cancelled")
    assert collected(store).reason == "the job never started"
    assert only_run(store).state == "cancelled"


def test_a_moved_directory_is_the_same_run(store: Store, tmp_path: Path) -> None:
    run = finished_cpu_run(tmp_path / "run")
    collect(store, [run.path])
    before = contents(store)
    run.path.rename(tmp_path / "moved")
    gone = collected(store)
    assert (gone.did, gone.run_id) == ("unreadable", RUN_ID)
    assert collected(store, tmp_path / "moved").did == "collected"
    assert only_run(store).directory == tmp_path / "moved"
    assert contents(store) == before


def test_a_copy_beside_the_original_is_refused(store: Store, tmp_path: Path) -> None:
    run = finished_cpu_run(tmp_path / "run")
    collect(store, [run.path])
    shutil.copytree(run.path, tmp_path / "copy")
    outcome = collected(store, tmp_path / "copy")
    assert outcome.did == "unreadable"
    assert "is a copy of run" in str(outcome.reason)
    (tmp_path / "link").symlink_to(run.path)
    assert collected(store, tmp_path / "link").did == "unchanged"


def test_a_directory_that_holds_another_run_now_is_not_mistaken(store: Store, tmp_path: Path) -> None:
    run = finished_cpu_run(tmp_path / "run")
    collect(store, [run.path])
    (run.path / "run.id").write_text("another-1\n")
    outcome = collected(store)
    assert outcome.did == "unreadable"
    assert "now holds another-1" in str(outcome.reason)
    assert only_run(store).run_id == RUN_ID


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("run.json", b"{", "run.json: cannot be read"),
        ("run.json", b"[]", "run.json: cannot be read"),
        ("run.json", b'{"schema": 99}', "schema 99"),
        ("run.id", b"", "must hold the run's id"),
        ("run.id", b"\x1b[31mred\n", "must hold the run's id"),
        ("run.id", b"\xff\n", "must hold the run's id"),
        ("attempts/77.0/ranks/n0.jsonl", b'{"rank": null}', "cannot be read"),
    ],
)
def test_a_broken_directory_is_one_reason_and_stops_no_other(
    store: Store, tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    broken, good = finished_cpu_run(tmp_path / "broken", "broken-1"), finished_cpu_run(tmp_path / "good")
    (broken.path / name).write_bytes(content)
    first, second = collect(store, [broken.path, good.path])
    assert (first.did, second.did) == ("unreadable", "collected")
    assert reason in str(first.reason)
    assert len(records(store)) == 2


def test_a_directory_that_is_no_run_is_one_reason(store: Store, tmp_path: Path) -> None:
    assert "no run directory" in str(collected(store, tmp_path).reason)
    never = RunDir(tmp_path / "never")
    (never.path / "run.id").unlink()
    assert "never been submitted" in str(collected(store, never.path).reason)
    assert list_runs(store) == []


# --- the summary that the job's last act leaves -----------------------------------------------------------------------


def with_summary(run: RunDir) -> None:
    run.write(f"attempts/{ATTEMPT}/status.json", json.loads((run.path / "status.json").read_text()))
    run.write(f"attempts/{ATTEMPT}/summary.json", summarize(run.path, ATTEMPT).as_json())


def test_with_a_whole_summary_no_file_of_a_rank_or_node_is_opened(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [finished_cpu_run(tmp_path / name, name) for name in ("with-1", "without-1")]
    with_summary(runs[0])
    opened: list[Path] = []
    original = os.open

    def watched(file: Any, *arguments: Any, **more: Any) -> int:
        opened.append(Path(str(file)))
        return original(file, *arguments, **more)

    monkeypatch.setattr("os.open", watched)
    collect(store, [run.path for run in runs])
    monkeypatch.undo()
    read = [[path.relative_to(run.path) for path in opened if path.is_relative_to(run.path)] for run in runs]
    assert not [path for path in read[0] if path.parts[0] == "peaks" or "ranks" in path.parts]
    assert len([path for path in read[1] if path.parts[0] == "peaks" or "ranks" in path.parts]) > 2
    both = [{k: v for k, v in r.items() if k not in ("id", "run_id")} for r in records(store)]
    assert both[:2] == both[2:]


def test_a_summary_that_is_no_longer_whole_is_not_believed(store: Store, tmp_path: Path) -> None:
    run = finished_cpu_run(tmp_path / "run")
    with_summary(run)
    collect(store, [run.path])
    run.line("n0", "beat", processes=[{"rank": 0, "pid": 1000, "resident_peak_bytes": 7 * GIB}])  # delivered late
    assert collected(store).did == "collected"
    assert peaks(store)[0] == (7.0, "monitor, resident")


def test_a_summary_that_comes_after_the_verdict_is_collected_then(store: Store, tmp_path: Path) -> None:
    run = finished_cpu_run(tmp_path / "run")
    assert collected(store, run.path).did == "collected"
    assert collected(store).did == "unchanged"
    with_summary(run)
    assert collected(store).did == "collected"
    assert collected(store).did == "unchanged"
