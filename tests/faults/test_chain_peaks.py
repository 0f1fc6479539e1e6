"""A GPU job from recipe to store, over the real binding and a driver as slow as a real one: what is short, many, lost
or stuck is measured all the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

import pytest

from support.chain import Chain
from support.node_rig import GIB, until

pytestmark = pytest.mark.faults

Make = Callable[..., Chain]

SPIKE_SECONDS = 0.02
PROBED_TRAINER = Path(__file__).with_name("probed_trainer.py")


def spike(run: Chain, gib: float) -> None:
    """For 20 ms every GPU holds so much, and then again what it held; the driver's accounting has seen it."""
    at_rest = [gpu.used_gib for gpu in run.driver.gpus]
    run.driver.hold(gib)
    time.sleep(SPIKE_SECONDS)
    for gpu, used in zip(run.driver.gpus, at_rest, strict=True):
        gpu.used_gib = used
    run.driver.tell()


def a_spike_of_20_ms_between_samples_on_eight_gpus_is_in_the_accounting(make: Make, repeat: int) -> None:
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


def a_spike_of_20_ms_without_accounting_is_in_torchs_counters(make: Make, repeat: int) -> None:
    """All counters were reset after it, no sample saw it, and the ranks are killed before they end."""
    run = make()
    for gpu in run.driver.gpus:
        gpu.words = ""
    run.driver.tell()
    run.start(trainer=PROBED_TRAINER)
    until(lambda: run.peaks("reserved_peak_bytes") >= 63 * GIB, "what the ranks hold at first, written")
    run.driver.hold(35, {rank: record["program_pid"] for rank, record in run.ranks().items()})
    run.until_written(35)
    (run.place / "spike").touch()
    until(lambda: run.peaks("reserved_peak_bytes") >= 123 * GIB, "the spike, written")
    before = run.kill("trainer 0", "trainer 1")
    run.stop()
    records = run.judged(before)
    by_kind = {kind: [one for one in records if one["peak_kind"] == kind] for kind in ("device", "reserved")}
    seen = [record["observed"] for record in by_kind["device"]]
    assert [one["process_peak_bytes"] for one in seen] == [35 * GIB, 36 * GIB]
    assert [one["reserved_peak_bytes"] for one in seen] == [61 * GIB, 62 * GIB]
    assert [one["allocated_peak_bytes"] for one in seen] == [60 * GIB, 61 * GIB]
    assert [record["peak_bytes"] for record in by_kind["device"]] == [61 * GIB, 62 * GIB]
    assert [record["peak_bytes"] for record in by_kind["reserved"]] == [62 * GIB]


def mig_slices(make: Make, repeat: int) -> None:
    run = make(sliced=True).start().train(20)
    run.driver.hold(30)
    run.until_written(30)
    before = run.kill("monitor")
    run.stop()
    records = [record for record in run.judged(before) if record["peak_kind"] == "device"]
    assert [(one["gpu_uuid"], one["peak_bytes"]) for one in records] == [("MIG-0", 30 * GIB), ("MIG-1", 31 * GIB)]


def a_gpu_lost_in_mid_run(make: Make, repeat: int) -> None:
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


def a_driver_that_hangs_for_20_seconds(make: Make, repeat: int) -> None:
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


STORIES = (
    a_spike_of_20_ms_between_samples_on_eight_gpus_is_in_the_accounting,
    a_spike_of_20_ms_without_accounting_is_in_torchs_counters,
    mig_slices,
    a_gpu_lost_in_mid_run,
    a_driver_that_hangs_for_20_seconds,
)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_peaks(stories: Mapping[str, Future[None]], request: pytest.FixtureRequest, story: object) -> None:
    stories[request.node.nodeid].result()
