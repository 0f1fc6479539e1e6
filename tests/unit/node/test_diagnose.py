"""What ended the trainers of a node, from its log, its ranks, its kernel and its monitor."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from llmlaunch.causes.cause import advice
from llmlaunch.node import diagnose
from llmlaunch.node.diagnose import kernel_lines
from support.node_rig import ATTEMPT, NODE


class Rig:
    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.attempt = directory / "attempts" / ATTEMPT
        self.counters_before: dict[str, Any] | None = None
        self.peaks = directory / "peaks" / f"{NODE}.jsonl"
        self.monkeypatch = monkeypatch
        for folder in (self.attempt / "ranks", directory / "logs", directory / "peaks"):
            folder.mkdir(parents=True)
        self.counters(0)
        self.kernel([])

    def rank(self, number: int, **more: Any) -> None:
        record = {"rank": number, "local_rank": number, "node": NODE, "ended_at": 50.0, "exit_code": 1, "signal": None}
        with (self.attempt / "ranks" / f"{NODE}.jsonl").open("a") as file:
            file.write(json.dumps(record | more) + "\n")

    def log(self, text: str) -> None:
        (self.directory / "logs" / f"{ATTEMPT}.{NODE}.log").write_text(text)

    def counters(self, kills: int | None) -> None:
        counters = {"oom_kills": kills, "limit_bytes": 2**30, "peak_bytes": 2**30}
        self.monkeypatch.setattr(diagnose, "memory_counters", lambda: counters)

    def kernel(self, lines: list[str]) -> None:
        self.monkeypatch.setattr(diagnose, "kernel_lines", lambda since: lines)

    def before(self) -> None:
        """The training begins now."""
        self.counters_before = {"schema": 1, "at": time.time(), **diagnose.memory_counters()}

    def cause(self, code: int = 1) -> dict[str, Any]:
        diagnose.write_cause(self.directory, ATTEMPT, NODE, code, self.counters_before)
        return dict(json.loads((self.attempt / "causes" / f"{NODE}.json").read_text()))


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(tmp_path, monkeypatch)


def test_the_exception_of_the_rank_that_failed_first(rig: Rig) -> None:
    rig.rank(0, ended_at=51.0)
    rig.rank(1, ended_at=50.0)
    rig.log("[rank1]: Traceback (most recent call last):\n[rank1]: KeyError: 'one'\n"
            "[rank0]: Traceback (most recent call last):\n[rank0]: KeyError: 'zero'\n"
            "Traceback (most recent call last):\ntorch.distributed.elastic.errors.ChildFailedError:\n")  # fmt: skip
    assert rig.cause() == {
        "schema": 1, "kind": "crash", "node": NODE, "rank": 1, "line": "KeyError: 'one'", "source": "log",
        "numbers": {}, "sick": False, "consequence": False, "at": 50.0,
        "ranks": [{"rank": 1, "line": "KeyError: 'one'", "numbers": {}},
                  {"rank": 0, "line": "KeyError: 'zero'", "numbers": {}}],
    }  # fmt: skip


def test_a_kill_counted_by_the_kernel_is_the_hosts_memory(rig: Rig) -> None:
    rig.counters(3)
    rig.before()
    rig.counters(4)
    rig.rank(0, exit_code=None, signal="SIGKILL")
    rig.log("RuntimeError: Connection reset by peer\n")
    cause = rig.cause()
    assert (cause["kind"], cause["rank"], cause["sick"]) == ("host_oom", 0, False)
    assert cause["numbers"] == {"oom_kills": 1, "limit_bytes": 2**30, "peak_bytes": 2**30}


@pytest.mark.parametrize(("kills", "signal"), [(3, "SIGKILL"), (4, None), (None, "SIGKILL")])
def test_a_kill_by_somebody_else_is_not(rig: Rig, kills: int | None, signal: str | None) -> None:
    rig.counters(3)
    rig.before()
    rig.counters(kills)
    rig.rank(0, exit_code=None if signal else 1, signal=signal)
    cause = rig.cause()
    assert cause["kind"] == ("killed" if signal else "crash")
    assert (cause["rank"], cause["consequence"]) == (0, bool(signal))


def test_a_lost_gpu_that_the_monitor_saw_goes_before_what_the_program_made_of_it(rig: Rig) -> None:
    rig.rank(0)
    rig.log("Traceback (most recent call last):\nRuntimeError: CUDA error: unspecified launch failure\n")
    lost = {"event": "gpu_lost", "attempt": ATTEMPT, "time": 49.0, "gpu": {"index": 3, "uuid": "GPU-3", "lost": 15}}
    rig.peaks.write_text(json.dumps({**lost, "attempt": "other"}) + "\n")
    assert rig.cause()["kind"] == "illegal_access"
    rig.peaks.write_text(json.dumps(lost) + "\n{torn")
    cause = rig.cause()
    assert (cause["kind"], cause["sick"]) == ("gpu_lost", True)
    assert cause["line"] == "GPU 3 (GPU-3) was lost: NVML code 15"


def test_the_kernel_names_a_gpu_of_ours_not_a_neighbours(rig: Rig) -> None:
    rig.rank(0)
    gpus = [{"uuid": "GPU-a", "pci": "00000000:06:00.0"}]
    rig.peaks.write_text(json.dumps({"attempt": ATTEMPT, "gpus": gpus}))
    rig.kernel(["NVRM: Xid (PCI:0000:07:00): 95, pid=1, Uncontained", "NVRM: Xid (PCI:0000:06:00): 31, pid=1, MMU"])
    assert rig.cause()["kind"] == "crash"
    rig.kernel(["NVRM: Xid (PCI:0000:06:00): 95, pid=1, Uncontained"])
    cause = rig.cause()
    assert (cause["kind"], cause["sick"], cause["numbers"]) == ("ecc", True, {"xid": 95})


def test_shared_memory_that_is_full_is_named_with_its_size(rig: Rig) -> None:
    rig.log("RuntimeError: DataLoader worker (pid 81) is killed by signal: Bus error. It is possible that dataloader's")
    cause = rig.cause()
    assert cause["kind"] == "shm_full"
    assert cause["numbers"]["shm_bytes"] == shutil.disk_usage("/dev/shm").total
    assert "/dev/shm holds" in advice(cause)
    assert "--shm-size" in advice(cause)


def test_nothing_known_is_still_a_cause(rig: Rig) -> None:
    assert rig.cause(7)["line"] == f"the trainers of {NODE} ended with exit code 7"


def test_it_never_fails(rig: Rig, capfd: pytest.CaptureFixture[str]) -> None:
    (rig.attempt / "causes").write_text("a file where a folder should be")
    diagnose.write_cause(rig.directory, ATTEMPT, NODE, 1, None)
    assert "the cause remains unknown" in capfd.readouterr().err


def test_the_kernels_log_from_a_moment_on(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_bytes(b"6,1,1000000,-;early\n")
    assert kernel_lines(0.0, str(log)) == ["early"]
    assert kernel_lines(4e9, str(log)) == []
    assert kernel_lines(0.0, str(tmp_path / "none")) == []
