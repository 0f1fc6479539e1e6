"""The monitor may be killed, hang in the driver or meet a full disk: what it knew is kept, training goes on."""

from __future__ import annotations

import resource
import signal

import pytest

from support.node_rig import GIB, NodeRig, until

pytestmark = pytest.mark.faults

SHORT_STALL = ("--stall-after", "0.2")
HANG = "slow * us=600000000\n"  # ten minutes: no test waits for it


def events(node: NodeRig) -> list[str]:
    return [line["event"] for line in node.lines() if line["event"] != "beat"]


def test_latency_in_every_call_neither_delays_nor_stops_it(gpu_node: NodeRig) -> None:
    gpu_node.scenario("gpu used=1G\ngpu used=2G\nslow * us=30000\n")
    monitor = gpu_node.monitor()
    gpu_node.until_used(1.5)
    gpu_node.scenario("gpu used=50G\ngpu used=60G\nslow * us=30000\n")
    gpu_node.until_used(60.5, index=1)
    end = gpu_node.stop(monitor)
    assert (end["event"], end["nvml_answered"]) == ("end", True)
    assert [gpu["device_peak_bytes"] for gpu in end["gpus"]] == [50 * GIB + GIB // 2, 60 * GIB + GIB // 2]
    assert events(gpu_node) == ["start", "end"]


def test_a_hung_driver_does_not_keep_it(gpu_node: NodeRig) -> None:
    gpu_node.scenario("gpu used=40G\n")
    gpu_node.rank("sleep", "600")
    monitor = gpu_node.monitor(*SHORT_STALL)
    gpu_node.until_used(40.5)
    gpu_node.scenario("gpu used=40G\n" + HANG)
    gpu_node.until_event("nvml_stalled")
    before = len(gpu_node.lines())
    until(lambda: len(gpu_node.lines()) > before + 2, "lines during the stall")
    end = gpu_node.stop(monitor)  # waits far less than the hang lasts
    assert (end["event"], end["nvml_answered"]) == ("end", False)
    assert end["gpus"][0]["device_peak_bytes"] == 40 * GIB + GIB // 2
    assert end["processes"][0]["resident_bytes"] > 0


def test_a_driver_that_hangs_from_the_start(gpu_node: NodeRig) -> None:
    gpu_node.scenario("gpu\n" + HANG)
    gpu_node.rank("sleep", "600")
    monitor = gpu_node.monitor(*SHORT_STALL)
    gpu_node.until_line("the rank", lambda line: line.get("processes"))
    end = gpu_node.stop(monitor)
    assert (end["gpus"], end["nvml_answered"]) == ([], False)
    assert events(gpu_node) == ["nvml_stalled", "start", "end"]


def test_a_driver_that_comes_back(gpu_node: NodeRig) -> None:
    gpu_node.scenario("gpu used=1G\n")
    monitor = gpu_node.monitor(*SHORT_STALL)
    gpu_node.until_used(1.5)
    gpu_node.scenario("gpu used=1G\nslow nvmlDeviceGetMemoryInfo_v2 us=800000\n")
    gpu_node.until_event("nvml_stalled")
    gpu_node.scenario("gpu used=9G\n")
    gpu_node.until_event("nvml_back")
    gpu_node.until_used(9.5)
    assert gpu_node.stop(monitor)["nvml_answered"]


def test_a_lost_gpu_is_told_and_the_others_go_on(gpu_node: NodeRig) -> None:
    gpu_node.scenario("gpu used=1G\ngpu used=2G\n")
    monitor = gpu_node.monitor()
    gpu_node.until_used(1.5)
    gpu_node.scenario("gpu used=30G\ngpu used=2G\nfail * gpu=1 code=15\n")
    lost = gpu_node.until_event("gpu_lost")["gpu"]
    gpu_node.until_used(30.5)
    first, second = gpu_node.stop(monitor)["gpus"]
    assert (lost["index"], lost["lost"], lost["device_peak_bytes"]) == (1, 15, 2 * GIB + GIB // 2)
    assert (first["lost"], first["device_peak_bytes"]) == (None, 30 * GIB + GIB // 2)
    assert (second["lost"], second["device_peak_bytes"]) == (15, 2 * GIB + GIB // 2)
    assert events(gpu_node).count("gpu_lost") == 1


def test_sigkill_keeps_what_was_written(gpu_node: NodeRig) -> None:
    gpu_node.scenario("gpu used=40G\n")
    monitor = gpu_node.monitor()
    gpu_node.until_used(40.5)
    monitor.kill()
    monitor.wait()
    assert gpu_node.lines()[-1]["gpus"][0]["device_peak_bytes"] == 40 * GIB + GIB // 2
    assert "end" not in events(gpu_node)


def test_a_successor_closes_the_line_its_predecessor_tore(gpu_node: NodeRig) -> None:
    gpu_node.scenario("gpu used=1G\n")
    gpu_node.peaks_path.parent.mkdir(parents=True)
    gpu_node.peaks_path.write_text('{"v":1,"event":"beat","gp')
    monitor = gpu_node.monitor()
    gpu_node.until_used(1.5)
    gpu_node.stop(monitor)
    assert events(gpu_node) == ["start", "end"]


@pytest.mark.parametrize("fault", ["killed", "hung", "stopped"])
def test_a_program_does_not_notice_what_becomes_of_the_monitor(gpu_node: NodeRig, fault: str) -> None:
    gpu_node.scenario("gpu used=1G\n")
    monitor = gpu_node.monitor(*SHORT_STALL)
    gpu_node.until_used(1.5)
    trainer = gpu_node.rank("sh", "-c", "read word; echo $word; exit 5")
    gpu_node.until_line("the rank", lambda line: line.get("processes"))
    if fault == "hung":
        gpu_node.scenario("gpu used=1G\n" + HANG)
        gpu_node.until_event("nvml_stalled")
    else:
        monitor.send_signal(signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
    said, complained = trainer.communicate("trained\n")
    assert (trainer.returncode, said, complained) == (5, "trained\n", "")
    assert gpu_node.record()["exit_code"] == 5


def test_two_full_disks_drop_lines_and_the_next_carries_all(gpu_node: NodeRig) -> None:
    gpu_node.scenario("gpu used=1G\n")
    monitor = gpu_node.monitor(setup=lambda: _limit_file_size(0, 4096))
    until(lambda: gpu_node.peaks_path.exists() and gpu_node.peaks_path.stat().st_size == 4096, "a full file")
    until(lambda: any(p.stat().st_size == 4096 for p in gpu_node.spool.glob("*/peaks/*.jsonl")), "a full spool")
    gpu_node.until_sampled("gpu used=70G\n")
    gpu_node.until_sampled("gpu used=2G\n")
    assert all(line["gpus"][0]["device_peak_bytes"] < 2 * GIB for line in gpu_node.lines())
    _limit_file_size(monitor.pid, resource.RLIM_INFINITY)
    line = gpu_node.until_used(2.5)
    assert line["gpus"][0]["device_peak_bytes"] == 70 * GIB + GIB // 2
    gpu_node.until_line("dropped lines", lambda line: line.get("dropped", 0) > 0)
    assert gpu_node.stop(monitor)["event"] == "end"


def test_a_disk_that_fills_up_does_not_change_a_programs_fate(cpu_node: NodeRig) -> None:
    trainer = cpu_node.rank("sh", "-c", "read word; exit 6")
    cpu_node.until_record()
    _limit_file_size(trainer.pid, 0)
    _, said = trainer.communicate("go\n")
    assert trainer.returncode == 6
    assert "not written" in said
    assert cpu_node.record()["ended_at"] is None  # the record of the start is whole
    assert [path.name for path in (cpu_node.attempt_directory / "ranks").iterdir()] == ["0.json"]


def test_a_run_directory_that_cannot_be_written_does_not_change_a_programs_fate(cpu_node: NodeRig) -> None:
    cpu_node.run_directory.write_text("a file where the directory should be")
    trainer = cpu_node.rank("sh", "-c", "kill -9 $$")
    _, said = trainer.communicate()
    assert trainer.returncode == -signal.SIGKILL
    assert said.count("not written: Not a directory") == 2  # at its start and at its end


def test_a_monitor_without_a_run_directory_exits_with_0(gpu_node: NodeRig) -> None:
    gpu_node.run_directory.write_text("a file where the directory should be")
    monitor = gpu_node.monitor()
    gpu_node.until_sampled("gpu used=1G\n")
    monitor.terminate()
    _, said = monitor.communicate()
    assert (monitor.returncode, said) == (0, "")
    assert gpu_node.spooled()[-1]["event"] == "end"  # for a later one, should the directory come back


def _limit_file_size(pid: int, size: int) -> None:
    """A full disk for one process alone (0: the caller): what it writes past `size` is refused."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
