"""In a process of its own over the scripted driver: every call with every error, then a driver that is well again.

Prints one JSON object: by call and code, what the sampler knows of both GPUs, its events, and how often it called.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from llmlaunch.node.nvml_sampler import NvmlSampler

CODES = (3, 15, 999)  # one that lasts, one of a GPU that is gone, and one that may pass
OF_A_DEVICE = (
    "nvmlDeviceGetHandleByIndex_v2",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
    "nvmlDeviceGetPciInfo_v3",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetTotalEnergyConsumption",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetAccountingMode",
    "nvmlDeviceGetAccountingStats",
)
OF_SLICES = ("nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex")
OF_ALL = ("nvmlInit", "nvmlDeviceGetCount_v2", "nvmlSystemGetDriverVersion")
SAMPLES = 6


def say(text: str) -> None:
    fresh = Path(os.environ["FAKE_NVML_SCENARIO"]).with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(os.environ["FAKE_NVML_SCENARIO"])


def sampled(call: str, code: int) -> dict[str, Any]:
    """GPU 0 answers `call` with `code`; then it is well."""
    pid = os.getpid()
    mig = "mig=1" if call in OF_SLICES else "accounting=1"
    gpus = f"gpu uuid=GPU-a util=50 power=300 used=1G {mig}\ngpu uuid=GPU-b used=2G\n"
    gpus += "slice 0 uuid=MIG-a used=1G\n" if call in OF_SLICES else f"proc 0 pid={pid} mem=3G peak=9G\n"
    where = "" if call in OF_ALL else "gpu=0"
    say(f"{gpus}fail {call} code={code} {where}\n")
    sampler = NvmlSampler(0.001, 0.001, 30.0)
    sampler.rank_pids = (pid,)
    sampler.start()
    until(sampler, SAMPLES)
    say(gpus)
    until(sampler, 2 * SAMPLES)
    sampler.finish(30)
    return {"events": sampler.events(), "gpus": sampler.gpus, "driver": sampler.driver}


def until(sampler: NvmlSampler, samples: int) -> None:
    give_up_at = time.monotonic() + 120
    while time.monotonic() < give_up_at:
        if sampler.ready and (not sampler.gpus or sampler.gpus[-1]["samples"] >= samples):
            return
        time.sleep(0.001)
    raise SystemExit("the sampler stopped")


if __name__ == "__main__":
    calls = (*OF_ALL, *OF_A_DEVICE, *OF_SLICES)
    json.dump({call: {str(code): sampled(call, code) for code in CODES} for call in calls}, sys.stdout)
