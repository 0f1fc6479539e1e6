"""The account of an attempt: which GPU is whose, which of several numbers counts, and what damaged files cost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from llmlaunch.launchers.base import JobState, Submission
from llmlaunch.launchers.run_status import RunStatus
from llmlaunch.rundir.memory_files import WHOLE_BYTES, MemoryWatch, attempt_summary, summarize
from llmlaunch.rundir.summary import AttemptSummary, RankSummary, still_whole, summary_of_json
from llmlaunch.store.read_directory import RunRead, read_directory
from llmlaunch.watch import gauges
from llmlaunch.watch.follow import EventReader
from llmlaunch.watch.run_reader import RunReader
from support.store_run_dirs import ATTEMPT, GIB, STARTED, RunDir, gpu, tear_record


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Two ranks on two GPUs of 80 GiB, of which the driver keeps half a GiB and something else another half."""
    run = RunDir(tmp_path / "run", kind="gpu")
    run.ranks()
    return run


def summary(run: RunDir, rank: int = 0) -> RankSummary:
    return next(entry for entry in summarize(run.path, ATTEMPT).ranks if entry.rank == rank)


def peak(run: RunDir, rank: int = 0) -> tuple[float | None, str | None]:
    """The rank's peak in GiB, and its source."""
    rank_summary = summary(run, rank)
    assert rank_summary.sources.get("peak_bytes") == rank_summary.peak_source
    return None if rank_summary.peak_bytes is None else rank_summary.peak_bytes / GIB, rank_summary.peak_source


# --- whose GPU --------------------------------------------------------------------------------------------------------


def test_torchs_own_uuid_goes_before_process_lists_and_order(run: RunDir) -> None:
    run.line("n0", gpus=[gpu(0, process_peak_bytes={"1000": 3 * GIB}, peak_gib=40), gpu(1, peak_gib=70)])
    run.probe(0, uuid="GPU-n0-1")
    rank = summary(run, 0)
    assert (rank.gpu_uuid, rank.sources["gpu_uuid"]) == ("GPU-n0-1", "torch")
    assert rank.device_peak_bytes == 70 * GIB


def test_a_slices_uuid_is_known_again_whatever_torch_calls_it(run: RunDir) -> None:
    whole = gpu(0, uuid="GPU-aaaa-1", mig=None, peak_gib=70)
    slices = [gpu(0, uuid=f"MIG-bbbb-{i}", mig="GPU-aaaa-1", peak_gib=10 + i) for i in (0, 1)]
    run.line("n0", gpus=[whole, *slices])
    run.probe(0, uuid="GPU-BBBB-1")  # torch says GPU- of anything, and in capitals here
    run.probe(1, uuid="MIG-bbbb-0")
    assert [summary(run, rank).gpu_uuid for rank in (0, 1)] == ["MIG-bbbb-1", "MIG-bbbb-0"]


def test_slices_are_counted_in_place_of_the_gpu_that_is_cut(run: RunDir) -> None:
    slices = [gpu(0, uuid=f"MIG-b-{i}", mig="GPU-a", peak_gib=10 + i) for i in (0, 1)]
    run.line("n0", gpus=[gpu(0, uuid="GPU-a", peak_gib=70), *slices])
    assert [(summary(run, rank).gpu_uuid, peak(run, rank)[0]) for rank in (0, 1)] == [
        ("MIG-b-0", 9.0),
        ("MIG-b-1", 10.0),
    ]


def test_the_pid_that_the_probe_knows_finds_a_child_of_the_ranks_program(run: RunDir) -> None:
    run.line("n0", gpus=[gpu(0), gpu(1, process_peak_bytes={"4242": 30 * GIB, "77": GIB}), gpu(2)])
    run.write(
        f"attempts/{ATTEMPT}/memory/0.4242.json",
        {"v": 1, "rank": 0, "node": "n0", "pid": 4242, "devices": [{"device": 0, "uuid": None}]},
    )
    assert (summary(run, 0).gpu_uuid, peak(run, 0)) == ("GPU-n0-1", (30.0, "nvml process"))


def test_without_a_monitor_the_probe_alone_tells(run: RunDir) -> None:
    run.probe(0)
    rank = summary(run, 0)
    assert (rank.gpu_uuid, rank.device_total_bytes, rank.device_peak_bytes) == ("GPU-n0-0", 79 * GIB, 62 * GIB)
    assert peak(run, 0) == (62.0, "torch probe, reserved + outside")
    assert rank.outside_torch_bytes == 2 * GIB


# --- which number counts ----------------------------------------------------------------------------------------------


# Gigabytes of rank 0's GPU: the whole device's peak, what process lists saw, what accounting saw; whether torch was
# probed, with 60 GiB reserved and 2 GiB beside it, of which half a GiB was there before.
@pytest.mark.parametrize(
    ("device", "process", "accounting", "probed", "expected"),
    [
        pytest.param(20, 30, 70, False, (70.0, "nvml accounting"), id="accounting sees spikes between two samples"),
        pytest.param(20, 30, 2, False, (30.0, "nvml process"), id="accounting counts unless it is less"),
        pytest.param(31, 30, None, True, (61.5, "torch probe, reserved + outside"), id="and so does torch"),
        pytest.param(62, None, 4, True, (61.5, "torch probe, reserved + outside"), id="another process of that pid"),
        pytest.param(45, 40, None, False, (44.0, "nvml device - baseline"), id="devices are sampled more often"),
    ],
)
def test_which_of_several_numbers_is_the_peak(
    run: RunDir, device: int, process: int | None, accounting: int | None, probed: bool, expected: tuple[float, str]
) -> None:
    used, accounted = ({"1000": gib * GIB} if gib else {} for gib in (process, accounting))
    run.line("n0", gpus=[gpu(0, peak_gib=device, process_peak_bytes=used, accounting_peak_bytes=accounted)])
    if probed:
        run.probe(0)
    assert peak(run) == expected


def test_true_accounting_is_not_outbid_by_a_sum_of_two_moments(run: RunDir) -> None:
    run.line("n0", gpus=[gpu(0, peak_gib=62, accounting_peak_bytes={"1000": 61 * GIB})])
    run.probe(0)
    assert peak(run) == (61.0, "nvml accounting")
    assert summary(run).outside_torch_bytes == GIB
    assert summary(run).sources["outside_torch_bytes"] == "nvml accounting - reserved"


def test_a_neighbour_on_the_device_keeps_it_from_counting_as_the_ranks(run: RunDir) -> None:
    run.line("n0", gpus=[gpu(0, peak_gib=75, process_peak_bytes={"1000": 40 * GIB, "9": 30 * GIB}), gpu(1)])
    run.probe(0, reserved_peak_bytes=39 * GIB, outside_bytes=32 * GIB)
    assert peak(run) == (40.0, "nvml process")
    assert (summary(run).outside_torch_bytes, summary(run).device_peak_bytes) == (GIB, 75 * GIB)


def test_two_ranks_on_one_gpu_share_no_remainder(run: RunDir) -> None:
    run.line("n0", gpus=[gpu(0, peak_gib=75), gpu(1)])
    for rank in (0, 1):
        run.probe(rank, uuid="GPU-n0-0", reserved_peak_bytes=(20 + rank) * GIB)
    assert [peak(run, rank) for rank in (0, 1)] == [(20.0, "torch probe, reserved"), (21.0, "torch probe, reserved")]
    assert summary(run).outside_torch_bytes is None
    assert summary(run).sources["outside_torch_bytes"].startswith("left out: ")


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        ({"alloc_retries": 3}, "the allocator gave memory back (3 retries)"),
        # its cache was emptied without a retry
        ({"reserved_bytes": 20 * GIB}, "the allocator held less at the end than at its peak"),
    ],
)
def test_what_the_allocator_gave_back_leaves_the_probes_own_look_and_without_it_no_remainder(
    run: RunDir, returned: dict[str, int], reason: str
) -> None:
    run.line("n0", gpus=[gpu(0, peak_gib=66, process_peak_bytes={"1000": 65 * GIB})])
    run.probe(0, outside_bytes=3 * GIB, **returned)
    assert (summary(run).peak_bytes, summary(run).outside_torch_bytes) == (65 * GIB, int(2.5 * GIB))
    assert summary(run).sources["outside_torch_bytes"] == "torch probe, device - reserved"
    run.probe(0, outside_bytes=None, **returned)
    assert summary(run).outside_torch_bytes is None
    assert summary(run).sources["outside_torch_bytes"] == f"left out: {reason}"


def test_an_old_drivers_reserve_is_what_it_has_more_than_cuda(run: RunDir) -> None:
    run.line("n0", gpus=[gpu(0, peak_gib=64, reserved_bytes=None, baseline_gib=1.25)])
    run.probe(0)  # CUDA sees 79 of 80 GiB: a quarter of a GiB was somebody's before
    assert summary(run).outside_torch_bytes == int((64 - 1.25 - 60) * GIB)
    run.probe(0, alloc_retries=1)
    assert summary(run).outside_torch_bytes == int(1.75 * GIB)


def test_log_lines_count_where_there_is_no_probe_and_where_they_say_more(run: RunDir) -> None:
    line = {"allocated_peak_bytes": 55 * GIB, "reserved_peak_bytes": 58 * GIB, "device_bytes": None}
    logged = [{"rank": rank, "source": "megatron log", **line} for rank in (0, 1)]
    run.line("n0", gpus=[gpu(0, peak_gib=40), gpu(1, peak_gib=62)], logged=logged)
    run.probe(0)
    first, second = summary(run, 0), summary(run, 1)
    assert (first.allocated_peak_bytes, first.sources["allocated_peak_bytes"]) == (55 * GIB, "megatron log")
    assert (first.reserved_peak_bytes, first.sources["reserved_peak_bytes"]) == (60 * GIB, "torch probe")
    assert (second.reserved_peak_bytes, second.sources["reserved_peak_bytes"]) == (58 * GIB, "megatron log")
    assert second.outside_torch_bytes is None  # the log does not say whether memory was given back
    assert peak(run, 1) == (61.0, "nvml device - baseline")


def test_use_is_of_the_line_with_most_samples_and_power_peaks_stay(run: RunDir) -> None:
    for samples, watts in ((100, 500.0), (900, 600.0), (20, 100.0)):
        use = {"utilization_percent": watts / 10, "power_watts": watts, "power_peak_watts": 2 * watts}
        run.line("n0", gpus=[gpu(0, samples=samples, **use), gpu(1)])
    rank = summary(run)
    assert (rank.utilization_percent, rank.power_watts, rank.power_peak_watts) == (60.0, 600.0, 1200.0)
    assert summary(run, 1).power_watts is None


def test_ranks_are_of_their_pipeline_rank_and_the_layout_that_ran(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run", kind="gpu", devices=4, pipeline=2)
    run.ranks()
    assert [rank.pipeline_rank for rank in summarize(run.path, ATTEMPT).ranks] == [0, 0, 1, 1]
    run.write("fallback/1/run.json", {**run.run, "pipeline": 4})
    run.write(f"attempts/{ATTEMPT}/attempt.json", {"attempt": ATTEMPT, "layout": "fallback/1"})
    assert [rank.pipeline_rank for rank in summarize(run.path, ATTEMPT).ranks] == [0, 1, 2, 3]


def test_steps_are_those_of_this_attempt(run: RunDir) -> None:
    run.write(f"attempts/{ATTEMPT}/attempt.json", {"attempt": ATTEMPT, "layout": "", "from_step": 40})
    run.write(f"attempts/{ATTEMPT}/progress.json", {"step": 41, "step_seconds": 2.5, "tokens_per_second": 100})
    attempt = summarize(run.path, ATTEMPT)
    assert (attempt.step, attempt.steps_run, attempt.step_seconds, attempt.tokens_per_second) == (41, 1, 2.5, 100.0)


def test_main_memory_is_the_nodes(run: RunDir) -> None:
    host = {"used_peak_bytes": 90 * GIB, "total_bytes": 500 * GIB, "cgroup_peak_bytes": 95 * GIB}
    run.line("n0", host=[], gpus=[gpu(0), gpu(1)])
    run.line("n0", host={**host, "cgroup_limit_bytes": None})
    run.line("n0", "beat", host={**host, "used_peak_bytes": 80 * GIB})
    (node,) = summarize(run.path, ATTEMPT).nodes
    assert (node.node, node.ended, node.gpus) == ("n0", True, 2)
    assert (node.host_peak_bytes, node.host_peak_source) == (90 * GIB, "MemTotal - MemAvailable")
    assert (node.host_total_bytes, node.cgroup_peak_bytes, node.cgroup_limit_bytes) == (500 * GIB, 95 * GIB, None)


@pytest.mark.parametrize(
    ("cgroup_gib", "gib", "source"),
    [(60, 60, "cgroup"), (None, 90, "MemTotal - MemAvailable"), (3, 90, "MemTotal - MemAvailable")],
)
def test_neighbours_are_not_counted_where_the_jobs_cgroup_tells_less(
    run: RunDir, cgroup_gib: int | None, gib: int, source: str
) -> None:
    ranks = [{"rank": rank, "resident_peak_bytes": 4 * GIB} for rank in (0, 1)]  # more than 3: not the job's cgroup
    charged = None if cgroup_gib is None else cgroup_gib * GIB
    run.line("n0", processes=ranks, host={"used_peak_bytes": 90 * GIB, "cgroup_peak_bytes": charged})
    (node,) = summarize(run.path, ATTEMPT).nodes
    assert (node.host_peak_bytes, node.host_peak_source) == (gib * GIB, source)


# --- damage -----------------------------------------------------------------------------------------------------------


def test_every_damaged_line_costs_itself_and_is_counted(run: RunDir) -> None:
    run.line("n0", "beat", gpus=[gpu(0, peak_gib=30), gpu(1)])
    path = run.path / "peaks" / "n0.jsonl"
    with path.open("ab") as file:
        file.write(b'\xff\xfe\n\n[]\n{"event": "beat"}\n')  # the empty line closed a torn one
        file.write(b'{"v":1,"event":"beat","attempt":"76.0","gp\n')  # of another attempt
    run.line("n0", "beat", gpus=[gpu(0, peak_gib=33), gpu(1)])
    with path.open("ab") as file:
        file.write(b'{"v":1,"event":"beat","attempt":"' + ATTEMPT.encode() + b'","gpus":[{"uuid":"GPU-n0-0","dev')
    attempt = summarize(run.path, ATTEMPT)
    assert attempt.damaged == {"peaks/n0.jsonl": 4}
    assert attempt.ranks[0].device_peak_bytes == 33 * GIB
    assert summarize(run.path, "76.0").damaged == {"peaks/n0.jsonl": 4}


def test_damaged_records_and_probe_files_are_counted_and_cost_no_other(run: RunDir) -> None:
    run.probe(0)
    run.probe(1)
    folder = run.path / "attempts" / ATTEMPT
    tear_record(folder / "memory" / "n0.jsonl", rank=1)
    tear_record(folder / "ranks" / "n0.jsonl", rank=1)
    attempt = summarize(run.path, ATTEMPT)
    assert attempt.damaged == {f"attempts/{ATTEMPT}/memory/n0.jsonl": 1, f"attempts/{ATTEMPT}/ranks/n0.jsonl": 1}
    assert [rank.rank for rank in attempt.ranks] == [0]


def test_a_torn_rank_record_has_a_copy_in_status_json(run: RunDir) -> None:
    run.status()
    tear_record(run.path / "attempts" / ATTEMPT / "ranks" / "n0.jsonl", rank=1)
    assert [rank.resident_peak_bytes for rank in summarize(run.path, ATTEMPT).ranks] == [GIB, 2 * GIB]


@pytest.mark.parametrize("content", [b"[[[[" * 50_000, b"null", b'{"schema": 1}', b"\x00" * 100])
def test_whatever_lies_there_it_is_read(run: RunDir, content: bytes) -> None:
    for name in ("run.json", f"attempts/{ATTEMPT}/progress.json", f"attempts/{ATTEMPT}/attempt.json", "peaks/n0.jsonl"):
        (run.path / name).parent.mkdir(parents=True, exist_ok=True)
        (run.path / name).write_bytes(content)
    assert [rank.rank for rank in summarize(run.path, ATTEMPT).ranks] == [0, 1]


def test_nothing_there_is_an_empty_account(tmp_path: Path) -> None:
    assert summarize(tmp_path / "nowhere", "1.0") == AttemptSummary("1.0")


# --- whoever saw a peak was lost before the end -----------------------------------------------------------------------


def at_least(run: RunDir) -> list[str] | None:
    return summary(run).at_least


def test_a_lost_monitors_peaks_are_lower_bounds_and_the_kernels_is_not(run: RunDir) -> None:
    run.line("n0", "beat", gpus=[gpu(0, peak_gib=50, process_peak_bytes={"1000": 40 * GIB}), gpu(1)])
    assert at_least(run) == ["device_peak_bytes", "process_peak_bytes", "peak_bytes"]
    run.line("n0", "end", gpus=[gpu(0), gpu(1)])
    assert at_least(run) is None


def test_a_driver_that_hung_to_the_end_has_left_lower_bounds(run: RunDir) -> None:
    run.line("n0", gpus=[gpu(0), gpu(1)], nvml_answered=False)
    assert "peak_bytes" in (at_least(run) or [])


@pytest.mark.parametrize("ended", [True, False])
def test_a_probe_that_ended_needs_no_monitor(run: RunDir, ended: bool) -> None:
    run.probe(0, ended=ended)
    assert ("peak_bytes" in (at_least(run) or []), "reserved_peak_bytes" in (at_least(run) or [])) == (
        not ended,
        not ended,
    )


# --- written, and read back -------------------------------------------------------------------------------------------


def written(run: RunDir) -> AttemptSummary:
    attempt = summarize(run.path, ATTEMPT)
    run.write(f"attempts/{ATTEMPT}/summary.json", attempt.as_json())
    return attempt


def test_a_summary_is_read_back_as_it_was(run: RunDir) -> None:
    run.line("n0", gpus=[gpu(0), gpu(1)], host={"used_peak_bytes": GIB})
    run.line("n0", "no_nvml", why="Driver Not Loaded")
    run.probe(0)
    attempt = written(run)
    assert summary_of_json(json.loads(json.dumps(attempt.as_json()))) == attempt
    assert attempt_summary(run.path, ATTEMPT) == attempt


def test_a_whole_summary_is_what_counts(run: RunDir) -> None:
    run.line("n0", gpus=[gpu(0), gpu(1)])
    attempt = written(run)
    path = run.path / "peaks" / "n0.jsonl"
    path.write_bytes(b"x" * path.stat().st_size)  # its size alone is looked at
    assert attempt_summary(run.path, ATTEMPT) == attempt


CHANGES: dict[str, Callable[[RunDir], object]] = {
    "a longer file": lambda run: run.line("n0", gpus=[gpu(0, peak_gib=77), gpu(1)]),
    "a probe's file": lambda run: run.probe(0),
    "a new node": lambda run: run.line("n1", gpus=[]),
    "a rank's end": lambda run: run.rank(0, signal="SIGKILL", exit_code=None),
    "a lost file": lambda run: (run.path / "peaks" / "n0.jsonl").unlink(),
    "an emptied file": lambda run: (run.path / "peaks" / "n0.jsonl").write_text(""),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_was_written_since_makes_it_stale(run: RunDir, change: Callable[[RunDir], object]) -> None:
    run.line("n0", gpus=[gpu(0), gpu(1)])
    attempt = written(run)
    assert still_whole(attempt, run.path)
    change(run)
    assert not still_whole(attempt, run.path)
    assert attempt_summary(run.path, ATTEMPT) == summarize(run.path, ATTEMPT)


def test_later_attempts_on_the_node_do_not(run: RunDir) -> None:
    run.line("n0", gpus=[gpu(0), gpu(1)])
    attempt = written(run)
    run.line("n0", gpus=[gpu(0, peak_gib=77), gpu(1)], attempt="77.1")
    assert still_whole(attempt, run.path)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"schema": 2}', b'{"schema": 1, "attempt": "other"}'])
def test_a_summary_that_is_none_is_made_again(run: RunDir, content: bytes) -> None:
    (run.path / "attempts" / ATTEMPT / "summary.json").write_bytes(content)
    assert attempt_summary(run.path, ATTEMPT) == summarize(run.path, ATTEMPT)


# --- files of long runs -----------------------------------------------------------------------------------------------


def beat(peak_gib: float, attempt: str = ATTEMPT, event: str = "beat") -> bytes:
    """A line as the monitor writes it."""
    cards = [gpu(0, peak_gib=peak_gib), gpu(1)]
    line = {"v": 1, "event": event, "attempt": attempt, "node": "n0", "time": STARTED, "gpus": cards}
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def test_of_a_long_file_nothing_is_lost_by_reading_only_what_tells(run: RunDir) -> None:
    first = [beat(10 + number / 200) for number in range(1000)]  # up to 14.995
    restarted = [beat(5, event="start"), *(beat(5 + number / 1000) for number in range(1000)), beat(6.5, event="end")]
    lines = [*first, b'{"torn\n', *restarted, *(beat(70, "78.0") for _ in range(50)), beat(6)]
    path = run.path / "peaks" / "n0.jsonl"
    path.write_bytes(b"".join(lines) + beat(7)[:-9])
    assert path.stat().st_size > WHOLE_BYTES
    attempt = summarize(run.path, ATTEMPT)
    assert attempt.ranks[0].device_peak_bytes == int(14.995 * GIB)
    assert attempt.damaged == {"peaks/n0.jsonl": 2}
    assert summarize(run.path, "78.0").nodes[0].gpus == 2


@pytest.mark.parametrize("at", [0, 500, 2000])
def test_the_last_beat_of_each_of_two_monitors_counts(run: RunDir, at: int) -> None:
    lines = [beat(10)] * 2000
    path = run.path / "peaks" / "n0.jsonl"
    path.write_bytes(b"".join([*lines[:at], beat(44), beat(3, event="start"), *lines[at:]]))
    assert path.stat().st_size > WHOLE_BYTES
    assert summarize(run.path, ATTEMPT).ranks[0].device_peak_bytes == 44 * GIB


# --- watched while it goes on -----------------------------------------------------------------------------------------


def test_who_follows_or_watches_a_run_sees_the_peak_that_collect_records(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of what the device held was somebody's before the training: the same on every screen, and in the store."""
    monkeypatch.setattr(gauges, "_MEMORY_SECONDS", 0.0)
    submission = Submission("slurm", "77", run.path, 0.0)
    run.write(f"attempts/{ATTEMPT}/attempt.json", {"attempt": ATTEMPT, "layout": "", "nodes": ["n0"]})
    run.line("n0", "start", gpus=[gpu(0, peak_gib=21, baseline_gib=20), gpu(1, peak_gib=21, baseline_gib=20)])
    log = run.path / "logs" / f"{ATTEMPT}.n0.log"
    log.touch()
    follow, watch = EventReader(submission), RunReader(submission)
    look = RunStatus(submission, JobState("running"), ATTEMPT, {}, {}, stopping=False)

    def shown() -> tuple[int | None, ...]:
        log.write_text(log.read_text() + "step 6/40 | loss 3 | 0.5 s/step | 19 tokens/s\n")
        fullest = [reader.read(look).fullest for reader in (follow, watch)]
        return tuple(None if gauge is None else gauge.peak_bytes for gauge in fullest)

    def recorded() -> int | None:
        read = read_directory(run.path, {}, named=True)
        assert isinstance(read, RunRead)
        return max(record["peak_bytes"] for record in read.records if record["peak_kind"] == "device")

    assert shown() == (recorded(), recorded()) == (GIB, GIB)
    run.line("n0", "beat", gpus=[gpu(0, peak_gib=62, baseline_gib=20), gpu(1, peak_gib=50, baseline_gib=20)])
    assert shown() == (recorded(), recorded()) == (42 * GIB, 42 * GIB)
    run.probe(0, reserved_peak_bytes=45 * GIB, outside_bytes=None)  # a spike between two samples
    assert shown() == (recorded(), recorded()) == (45 * GIB, 45 * GIB)
    run.line("n0", "end", gpus=[gpu(0, accounting_peak_bytes={"1000": 47 * GIB}), gpu(1, baseline_gib=20)])
    run.status()
    assert shown() == (recorded(), recorded()) == (47 * GIB, 47 * GIB)


def test_only_what_is_new_of_a_monitor_s_file_is_read_and_torn_lines_cost_nothing(tmp_path: Path) -> None:
    path = tmp_path / "peaks" / "n1.jsonl"

    def line(peak: int) -> str:
        gpu = {"uuid": "GPU-a", "index": 0, "pci": "1", "device_peak_bytes": peak, "used_bytes": peak}
        return json.dumps({"attempt": "1.0", "node": "n1", "time": 5.0, "gpus": [gpu]}) + "\n"

    path.parent.mkdir()
    path.write_text("x" * 600_000 + "\n" + line(1) + line(2)[:40])
    watch = MemoryWatch(tmp_path, "1.0")
    watch.refresh()
    assert watch.evidence.nodes["n1"].gpus["GPU-a"].device_peak_bytes == 1
    with path.open("a") as file:
        file.write(line(2)[40:] + "{torn\n[1]\n" + line(7))
    watch.refresh()
    assert watch.evidence.nodes["n1"].gpus["GPU-a"].device_peak_bytes == 7
    path.write_text(line(9))  # begun again, and shorter
    watch.refresh()
    assert watch.evidence.nodes["n1"].gpus["GPU-a"].device_peak_bytes == 9
    assert MemoryWatch(tmp_path, "2.0").refresh() == []
