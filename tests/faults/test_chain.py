"""A GPU job from recipe to store, over the real binding and a driver as slow as a real one. Whatever of it is killed in
its midst, and whatever is short, many, lost, full or stuck: every peak that was written is in the store, once, and one
that may have been higher says so."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random

import pytest

from support.chain import Chain
from support.node_rig import GIB, until
from support.side_by_side import by_name
from support.soak import in_soak

pytestmark = pytest.mark.faults

Make = Callable[..., Chain]

KILLED = {
    "monitor and trainer": ("monitor", "trainer 0"),
    "job": ("job",),
    "node": ("node",),
    **{name: (name,) for name in in_soak("trainer 1", "monitor")},
    **dict.fromkeys(in_soak("everything"), ("job", "node", "monitor", "trainer 0")),
}
RANDOM_RUNS = in_soak("0", "1")
MOST_GIB = 70.0
LONGEST_SECONDS = 3.0  # the ranks have begun by then, mostly
SPIKE_SECONDS = 0.02
PROBED_TRAINER = Path(__file__).with_name("probed_trainer.py")


def kills(*roles: str) -> Callable[[Make, int], None]:
    def story(make: Make, _: int) -> None:
        run = make().start().train(40)
        before = run.kill(*roles)
        run.stop()
        records = {record["global_rank"]: record for record in run.judged(before) if record["peak_kind"] == "device"}
        assert [records[rank]["peak_bytes"] for rank in (0, 1)] == [40 * GIB, 41 * GIB]
        assert all(record.get("peak_at_least", False) is ("monitor" in roles) for record in records.values())

    return story


def while_the_monitor_starts(role: str, make: Make, _: int) -> None:
    """It has a child that compiles for it, and cannot be told by the kernel yet that its parent has ended."""
    run = make().start()
    until(lambda: run.pid("monitor"), "a monitor")
    time.sleep(0.05)
    before = run.kill(role)
    run.stop()
    run.judged(before)


def any_process_at_any_moment(which: int, make: Make, repeat: int) -> None:
    """One, two or three of them; and now and then the run is collected in between."""
    chance = Random(repeat * len(RANDOM_RUNS) + which)
    run = make().start()
    faults, killed = [], []
    for _ in range(chance.randint(1, 3)):
        train_on(run, chance, chance.uniform(0, LONGEST_SECONDS))
        role = chance.choice(run.roles() or ["job"])
        faults.append(run.kill(role))
        killed.append(role)
        if chance.random() < 0.3:
            run.records()
    run.stop()
    print("killed", *killed)  # told where it fails
    run.judged(*faults)


def train_on(run: Chain, chance: Random, seconds: float) -> None:
    """The memory of every rank rises for so long, by steps of any size."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        now = run.driver.gpus[0].used_gib
        pids = {rank: record["program_pid"] for rank, record in run.ranks().items() if record["program_pid"]}
        run.driver.hold(min(MOST_GIB, now + chance.uniform(0, 5)), pids)
        time.sleep(chance.uniform(0, 0.3))


KILLS = {
    **{name: kills(*roles) for name, roles in KILLED.items()},
    **{f"{role} as the monitor starts": partial(while_the_monitor_starts, role) for role in in_soak("monitor", "node")},
    **{f"any {which}": partial(any_process_at_any_moment, int(which)) for which in RANDOM_RUNS},
}


def spike(run: Chain, gib: float) -> None:
    """For 20 ms every GPU holds so much, and then again what it held; the driver's accounting has seen it."""
    at_rest = [gpu.used_gib for gpu in run.driver.gpus]
    run.driver.hold(gib)
    time.sleep(SPIKE_SECONDS)
    for gpu, used in zip(run.driver.gpus, at_rest, strict=True):
        gpu.used_gib = used
    run.driver.tell()


def a_spike_of_20_ms_between_samples_on_eight_gpus_is_in_the_accounting(make: Make, _: int) -> None:
    run = make(devices=8, quick=False).start("monitor.interval_seconds=3")  # room for a spike on any machine
    until(lambda: len(run.ranks()) == 8, "eight ranks")
    run.driver.hold(30, {rank: record["program_pid"] for rank, record in run.ranks().items()})
    run.driver.until_sampled(2)
    time.sleep(0.3)  # one goes from GPU to GPU
    spike(run, 60)
    run.stop()
    records = [record for record in run.judged(run.on_disk()) if record["peak_kind"] == "device"]
    assert [record["peak_bytes"] for record in records] == [(60 + rank) * GIB for rank in range(8)]
    assert [record["gpu_uuid"] for record in records] == [f"GPU-{rank}" for rank in range(8)]
    assert {record["peak_source"] for record in records} == {"nvml accounting"}
    sampled_peaks = [gpu["device_peak_bytes"] for gpu in run.lines()[-1]["gpus"]]
    assert sampled_peaks == [(30 + rank) * GIB + GIB // 2 for rank in range(8)]  # it was between samples


def a_spike_of_20_ms_without_accounting_is_in_torchs_counters(make: Make, _: int) -> None:
    """All counters were reset after it, no sample saw it, and the rank is killed before it ends."""
    run = make(devices=1)
    for gpu in run.driver.gpus:
        gpu.words = ""
    run.driver.tell()
    run.start(trainer=PROBED_TRAINER)
    until(lambda: run.peaks("reserved_peak_bytes") >= 31 * GIB, "what the rank holds at first, written")
    run.driver.hold(35, {rank: record["program_pid"] for rank, record in run.ranks().items()})
    run.until_written(35)
    (run.place / "spike").touch()
    until(lambda: run.peaks("reserved_peak_bytes") >= 61 * GIB, "the spike, written")
    before = run.kill("trainer 0")
    run.stop()
    records = run.judged(before)
    peaks = {record["peak_kind"]: record["peak_bytes"] for record in records if record["peak_kind"] != "host"}
    (seen,) = (record["observed"] for record in records if record["peak_kind"] == "device")
    assert seen["process_peak_bytes"] == 35 * GIB
    assert (peaks["device"], seen["reserved_peak_bytes"], peaks["reserved"]) == (61 * GIB, 61 * GIB, 61 * GIB)
    assert seen["allocated_peak_bytes"] == 60 * GIB


def mig_slices(make: Make, _: int) -> None:
    run = make(sliced=True).start().train(20)
    run.driver.hold(30)
    run.until_written(30)
    before = run.kill("monitor")
    run.stop()
    records = [record for record in run.judged(before) if record["peak_kind"] == "device"]
    assert [(one["gpu_uuid"], one["peak_bytes"]) for one in records] == [("MIG-0", 30 * GIB), ("MIG-1", 31 * GIB)]


def a_gpu_lost_in_mid_run(make: Make, _: int) -> None:
    run = make().start().train(40)
    before = run.on_disk()
    run.driver.rules += "fail * gpu=1 code=15\n"
    run.driver.hold(50)
    until(lambda: any(line["event"] == "gpu_lost" for line in run.lines()), "the loss, written")
    until(lambda: run.peaks("process_peak_bytes") >= (50 + 41) * GIB, "the other GPU's next peak")
    run.stop()
    records = {record["global_rank"]: record for record in run.judged(before) if record["peak_kind"] == "device"}
    assert records[0]["peak_bytes"] == 50 * GIB
    assert records[1]["peak_bytes"] >= 41 * GIB


def a_driver_that_hangs_for_20_seconds(make: Make, _: int) -> None:
    """In every call, in mid-training; the job ends meanwhile, in order, and nobody waits for the driver."""
    run = make().start().train(40)
    before = run.on_disk()
    run.driver.rules += "slow * us=20000000\n"
    run.driver.hold(60)
    counted = len(run.lines())
    until(lambda: len(run.lines()) > counted, "a line in spite of the hang")
    run.stop()
    end = run.lines()[-1]
    assert (end["event"], end["nvml_answered"]) == ("end", False)
    records = {record["global_rank"]: record for record in run.judged(before) if record["peak_kind"] == "device"}
    assert records[0]["run_state"] == "succeeded"
    assert records[0]["peak_bytes"] == 40 * GIB


PEAKS = by_name(
    a_spike_of_20_ms_without_accounting_is_in_torchs_counters,
    *in_soak(
        a_spike_of_20_ms_between_samples_on_eight_gpus_is_in_the_accounting,
        mig_slices,
        a_gpu_lost_in_mid_run,
        a_driver_that_hangs_for_20_seconds,
    ),
)


@pytest.mark.parametrize("story", KILLS.values(), ids=KILLS)
def test_kill(stories: Mapping[str, Future[None]], request: pytest.FixtureRequest, story: object, repeat: int) -> None:
    stories[request.node.nodeid].result()


@pytest.mark.parametrize("story", PEAKS.values(), ids=PEAKS)
def test_peaks(stories: Mapping[str, Future[None]], request: pytest.FixtureRequest, story: object) -> None:
    stories[request.node.nodeid].result()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB, where the tests are run by root; else a folder."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.getuid() != 0:
        yield folder
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def full(disk: Path, run: Chain) -> Iterator[None]:
    """No room is left, also in the last block of the monitor's file; filling the disk takes root."""
    monitor, filler = run.pid("monitor"), disk / "filler"
    assert monitor
    (peaks,) = run.run.glob("peaks/*.jsonl")
    resource.prlimit(monitor, resource.RLIMIT_FSIZE, (peaks.stat().st_size, resource.RLIM_INFINITY))
    if os.getuid() == 0:
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
    yield
    filler.unlink(missing_ok=True)
    with suppress(ProcessLookupError):
        resource.prlimit(monitor, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.mark.parametrize("until_the_end", [True, *in_soak(False)], ids=str)
def test_the_disk_of_the_run_is_full(chain: Make, small_disk: Path, until_the_end: bool) -> None:
    run = chain(folder=small_disk).start().train(40)
    before = run.on_disk()
    with full(small_disk, run):
        run.driver.hold(60)
        run.driver.until_sampled(3)
        if until_the_end:
            run.stop()
    if not until_the_end:
        run.until_written(60)
        run.stop()
    records = {record["global_rank"]: record for record in run.judged(before) if record["peak_kind"] == "device"}
    peak = (records[0]["peak_bytes"], records[0].get("peak_at_least", False))
    assert peak == ((40 * GIB, True) if until_the_end else (60 * GIB, False))
