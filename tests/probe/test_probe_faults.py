"""The trainer is killed, its disk is full, hangs or cannot be written: what the probe saw is kept, training goes on."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path
from typing import Any

import pytest

from support.node_rig import until
from support.probe_rig import BEGIN, GIB, ProbeRig, build_libcuda

pytestmark = pytest.mark.faults

WAITS = (
    BEGIN
    + """
import sys
torch.cuda.init()
hold(60 * GIB); release(60 * GIB); torch.cuda.reset_peak_memory_stats(0)
print("ready", flush=True)
sys.stdin.readline()
print("trained")
"""
)


def trains_on(trainer: Any, complaints: bool = False) -> str:
    """What a trainer printed that was let go, and ended well."""
    said, errors = trainer.communicate("\n", timeout=300)
    assert trainer.returncode == 0, errors
    assert complaints or errors == ""
    return str(said)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_fatal_signal_keeps_the_peaks_seen_before(probed: ProbeRig, small_torch: Path, number: int) -> None:
    trainer = probed.train(WAITS, PYTHONPATH=str(small_torch))
    until(probed.accounts, "the first word")
    os.kill(probed.record()["program_pid"], number)
    assert trainer.wait() == -number
    (account,) = probed.accounts()
    assert (account["ended"], account["devices"][0]["allocated_peak_bytes"]) == (False, 60 * GIB)
    assert [path.name for path in probed.files[0].parent.iterdir()] == [probed.files[0].name]


def test_a_rising_peak_is_written_while_the_trainer_runs(probed: ProbeRig, small_torch: Path) -> None:
    text = WAITS.replace('print("trained")', "hold(70 * GIB)\nsys.stdin.readline()")
    trainer = probed.train(text, PYTHONPATH=str(small_torch))
    until(probed.accounts, "the first word")
    trainer.stdin.write("\n")
    trainer.stdin.flush()
    until(lambda: probed.accounts()[0]["devices"][0]["allocated_peak_bytes"] == 70 * GIB, "the rise")
    trainer.kill()


def test_a_disk_that_is_full_until_shortly_before_the_end_gets_the_last_account(
    probed: ProbeRig, small_torch: Path
) -> None:
    full = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))\n"
    room = "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)\n"
    text = full + WAITS.replace('print("trained")', room + 'print("trained")')
    trainer = probed.train(text, PYTHONPATH=str(small_torch))
    assert trainer.stdout.readline() == "ready\n"
    until(lambda: probed.files, "an attempt to write")
    assert all(path.stat().st_size == 0 for path in probed.files)
    assert trains_on(trainer) == "trained\n"
    (account,) = probed.accounts()
    assert (account["ended"], account["devices"][0]["allocated_peak_bytes"]) == (True, 60 * GIB)


def test_a_disk_that_hangs_holds_up_neither_the_training_nor_its_end_for_long(
    probed: ProbeRig, small_torch: Path
) -> None:
    """Opening a pipe that nobody reads takes for ever, as a dead file server does."""
    probe = probed.run_directory / "hook" / "llmlaunch_memory_probe.py"
    patient = probe.read_text()
    probe.write_text(patient.replace("LAST_WORD_SECONDS = 5.0", "LAST_WORD_SECONDS = 0.5"))
    assert probe.read_text() != patient
    memory = probed.attempt_directory / "memory" / "node1.jsonl"
    memory.parent.mkdir(parents=True)
    pipe = f"import os\nos.mkfifo({str(memory)!r})\n"
    hangs = "import time\nwhile not any('open' == f.f_code.co_name for f in sys._current_frames().values()):\n"
    hangs += "    time.sleep(0.01)\ntorch.cuda.reset_peak_memory_stats(0)\n"
    text = pipe + WAITS.replace("sys.stdin", hangs + "sys.stdin")
    trainer = probed.train(text, PYTHONPATH=str(small_torch))
    assert trains_on(trainer) == "ready\ntrained\n"
    assert [stat.S_ISFIFO(path.stat().st_mode) for path in probed.files] == [True]


def test_a_removed_run_directory_is_not_recreated(probed: ProbeRig, small_torch: Path) -> None:
    trainer = probed.train(WAITS.replace("hold(60", "import shutil, os; shutil.rmtree(os.environ['RUN']); hold(60"),
                           RUN=str(probed.run_directory), PYTHONPATH=str(small_torch))  # fmt: skip
    assert trains_on(trainer, complaints=True) == "ready\ntrained\n"
    assert not (probed.attempt_directory / "memory").exists()


def test_a_driver_that_lacks_a_function_costs_only_its_numbers(
    probed: ProbeRig, small_torch: Path, tmp_path: Path
) -> None:
    probed.driver = build_libcuda(tmp_path, "-DOLD_DRIVER")
    trainer = probed.train(WAITS.replace("torch.cuda.init()", "fake.driver(); torch.cuda.init()"),
                           PYTHONPATH=str(small_torch))  # fmt: skip
    until(probed.accounts, "the first word")
    assert trains_on(trainer) == "ready\ntrained\n"
    peaks = probed.peaks()
    assert (peaks.allocated_peak_bytes, peaks.device_used_bytes, peaks.outside_bytes) == (60 * GIB, None, None)
    assert peaks.uuid is not None


EMPTIES = (
    BEGIN
    + """
import threading, time
torch.cuda.init()
hold(60 * GIB)
def looks():
    return sum(name == "_cuda_memoryStats" for name, _ in list(fake.calls))
def until_it_looked():
    before = looks()
    while looks() == before:
        time.sleep(0.01)
def empty_cache():
    before.append(looks())
    time.sleep(2)  # as long as the device has to do, the lock of the allocator in its hand
    after.append(looks())
before, after = [], []
until_it_looked()
waits = threading.Thread(target=empty_cache)
waits.start()
waits.join()
until_it_looked()
print(after[0] - before[0])
"""
)


def test_the_counters_are_left_alone_while_the_cache_is_emptied(probed: ProbeRig, small_torch: Path) -> None:
    assert probed.trained(EMPTIES, PYTHONPATH=str(small_torch)) == "0\n"


FORKS = (
    BEGIN
    + """
import os, sys, threading, time
torch.cuda.init()
hold(60 * GIB)
inside = threading.Event()
def slow(device):
    if threading.current_thread().name == "llmlaunch-memory-probe":
        inside.set()
        time.sleep(1)
    return fake.stats(device)
torch._C._cuda_memoryStats = slow
inside.wait()
child = os.fork()
if child == 0:
    torch.cuda.reset_peak_memory_stats(0)
    sys.exit(9)
print(os.waitpid(child, 0)[1] >> 8)
"""
)


def test_a_child_forked_during_a_sample_does_not_wait(probed: ProbeRig, small_torch: Path) -> None:
    """Of the thread that looked, the child has only the lock it held."""
    assert probed.trained(FORKS, PYTHONPATH=str(small_torch)) == "9\n"


NO_CONTEXT = (
    BEGIN
    + """
import time
driver = fake.driver()
fake._library = None  # it hears of no device in use: the context was taken away
torch.cuda.init()
hold(60 * GIB)
while not any(name == "_cuda_memoryStats" for name, thread in list(fake.calls) if thread != "MainThread"):
    time.sleep(0.01)
time.sleep(1)
print(driver.fake_contexts_opened())
"""
)


def test_the_probe_opens_no_context(probed: ProbeRig, small_torch: Path) -> None:
    assert probed.trained(NO_CONTEXT, PYTHONPATH=str(small_torch)) == "0\n"
    assert probed.peaks().device_used_bytes is None
