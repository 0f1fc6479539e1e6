"""The rank's own Python writes down torch's true peaks, whatever resets the counters and however the trainer ends.

The torch is real but for the C functions of its CUDA allocator, which a build for the CPU does not have.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from support.probe_rig import BEGIN, GIB, ProbeRig
from support.soak import SOAK, in_soak

pytestmark = pytest.mark.frameworks

# These import DeepSpeed and torch's compiler.
SLOW = in_soak("by_deepspeed", "by_a_compiled_step")
COUNT = 7 + len(SLOW)
# Device i of this trainer has a spike of i + 2 GiB, and then reset number i.
RESETS = (
    """
from torch.cuda import reset_peak_memory_stats as imported_early
"""
    + BEGIN.replace("install()", "install(devices=10)").replace("import torch", "import torch, time, warnings")
    + """
torch.cuda.init()
warnings.simplefilter("ignore")
def by_deepspeed():
    from deepspeed.runtime.utils import see_memory_usage
    see_memory_usage("as it prints it", force=True)
def step(x):
    torch.cuda.reset_peak_memory_stats(7)
    return x + torch.cuda.max_memory_allocated(7) // GIB
def by_a_compiled_step():
    torch.compile(step, backend="eager")(torch.ones(()))
resets = [
    torch.cuda.reset_peak_memory_stats,
    torch.cuda.memory.reset_peak_memory_stats,
    imported_early,
    torch.cuda.reset_max_memory_allocated,
    torch.cuda.reset_max_memory_cached,
    torch.accelerator.reset_peak_memory_stats,
    SLOW
    torch.cuda.reset_accumulated_memory_stats,
]
for device, reset in enumerate(resets):
    torch.cuda.set_device(device)
    hold((device + 2) * GIB, device)
    time.sleep(0.02)
    release((device + 2) * GIB, device)
    fake.empty_cache(device)
    fake.counts[device]["num_alloc_retries"] += 3
    reset()
    hold(GIB, device)
    fake.counts[device]["num_alloc_retries"] += 1
    print(torch.cuda.max_memory_allocated() == (GIB if reset is not resets[-1] else (device + 2) * GIB))
"""
).replace("    SLOW\n", "".join(f"    {name},\n" for name in SLOW))


def test_no_reset_loses_a_peak(probed: ProbeRig) -> None:
    said = probed.trained(RESETS, DS_ACCELERATOR="cuda")
    assert said.count("True") == COUNT, said  # each reset was one, and the trainer sees what it would have seen
    for device in range(COUNT):
        peaks, spike = probed.peaks(device), (device + 2) * GIB
        assert peaks.allocated_peak_bytes == spike
        assert peaks.active_peak_bytes == spike + spike // 8
        assert peaks.reserved_peak_bytes == spike + GIB
        assert peaks.alloc_retries == 4
    (account,) = probed.accounts()
    assert {entry["device"] for entry in account["devices"]} == set(range(COUNT))  # no other


# The spike is the last thing before the end, and nobody looked meanwhile.
SPIKE = "hold(50 * GIB); release(50 * GIB); torch.cuda.reset_peak_memory_stats(0); hold(60 * GIB); "
ENDS = {
    "the last line": (SPIKE, 0),
    "sys.exit": (SPIKE + "import sys; sys.exit(3)", 3),
    "an exception": (SPIKE + "raise RuntimeError('out of luck')", 1),
    "os._exit": (SPIKE + "import os; os._exit(4)", 4),
    "os._exit in a thread": (SPIKE + "import os, threading; threading.Thread(target=os._exit, args=(5,)).start()", 5),
    "its own handler of SIGTERM": (
        "import os, signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(6))\n"
        + SPIKE + "os.kill(os.getpid(), signal.SIGTERM)", 6,
    ),
    "SIGKILL after a look": (
        SPIKE + "import glob, os, time\nfiles = os.environ['MEMORY'] + '/*'\n"
        "while not any('\"rank\": 6,' in open(path).read() for path in glob.glob(files)): time.sleep(0.05)\n"
        "os.kill(os.getpid(), 9)", -9,
    ),
    "a handler that resets amid a reset": (
        "import os, signal\ntimes = []\ndef handler(*_):\n    times.append(1); torch.cuda.reset_peak_memory_stats(0)\n"
        "    if len(times) > 300: signal.setitimer(signal.ITIMER_REAL, 0); os._exit(7)\n"
        "signal.signal(signal.SIGALRM, handler)\n" + SPIKE
        + "signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)\nwhile True: torch.cuda.reset_peak_memory_stats(0)", 7,
    ),
}  # fmt: skip


def test_no_end_of_a_trainer_loses_a_peak(probed: ProbeRig, small_torch: Path) -> None:
    memory = probed.attempt_directory / "memory"
    trainers = {
        end: probed.train(
            BEGIN + "torch.cuda.init()\n" + text, rank=rank, MEMORY=str(memory), PYTHONPATH=str(small_torch)
        )
        for rank, (end, (text, _)) in enumerate(ENDS.items())
    }
    for rank, (end, (_, code)) in enumerate(ENDS.items()):
        _, errors = trainers[end].communicate(timeout=300)
        assert trainers[end].returncode == code, f"{end}: {errors}"
        (account,) = (account for account in probed.accounts() if account["rank"] == rank)
        assert (account["rank"], account["local_rank"], account["node"]) == (rank, rank, "node1")
        assert account["ended"] == (code >= 0)
        assert account["devices"][0]["allocated_peak_bytes"] == 60 * GIB, end
    (path,) = memory.iterdir()
    assert (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(memory.stat().st_mode)) == (0o600, 0o700)


WITH_A_DRIVER = BEGIN + """
import ctypes, json, time
driver = fake.driver()
ctypes.c_int.in_dll(driver, "fake_is_sliced").value = SLICED
torch.cuda.init()
torch.cuda.set_device(1)
hold(10 * GIB, device=1)
driver.fake_device(7, ctypes.c_ulong(1), ctypes.c_ulong(1))
give_up_at = time.monotonic() + 240
while not driver.fake_was_asked(1) and time.monotonic() < give_up_at:
    time.sleep(0.01)
asked = sorted({name for name, thread in fake.calls if thread == "llmlaunch-memory-probe"})
print(json.dumps([asked, driver.fake_contexts_opened(), driver.fake_was_asked(0), driver.fake_was_asked(1)]))
"""  # fmt: skip


@pytest.mark.parametrize(("sliced", "prefix", "octet"), [(0, "GPU", "a1"), (1, "MIG", "b1")])
def test_the_device_is_observed_without_being_touched(
    probed: ProbeRig, small_torch: Path, sliced: int, prefix: str, octet: str
) -> None:
    """No context is opened, no thread's device is asked for or set, nothing waits for the device, and no graph capture
    of another thread is ended; the stand-in of the driver refuses a thread that would."""
    path = "" if SOAK else str(small_torch)
    said = probed.trained(WITH_A_DRIVER.replace("SLICED", str(sliced)), PYTHONPATH=path)
    assert json.loads(said) == [["_cuda_memoryStats"], 0, 0, 1]
    peaks = probed.peaks(1)
    parts = [octet * count for count in (4, 2, 2, 2, 6)]
    assert (peaks.uuid, peaks.total_bytes) == ("-".join([prefix, *parts]), 80 * GIB)
    assert (peaks.device_used_bytes, peaks.outside_bytes) == (14 * GIB, 3 * GIB)
    (account,) = probed.accounts()
    assert [entry["device"] for entry in account["devices"]] == [1]


# Processes the trainer makes. Those that use no CUDA write nothing; one that does has a file of its own.
CHILDREN = """
import multiprocessing, os, subprocess, sys, torch, fake_allocator as fake
from fake_allocator import GIB, hold
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return index
def load(context):
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=1, multiprocessing_context=context)
    return sorted(int(one) for batch in loader for one in batch)
def other():
    fake.install(); torch.cuda.init(); hold(70 * GIB, device=1)
if __name__ == "__main__":
    before = multiprocessing.get_context("fork").Process(target=other)  # forked before CUDA is used
    before.start(); before.join()
    fake.install(); torch.cuda.init(); hold(5 * GIB)
    assert load("fork") == list(range(8))
    SPAWNED
    child = os.fork()
    if child == 0:
        hold(33 * GIB)
        torch.cuda.reset_peak_memory_stats(0)
        sys.exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert subprocess.run([sys.executable, "-c", "import os; os._exit(8)"]).returncode == 8
    print(before.exitcode, before.pid, os.getpid())
"""


def test_workers_and_children_neither_break_nor_write_into_the_trainers_file(probed: ProbeRig) -> None:
    said = probed.trained(CHILDREN.replace("SPAWNED", *in_soak('assert load("spawn") == list(range(8))') or ("pass",)))
    exit_code, forked, trainer = (int(word) for word in said.split())
    assert exit_code == 0
    assert sorted(account["pid"] for account in probed.accounts()) == sorted((int(forked), int(trainer)))
    assert probed.peaks(0).allocated_peak_bytes == 5 * GIB
    assert probed.peaks(1).allocated_peak_bytes == 70 * GIB
    assert probed.peaks(1).ended


def test_an_allocator_that_queries_the_driver_is_read_only_in_trainer_threads(
    probed: ProbeRig, small_torch: Path
) -> None:
    text = BEGIN.replace("install()", "install(backend='cudaMallocAsync')") + (
        "torch.cuda.init(); hold(7 * GIB); import time; time.sleep(2.5); release(7 * GIB); "
        "torch.cuda.reset_peak_memory_stats(0); print({thread for name, thread in fake.calls})"
    )
    assert probed.trained(text, PYTHONPATH=str(small_torch)) == "{'MainThread'}\n"
    assert probed.peaks().allocated_peak_bytes == 7 * GIB


def test_the_sites_own_sitecustomize_may_import_torch_itself(probed: ProbeRig, small_torch: Path) -> None:
    (small_torch / "sitecustomize.py").write_text("import torch\nmine = 42\n")
    text = BEGIN + "import sitecustomize; print(sitecustomize.mine); torch.cuda.init(); hold(8 * GIB)"
    assert probed.trained(text, PYTHONPATH=str(small_torch)) == "42\n"
    assert probed.peaks().allocated_peak_bytes == 8 * GIB


def test_a_trainer_without_cuda_gets_no_file_and_no_extra_thread(probed: ProbeRig, small_torch: Path) -> None:
    text = "import torch, threading, sys; print(threading.active_count(), [type(f).__name__ for f in sys.meta_path])"
    threads, _, finders = probed.trained(text, PYTHONPATH=str(small_torch)).partition(" ")
    assert threads == "1"
    assert "UntilTorch" not in finders
    assert not (probed.attempt_directory / "memory").exists()
