"""Slices of GPUs, load and power, main memory and the memory lines of logs: what the monitor's lines carry besides."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmlaunch.node.gpu import Power
from llmlaunch.node.host_memory import HostMemory
from support.node_rig import ATTEMPT, GIB, NODE, NodeRig, until

MIG = "gpu uuid=GPU-a mig=1\nslice 0 uuid=MIG-a total=10G\nslice 0 uuid=MIG-b total=20G\ngpu uuid=GPU-b\n"


def test_a_gpu_in_mig_mode_is_measured_by_slice(gpu_node: NodeRig) -> None:
    mine = os.getpid()
    gpu_node.scenario(f"{MIG}proc 100 pid={mine} mem=2G\n")
    monitor = gpu_node.monitor()
    gpu_node.until_used(2)
    gpu_node.scenario(f"{MIG}proc 100 pid={mine} mem=9G\nproc 101 pid={mine} mem=1G\n")
    gpu_node.until_used(9)
    first, second, whole = gpu_node.stop(monitor)["gpus"]
    assert [gpu["uuid"] for gpu in (first, second, whole)] == ["MIG-a", "MIG-b", "GPU-b"]
    assert [gpu["mig"] for gpu in (first, second, whole)] == ["GPU-a", "GPU-a", None]
    assert [gpu["index"] for gpu in (first, second, whole)] == [0, 0, 1]
    assert [gpu["total_bytes"] for gpu in (first, second)] == [10 * GIB, 20 * GIB]
    assert (first["device_peak_bytes"], first["process_peak_bytes"]) == (9 * GIB, {str(mine): 9 * GIB})
    assert second["process_peak_bytes"] == {str(mine): GIB}
    assert first["pci"] == second["pci"] != whole["pci"]
    assert first["unavailable"] == {}
    assert (first["utilization_percent"], first["power_watts"]) == (None, None)
    calls = gpu_node.calls()
    assert calls["nvmlDeviceGetUtilizationRates"] == calls["nvmlDeviceGetMemoryInfo_v2"] / 3


@pytest.mark.parametrize(("refused", "code"), [("", 6), ("fail nvmlDeviceGetMigDeviceHandleByIndex code=4\n", 4)])
def test_a_gpu_whose_slices_are_not_ours_is_skipped(gpu_node: NodeRig, refused: str, code: int) -> None:
    gpu_node.scenario(f"gpu mig=1\n{'slice 0' if refused else ''}\ngpu uuid=GPU-b\n{refused}")
    monitor = gpu_node.monitor()
    start = gpu_node.until_event("start")
    gpu_node.stop(monitor)
    skipped = gpu_node.lines()[0]
    assert (skipped["event"], skipped["index"], skipped["code"]) == ("gpu_skipped", 0, code)
    assert [gpu["uuid"] for gpu in start["gpus"]] == ["GPU-b"]


def test_utilization_is_the_mean_of_the_samples(gpu_node: NodeRig) -> None:
    gpu_node.scenario("gpu util=80 used=1G\n")
    monitor = gpu_node.monitor()
    gpu_node.until_sampled("gpu util=80 used=1G\n")
    (gpu,) = gpu_node.stop(monitor)["gpus"]
    assert gpu["utilization_percent"] == 80
    calls = gpu_node.calls()
    assert calls["nvmlDeviceGetUtilizationRates"] == calls["nvmlDeviceGetMemoryInfo_v2"]


def test_mean_power_is_by_the_energy_counter_and_the_peak_is_a_sample(gpu_node: NodeRig) -> None:
    gpu_node.scenario("gpu power=500 drawn=300\n")
    monitor = gpu_node.monitor()
    line = gpu_node.until_line("a second of energy", lambda line: _power(line, "power_source") == "nvml energy counter")
    gpu_node.stop(monitor)
    (gpu,) = line["gpus"]
    assert 30 < gpu["power_watts"] < 3000  # 300, but for what a busy machine puts between counter and clock
    assert gpu["power_peak_watts"] == 500


def test_mean_power_is_of_the_samples_where_nothing_counts_energy(gpu_node: NodeRig) -> None:
    gpu_node.scenario("gpu power=500 drawn=none\n")
    monitor = gpu_node.monitor()
    gpu_node.until_event("start")
    (gpu,) = gpu_node.stop(monitor)["gpus"]
    assert (gpu["power_watts"], gpu["power_source"]) == (500, "nvml power samples")
    assert gpu["unavailable"] == {"energy": 3}


def test_power_over_a_counter_that_began_anew() -> None:
    power = Power()
    for joules, at in ((1000.0, 0.0), (3000.0, 10.0), (50.0, 20.0), (2050.0, 30.0)):
        power.add_joules(joules, at)
    assert power.mean == 200  # 4000 joules in the 20 seconds of which both ends are known


def test_the_nodes_main_memory_is_sampled(gpu_node: NodeRig) -> None:
    gpu_node.scenario("gpu\n")
    monitor = gpu_node.monitor()
    gpu_node.until_event("start")
    host = gpu_node.stop(monitor)["host"]
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert host["total_bytes"] == total
    assert 0 < host["used_peak_bytes"] < total
    assert set(host) == {"used_peak_bytes", "total_bytes", "cgroup_peak_bytes", "cgroup_limit_bytes"}


def test_the_most_of_main_memory_is_kept(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    host = HostMemory(str(meminfo))
    host.sample()
    assert host.record()["used_peak_bytes"] is None  # no such file
    for available in (700, 200, 900):
        meminfo.write_text(f"MemTotal:        1000 kB\nMemFree:    5 kB\nMemAvailable:    {available} kB\n")
        host.sample()
    assert (host.record()["used_peak_bytes"], host.record()["total_bytes"]) == (800 * 1024, 1000 * 1024)


def test_a_cgroup_without_a_maximum_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Linux before 5.19 has them; the limit may go with the job's step."""
    counters = {"peak_bytes": None, "limit_bytes": 900}
    now = iter([100, 700, None, 300])
    monkeypatch.setattr("llmlaunch.node.host_memory.memory_counters", lambda: counters)
    monkeypatch.setattr("llmlaunch.node.host_memory.memory_now_bytes", lambda: next(now))
    memory = HostMemory()
    for _ in range(4):
        memory.sample_cgroup()
    assert (memory.record()["cgroup_peak_bytes"], memory.record()["cgroup_limit_bytes"]) == (700, 900)
    counters["peak_bytes"] = 800
    memory.sample_cgroup()
    assert memory.record()["cgroup_peak_bytes"] == 800


def test_memory_lines_of_the_nodes_own_log(cpu_node: NodeRig) -> None:
    log = cpu_node.run_directory / "logs" / f"{ATTEMPT}.{NODE}.log"
    log.parent.mkdir(parents=True)
    monitor = cpu_node.monitor("--list-interval", "0.05")
    cpu_node.until_event("start")
    with log.open("a") as file:
        file.write(
            "[Rank 3] (after 2 iterations) memory (MB) | allocated: 1.00 | max allocated: 2.00 | reserved: 3.00 "
        )
        file.flush()
        before = len(cpu_node.lines())
        until(lambda: len(cpu_node.lines()) > before + 3, "looks at half a line")
        file.write("| max reserved: 4.00\n")
    wanted = {
        "rank": 3,
        "allocated_peak_bytes": 2 * 2**20,
        "reserved_peak_bytes": 4 * 2**20,
        "device_bytes": None,
        "source": "megatron log",
    }
    cpu_node.until_line("the line", lambda line: line.get("logged") == [wanted])
    assert cpu_node.stop(monitor)["logged"] == [wanted]


def _power(line: dict[str, object], name: str) -> object:
    gpus = line.get("gpus")
    return gpus[0][name] if isinstance(gpus, list) and gpus else None
