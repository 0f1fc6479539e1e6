"""Every error of NVML in every call the monitor makes: the other GPUs and the other numbers do not notice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nvml_codes import CODES, OF_A_DEVICE, OF_ALL, OF_SLICES

import llmlaunch
from support.node_rig import GIB

GONE = (15, 16, 28)
NEVER_AGAIN = (2, 3, 4, 13, 25)
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


def test_every_call_was_tried(answers: dict[str, Any]) -> None:
    assert set(answers) == {*OF_ALL, *OF_A_DEVICE, *OF_SLICES}
    assert all(set(by_code) == set(map(str, CODES)) for by_code in answers.values())
