"""Torch's own peaks, `cudaMemGetInfo` and NVML against each other, for one small training that ends in a 20 ms spike.

    python benchmarks/gpu/torch_against_nvml.py RECORDS [--stand-in] [words of small_training.py]

The trainer keeps its own account of torch's peaks over its own resets: the probe's file must agree to the byte. NVML is
sampled here, a hundred times a second (device) and twice (process list); where the site has accounting on, the driver's
own maximum is asked for at the end. The first GPU that CUDA_VISIBLE_DEVICES leaves, by its UUID. A record goes into the
folder RECORDS; it fails where the probe and the trainer disagree.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

try:
    import pynvml
except ImportError:
    print("not measured: no pynvml here (pip install nvidia-ml-py)")
    sys.exit(0)
from gpu_records import require_cuda
from probed import ATTEMPT, result, start, write_record

from llmlaunch.rundir.file_names import PROBES, attempt_folder
from llmlaunch.rundir.probe_files import TorchPeaks, fullest_devices, largest_peaks, read_probe_file

MIB = 2**20


class Samples:
    """What NVML says of every GPU while a process runs."""

    def __init__(self) -> None:
        pynvml.nvmlInit()
        self.handles = {}
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            self.handles[str(pynvml.nvmlDeviceGetUUID(handle))] = handle
        self.baseline = {uuid: self.used(uuid) for uuid in self.handles}
        self.device_peak = dict(self.baseline)
        self.process_peak = dict.fromkeys(self.handles, 0)
        self.count = 0

    def used(self, uuid: str) -> int:
        memory = pynvml.nvmlDeviceGetMemoryInfo(self.handles[uuid])
        return int(memory.total - memory.free)

    def follow(self, training: subprocess.Popen[str]) -> None:
        listed_at = 0.0
        while training.poll() is None:
            for uuid in self.handles:
                self.device_peak[uuid] = max(self.device_peak[uuid], self.used(uuid))
            if time.monotonic() - listed_at > 0.5:
                self.take_process(training.pid)
                listed_at = time.monotonic()
            self.count += 1
            time.sleep(0.01)

    def take_process(self, pid: int) -> None:
        for uuid, handle in self.handles.items():
            try:
                for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                    if process.pid == pid and process.usedGpuMemory is not None:
                        self.process_peak[uuid] = max(self.process_peak[uuid], int(process.usedGpuMemory))
            except pynvml.NVMLError:
                continue  # not to be had here: containers, MIG

    def accounting(self, uuid: str, pid: int) -> int | None:
        try:
            return int(pynvml.nvmlDeviceGetAccountingStats(self.handles[uuid], pid).maxMemoryUsage)
        except pynvml.NVMLError:
            return None

    def of(self, uuid: str, pid: int) -> dict[str, Any]:
        return {
            "samples": self.count,
            "baseline_bytes": self.baseline[uuid],
            "device_peak_bytes": self.device_peak[uuid],
            "process_peak_bytes": self.process_peak[uuid] or None,
            "accounting_peak_bytes": self.accounting(uuid, pid),
        }


def differences(trainer: dict[str, Any], probe: TorchPeaks, nvml: dict[str, Any]) -> dict[str, int | None]:
    """What the record is read for first. None where one of the two is not known."""

    def less(one: int | None, other: int | None) -> int | None:
        return None if one is None or other is None else one - other

    return {
        "probe_allocated_less_trainer": less(probe.allocated_peak_bytes, trainer["allocated_peak_bytes"]),
        "probe_reserved_less_trainer": less(probe.reserved_peak_bytes, trainer["reserved_peak_bytes"]),
        "nvml_device_less_probe_device": less(nvml["device_peak_bytes"], probe.device_used_bytes),
        "nvml_process_less_reserved": less(nvml["process_peak_bytes"], probe.reserved_peak_bytes),
        "nvml_accounting_less_reserved": less(nvml["accounting_peak_bytes"], probe.reserved_peak_bytes),
        "nvml_above_baseline_less_reserved": less(
            nvml["device_peak_bytes"] - nvml["baseline_bytes"], probe.reserved_peak_bytes
        ),
        "probe_outside": probe.outside_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path)
    parser.add_argument("--stand-in", action="store_true")
    options, more = parser.parse_known_args()
    if not options.stand_in:
        require_cuda(Path(__file__).name)
    words = ["--reset-every", "7", "--spike-mib", "4096", *(["--stand-in"] if options.stand_in else []), *more]
    samples = Samples()
    with tempfile.TemporaryDirectory() as folder:
        training = start(Path(folder), True, words)
        samples.follow(training)
        trainer = result(training)
        files = map(read_probe_file, (attempt_folder(Path(folder), ATTEMPT) / PROBES).glob("*.jsonl"))
        probe = fullest_devices(largest_peaks([file for file in files if file is not None])).get(0)
    if probe is None or probe.uuid not in samples.handles:
        sys.exit(f"the probe wrote of {probe and probe.uuid}, NVML knows {', '.join(samples.handles)}")
    nvml = samples.of(probe.uuid, trainer["pid"])
    found = differences(trainer, probe, nvml)
    record = {
        "gpu": trainer["gpu"],
        "driver": str(pynvml.nvmlSystemGetDriverVersion()),
        **{name: trainer[name] for name in ("torch", "cuda", "python")},
        "training": words,
        "trainer": {name: trainer[name] for name in ("allocated_peak_bytes", "reserved_peak_bytes")},
        "probe": dataclasses.asdict(probe),
        "nvml": nvml,
        "differences": found,
    }
    path = write_record(options.records, "torch_against_nvml", record)
    for name, value in found.items():
        print(f"{name:36} {'not known' if value is None else f'{value / MIB:.1f} MiB'}")
    print(path)
    if found["probe_allocated_less_trainer"] != 0 or found["probe_reserved_less_trainer"] != 0:
        sys.exit("the probe and the trainer's own account disagree")


if __name__ == "__main__":
    main()
