"""The memory probe beside a real allocator and a real driver: true to the byte, and felt by nobody."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pynvml
import pytest

from support.node_rig import until
from support.probe_rig import GIB, ProbeRig

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.gpu

BEGIN = """
import json, os, sys, time, torch
account = {"allocated": 0, "reserved": 0}
def hold(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")
def take():  # the trainer's own account, over its own resets
    account["allocated"] = max(account["allocated"], torch.cuda.max_memory_allocated())
    account["reserved"] = max(account["reserved"], torch.cuda.max_memory_reserved())
    torch.cuda.reset_peak_memory_stats()
"""
SPIKE = """
block = hold(2 * GIB)
time.sleep(0.02)
del block
torch.cuda.empty_cache()
take()
block = hold(GIB)
take()
print(json.dumps(account), flush=True)
"""


def train(rig: ProbeRig, text: str, **environment: str) -> Any:
    """With the driver that this machine has, found as it is here."""
    return rig.train(BEGIN + text, LD_LIBRARY_PATH=os.environ.get("LD_LIBRARY_PATH", ""), **environment)


def trained(rig: ProbeRig, text: str, **environment: str) -> str:
    process = train(rig, text, **environment)
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return str(said)


def look_all_the_time(rig: ProbeRig) -> None:
    """As often as a probe never does by itself."""
    probe = rig.run_directory / "hook" / "llmlaunch_memory_probe.py"
    text = probe.read_text()
    for name in ("LOOK_SECONDS = 1.0", "DEVICE_LOOK_SECONDS = 10.0", "QUIET_DEVICE_LOOK_SECONDS = 60.0"):
        assert f"\n{name}" in text
        text = text.replace(f"\n{name}", f"\n{name.split(' = ')[0]} = 0.001")
    probe.write_text(text)


@pytest.mark.parametrize("allocator", ["", "expandable_segments:True", "backend:cudaMallocAsync"])
def test_its_peaks_are_torchs_to_the_byte(probed: ProbeRig, allocator: str) -> None:
    variables = {"PYTORCH_CUDA_ALLOC_CONF": allocator} if allocator else {}
    account = json.loads(trained(probed, SPIKE, **variables))
    peaks = probed.peaks()
    assert (peaks.allocated_peak_bytes, peaks.reserved_peak_bytes) == (account["allocated"], account["reserved"])
    assert account["allocated"] >= 2 * GIB
    assert peaks.ended


# A graph is captured again and again, in the mode in which another thread's call may end the capture.
CAPTURES = """
x = torch.ones(1024, device="cuda")
block = hold(GIB)
end = time.monotonic() + 15
captured = 0
while time.monotonic() < end:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        y = x
        for _ in range(200):
            y = y * 1.0
    graph.replay()
    torch.cuda.synchronize()
    assert y[0].item() == 1.0
    captured += 1
print(captured, torch.cuda.memory_reserved(), torch.cuda.get_device_properties(0).total_memory)
"""


def test_graph_captures_go_on_while_it_looks_at_the_device(probed: ProbeRig) -> None:
    look_all_the_time(probed)
    captured, reserved, total = (int(word) for word in trained(probed, CAPTURES).split())
    assert captured > 0
    peaks = probed.peaks()
    assert peaks.total_bytes == total
    assert peaks.device_used_bytes is not None
    assert peaks.outside_bytes is not None
    assert reserved < peaks.device_used_bytes <= total
    assert 0 < peaks.outside_bytes < peaks.device_used_bytes


def test_the_device_has_nvmls_name_and_no_other_one_gets_a_context(probed: ProbeRig) -> None:
    look_all_the_time(probed)
    trainer = train(probed, "block = hold(GIB)\nprint('ready', flush=True)\nsys.stdin.readline()\n")
    assert trainer.stdout.readline() == "ready\n"
    until(lambda: probed.files and probed.peaks().device_used_bytes, "a look at the device")
    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    uuids = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    assert probed.peaks().uuid in uuids
    pid = probed.record()["program_pid"]
    in_use = [
        uuid
        for uuid, handle in zip(uuids, handles, strict=True)
        if pid in {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    ]
    assert in_use in ([], [probed.peaks().uuid])  # none where the driver hides processes
    _, errors = trainer.communicate("\n", timeout=300)
    assert trainer.returncode == 0, errors


LOADS = """
import torch.utils.data
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): return torch.tensor(float(index))
if __name__ == "__main__":
    block = hold(GIB)
    for context in ("fork", "spawn"):
        loader = torch.utils.data.DataLoader(
            Numbers(), batch_size=8, num_workers=2, pin_memory=True, multiprocessing_context=context
        )
        assert sum(batch.to("cuda").sum().item() for batch in loader) == sum(range(64))
    print(os.getpid())
"""


def test_workers_of_a_trainer_that_uses_the_device_write_nothing(probed: ProbeRig) -> None:
    trainer = trained(probed, LOADS).strip()
    assert [path.name for path in probed.files] == [f"0.{trainer}.json"]


def test_a_killed_trainer_leaves_its_peak(probed: ProbeRig) -> None:
    trainer = train(probed, SPIKE + "sys.stdin.readline()\n")
    account = json.loads(trainer.stdout.readline())
    until(lambda: probed.files, "the first word")
    os.kill(probed.record()["program_pid"], signal.SIGKILL)
    trainer.wait()
    assert (probed.peaks().allocated_peak_bytes, probed.peaks().ended) == (account["allocated"], False)


@pytest.mark.parametrize(
    ("script", "words"), [("probe_cost.py", ["--pairs", "1", "--steps", "20"]), ("torch_against_nvml.py", [])]
)
def test_the_scripts_that_measure_it_run(tmp_path: Path, script: str, words: list[str]) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu" / script), str(tmp_path), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["driver"]
