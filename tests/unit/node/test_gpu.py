"""What the monitor writes of GPUs and their slices, against what the scripted driver truly did, and every error of NVML
in every call the monitor makes: the other GPUs and the other numbers do not notice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from nvml_codes import CODES, OF_A_DEVICE, OF_SLICES

import llmlaunch
from llmlaunch.node.gpu import Power
from support.node_rig import ATTEMPT, GIB, NODE, NodeRig, until

TWO_GPUS = "gpu uuid=GPU-a\ngpu uuid=GPU-b\n"
MIG = "gpu uuid=GPU-a mig=1\nslice 0 uuid=MIG-a total=10G\nslice 0 uuid=MIG-b total=20G\ngpu uuid=GPU-b\n"


def test_peaks_over_time_are_the_true_ones(gpu_node: NodeRig) -> None:
    mine = os.getpid()
    gpu_node.scenario(f"{TWO_GPUS}proc 0 pid={mine} mem=10G\n")
    monitor = gpu_node.monitor()
    gpu_node.until_used(10.5)
    gpu_node.scenario(f"{TWO_GPUS}proc 0 pid={mine} mem=70G\n")
    gpu_node.until_used(70.5)
    gpu_node.scenario(f"{TWO_GPUS}proc 0 pid={mine} mem=30G\nproc 1 pid={mine} mem=5G\n")
    gpu_node.until_used(30.5)
    first, second = gpu_node.stop(monitor)["gpus"]

    assert (first["uuid"], second["uuid"]) == ("GPU-a", "GPU-b")
    assert first["device_peak_bytes"] == 70 * GIB + GIB // 2
    assert first["baseline_bytes"] == 10 * GIB + GIB // 2
    assert first["used_bytes"] == 30 * GIB + GIB // 2
    assert first["process_peak_bytes"] == {str(mine): 70 * GIB}
    assert first["total_bytes"] == 80 * GIB
    assert first["reserved_bytes"] == GIB // 2
    assert first["pci"] == "00000000:10:00.0"
    assert second["process_peak_bytes"] == {str(mine): 5 * GIB}


def test_every_line_stands_alone(gpu_node: NodeRig) -> None:
    gpu_node.scenario("gpu used=40G\n")
    monitor = gpu_node.monitor()
    gpu_node.until_used(40.5)
    gpu_node.scenario("gpu used=1G\n")
    gpu_node.until_used(1.5)
    gpu_node.stop(monitor)
    lines = gpu_node.lines()
    assert [line["event"] for line in lines if line["event"] != "beat"] == ["start", "end"]
    assert all(line["gpus"][0]["device_peak_bytes"] == 40 * GIB + GIB // 2 for line in lines)
    assert all((line["v"], line["attempt"], line["node"]) == (1, ATTEMPT, NODE) for line in lines)
    assert lines[0]["driver"] == "580.65.06"
    assert lines[-1]["signal"] == "SIGTERM"
    assert lines[-1]["nvml_answered"]


def test_accounting_sees_the_spike_that_no_sample_saw(gpu_node: NodeRig) -> None:
    mine = os.getpid()
    (gpu,) = gpu_node.monitored(f"gpu accounting=1\nproc 0 pid={mine} mem=30G peak=70G\n", 30.5)["gpus"]
    assert gpu["process_peak_bytes"] == {str(mine): 30 * GIB}
    assert gpu["accounting_peak_bytes"] == {str(mine): 70 * GIB}


def test_the_spike_of_a_rank_that_is_gone_is_asked_for_at_once(gpu_node: NodeRig) -> None:
    """Twenty milliseconds at 66 GiB between two samples and the end of the process: accounting alone knows."""
    trainer = gpu_node.rank("sleep", "600")
    pid = gpu_node.until_record()["program_pid"]
    gpu_node.scenario(f"gpu accounting=1\nproc 0 pid={pid} mem=1G\n")
    gpu_node.monitor("--list-interval", "3600")
    gpu_node.until_line("the rank", lambda line: line.get("processes"))
    gpu_node.scenario(f"gpu accounting=1\nproc 0 pid={pid} mem=0 peak=66G\n")
    trainer.terminate()
    trainer.wait()
    wanted = {str(pid): 66 * GIB}
    gpu_node.until_line("its peak", lambda line: line["event"] == "beat" and _accounted(line) == wanted)


def test_accounting_of_an_earlier_process_of_the_same_number_is_not_believed(gpu_node: NodeRig) -> None:
    mine, yesterday = os.getpid(), int((time.time() - 86400) * 1e6)
    gpu_node.scenario(f"gpu accounting=1\nproc 0 pid={mine} mem=30G peak=70G start={yesterday}\n")
    monitor = gpu_node.monitor()
    gpu_node.until_used(30.5)
    gpu_node.scenario(f"gpu accounting=1\nproc 0 pid={mine} mem=31G peak=40G start={int(time.time() * 1e6)}\n")
    gpu_node.until_line("its own", _accounted)
    assert _accounted(gpu_node.stop(monitor)) == {str(mine): 40 * GIB}


def test_the_process_list_is_asked_rarely_and_when_memory_rose(gpu_node: NodeRig) -> None:
    gpu_node.scenario("gpu used=1G\n")
    monitor = gpu_node.monitor("--list-interval", "3600")
    gpu_node.until_used(1.5)
    gpu_node.scenario("gpu used=2G\n")
    gpu_node.until_used(2.5)
    gpu_node.scenario("gpu used=2176M\n")  # 128 MiB more: not worth a list
    gpu_node.until_used(2.625)
    until(lambda: gpu_node.lines()[-1]["gpus"][0]["samples"] > 20, "twenty samples")
    gpu_node.stop(monitor)
    calls = gpu_node.calls()
    assert calls["nvmlDeviceGetComputeRunningProcesses_v3"] == 3  # at start, at the rise, at the end
    assert calls["nvmlDeviceGetMemoryInfo_v2"] > 20
    assert calls["nvmlInit"] == 1


def test_only_processes_of_this_job_with_amounts_that_can_be(gpu_node: NodeRig) -> None:
    """One number is of no process here, as in another pid namespace, one of another job's, here our own parent's."""
    mine, parent = os.getpid(), os.getppid()
    unknown = gpu_node.rank("sleep", "600").pid
    others = f"gpu\nproc 0 pid=4194300 mem=1G\nproc 0 pid={parent} mem=4G\n"
    (gpu,) = gpu_node.monitored(f"{others}proc 0 pid={mine} mem=2G\nproc 0 pid={unknown} mem=na\n", 7.5)["gpus"]
    assert gpu["process_peak_bytes"] == {str(mine): 2 * GIB}


def test_a_trainer_below_a_rank_is_of_this_job(gpu_node: NodeRig) -> None:
    # the shell waits for the trainer below it, and ends it with itself
    shell = gpu_node.rank("sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!; trap 'kill $!' TERM; wait")
    trainer = int(shell.stdout.readline())
    gpu_node.scenario(f"gpu\nproc 0 pid={trainer} mem=2G\n")
    monitor = gpu_node.monitor()
    gpu_node.until_line("the trainer", lambda line: line["event"] == "beat" and line["gpus"][0]["process_peak_bytes"])
    (gpu,) = gpu_node.stop(monitor)["gpus"]
    shell.terminate()
    assert gpu["process_peak_bytes"] == {str(trainer): 2 * GIB}


def test_a_shifted_process_list_is_not_believed(gpu_node: NodeRig) -> None:
    mine, other = os.getpid(), gpu_node.rank("sleep", "600").pid
    (gpu,) = gpu_node.monitored(f"gpu shifted=1\nproc 0 pid={mine} mem=2G\nproc 0 pid={other} mem=3G\n", 5.5)["gpus"]
    assert gpu["process_peak_bytes"] == {str(mine): 2 * GIB, str(other): 3 * GIB}
    assert "processes_v3" in gpu["unavailable"]


def test_an_old_driver_answers_the_older_calls(old_gpu_node: NodeRig) -> None:
    mine = os.getpid()
    (gpu,) = old_gpu_node.monitored(f"gpu\nproc 0 pid={mine} mem=7G\n", 7.5)["gpus"]
    assert gpu["device_peak_bytes"] == 7 * GIB + GIB // 2
    assert gpu["reserved_bytes"] is None
    assert gpu["process_peak_bytes"] == {str(mine): 7 * GIB}
    assert {**gpu["unavailable"], "clock_reasons": 13} == {"memory_v2": 13, "processes_v3": 13, "clock_reasons": 13}


def test_a_call_that_is_refused_is_not_made_again(gpu_node: NodeRig) -> None:
    gpu_node.scenario("gpu used=1G\nfail nvmlDeviceGetComputeRunningProcesses_v3 code=4\n")
    monitor = gpu_node.monitor()
    gpu_node.until_used(1.5)
    until(lambda: gpu_node.lines()[-1]["gpus"][0]["samples"] > 20, "twenty samples")
    (gpu,) = gpu_node.stop(monitor)["gpus"]
    assert gpu["unavailable"] == {"processes_v3": 4}
    assert gpu_node.calls()["nvmlDeviceGetComputeRunningProcesses_v3"] == 1


def test_a_gpu_in_mig_mode_without_a_slice_of_ours_is_skipped(gpu_node: NodeRig) -> None:
    gpu_node.stop(gpu_node.started_monitor("gpu mig=1\ngpu uuid=GPU-b\n"))
    skipped, start = gpu_node.lines()[:2]
    assert (skipped["event"], skipped["index"], skipped["code"]) == ("gpu_skipped", 0, 6)
    assert [(gpu["index"], gpu["uuid"]) for gpu in start["gpus"]] == [(1, "GPU-b")]


def test_lines_are_few_while_no_peak_moves(gpu_node: NodeRig) -> None:
    monitor = gpu_node.started_monitor("gpu used=4G\n", "--beat-interval", "600")
    gpu_node.until_sampled("gpu used=4500M\n")
    end = gpu_node.stop(monitor)
    assert [line["event"] for line in gpu_node.lines()] == ["start", "end"]
    assert end["gpus"][0]["device_peak_bytes"] == 5012 * 2**20


@pytest.mark.parametrize(("beat", "later"), [("600", []), ("0.2", ["gpu used=1G\n"])], ids=["leap", "beat"])
def test_a_peak_that_rose_is_written(gpu_node: NodeRig, beat: str, later: list[str]) -> None:
    gpu_node.started_monitor("gpu used=4G\n", "--beat-interval", beat)
    for scenario in ("gpu used=60G\n", *later):
        gpu_node.until_sampled(scenario)
    gpu_node.until_line("a line after the rise", lambda line: line["gpus"][0]["device_peak_bytes"] > 60 * GIB)


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
    source = "nvml energy counter"
    line = gpu_node.until_line("a second of energy", lambda line: line["gpus"][0]["power_source"] == source)
    gpu_node.stop(monitor)
    (gpu,) = line["gpus"]
    assert 30 < gpu["power_watts"] < 3000  # 300, but for what a busy machine puts between counter and clock
    assert gpu["power_peak_watts"] == 500


def test_mean_power_is_of_the_samples_where_nothing_counts_energy(gpu_node: NodeRig) -> None:
    (gpu,) = gpu_node.stop(gpu_node.started_monitor("gpu power=500 drawn=none\n"))["gpus"]
    assert (gpu["power_watts"], gpu["power_source"]) == (500, "nvml power samples")
    assert gpu["unavailable"] == {"energy": 3}


def test_power_over_a_counter_that_began_anew() -> None:
    power = Power()
    for joules, at in ((1000.0, 0.0), (3000.0, 10.0), (50.0, 20.0), (2050.0, 30.0)):
        power.add_joules(joules, at)
    assert power.mean == 200  # 4000 joules in the 20 seconds of which both ends are known


def _accounted(line: dict[str, Any]) -> dict[str, int]:
    return dict(line["gpus"][0]["accounting_peak_bytes"])


GONE = (15,)
NEVER_AGAIN = (3,)
ASKED_OFTEN = {  # name in `unavailable`, and what GPU 0 lacks without it
    "nvmlDeviceGetMemoryInfo_v2": ("memory_v2", {"reserved_bytes"}),
    "nvmlDeviceGetUtilizationRates": ("utilization", {"utilization_percent"}),
    "nvmlDeviceGetPowerUsage": ("power", {"power_peak_watts", "power_watts"}),
    "nvmlDeviceGetTotalEnergyConsumption": ("energy", set()),
    "nvmlDeviceGetComputeRunningProcesses_v3": ("processes_v3", set()),  # version 2 answers
    "nvmlDeviceGetAccountingStats": ("accounting", {"accounting_peak_bytes"}),
    "nvmlDeviceGetUUID": ("uuid", {"uuid"}),
    "nvmlDeviceGetName": ("name", {"name"}),
    "nvmlDeviceGetPciInfo_v3": ("pci", {"pci"}),
}
AT_OPEN = (
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
    "nvmlDeviceGetPciInfo_v3",
)
ALWAYS = ("uuid", "name", "pci", "total_bytes", "reserved_bytes", "device_peak_bytes", "utilization_percent",
          "power_watts", "power_peak_watts", "process_peak_bytes", "accounting_peak_bytes")  # fmt: skip


@pytest.fixture(scope="session")
def answers(nvml_library: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All of them, from one process that loads the scripted driver."""
    driver = {
        "LD_LIBRARY_PATH": str(nvml_library),
        "FAKE_NVML_SCENARIO": str(tmp_path_factory.mktemp("codes") / "scenario"),
        "PYTHONPATH": str(Path(llmlaunch.__file__).parents[1]),
    }
    command = [sys.executable, Path(__file__).with_name("nvml_codes.py")]
    process = subprocess.run(command, env={**os.environ, **driver}, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return dict(json.loads(process.stdout))


def lacks(gpu: dict[str, Any]) -> set[str]:
    return {name for name in ALWAYS if gpu[name] in (None, {})}


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("call", OF_A_DEVICE)
def test_an_error_of_one_gpu(answers: dict[str, Any], call: str, code: int) -> None:
    answer = answers[call][str(code)]
    gpus = {gpu["index"]: gpu for gpu in answer["gpus"]}
    other = gpus.pop(1)
    assert (other["lost"], other["unavailable"], other["device_peak_bytes"]) == (None, {}, 2 * GIB + GIB // 2)
    gpu = gpus.pop(0, None)
    if code in GONE and gpu is None:  # so it was when it was opened
        assert call in AT_OPEN
        assert answer["events"] == [{"event": "gpu_skipped", "index": 0, "code": code}]
    elif code in GONE:
        assert gpu is not None
        assert gpu["lost"] == code
        assert [event["event"] for event in answer["events"]] == ["gpu_lost"]
    elif call == "nvmlDeviceGetHandleByIndex_v2":
        assert (gpu, answer["events"]) == (None, [{"event": "gpu_skipped", "index": 0, "code": code}])
    else:
        assert gpu is not None
        assert answer["events"] == []
        name, without = ASKED_OFTEN.get(call, ("accounting_mode", {"accounting_peak_bytes"}))
        lasting = code in NEVER_AGAIN or call == "nvmlDeviceGetAccountingMode"
        if call == "nvmlDeviceGetMigMode":
            without, lasting = set(), False
        assert lacks(gpu) == (without if lasting else set())
        assert gpu["unavailable"] == ({name: code} if code in NEVER_AGAIN and call != "nvmlDeviceGetMigMode" else {})
        assert gpu["device_peak_bytes"] == 4 * GIB + GIB // 2


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("call", OF_SLICES)
def test_an_error_among_slices(answers: dict[str, Any], call: str, code: int) -> None:
    answer = answers[call][str(code)]
    assert [gpu["uuid"] for gpu in answer["gpus"]] == ["GPU-b"]
    assert answer["events"] == [{"event": "gpu_skipped", "index": 0, "code": code}]


@pytest.mark.parametrize("code", CODES)
def test_an_error_of_the_driver(answers: dict[str, Any], code: int) -> None:
    for call in ("nvmlInit", "nvmlDeviceGetCount_v2"):
        (event,) = answers[call][str(code)]["events"]
        assert (event["event"], event["code"], bool(event["why"])) == ("no_nvml", code, True)
        assert answers[call][str(code)]["gpus"] == []
    version = answers["nvmlSystemGetDriverVersion"][str(code)]
    assert (version["driver"], version["events"], len(version["gpus"])) == (None, [], 2)
