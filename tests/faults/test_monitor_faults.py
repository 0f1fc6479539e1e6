"""The monitor may be killed, hang in the driver, or meet a disk that is full, refuses or hangs: what it wrote is kept,
what a disk refused comes later, and training goes on."""

from __future__ import annotations

import errno
import resource
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.node_rig import ATTEMPT, GIB, NODE, NodeRig, until
from support.soak import in_soak

pytestmark = pytest.mark.faults

SHORT_STALL = ("--stall-after", "0.2")
DRIVER_HANGS = "slow * us=600000000\n"  # ten minutes: no test waits for it
REFUSALS = (errno.EIO, *in_soak(errno.ENOSPC, errno.EROFS, errno.ESTALE, errno.EDQUOT))
NO_DIRECTORY = "a file where the directory should be"
LOST = "llmlaunch: monitor: the run directory cannot be written; what was measured since its last line is lost\n"


def events(node: NodeRig) -> list[str]:
    return [line["event"] for line in node.lines() if line["event"] != "beat"]


def peak_gib(line: dict[str, Any]) -> float:
    return float(line["gpus"][0]["device_peak_bytes"] / GIB)


def has_peak(gib: float, line: dict[str, Any]) -> bool:
    return bool(line.get("gpus")) and peak_gib(line) == gib


def terminated(monitor: Any) -> str:
    """What a monitor complained of that was told to end, and did so in order."""
    monitor.terminate()
    _, complaints = monitor.communicate()  # far less than a hang lasts
    assert monitor.returncode == 0
    return str(complaints)


def running(node: NodeRig, *options: str, **environment: str) -> Any:
    """A monitor that has seen 1 GiB in use."""
    node.scenario("gpu used=1G\n")
    monitor = node.monitor(*options, **environment)
    node.until_used(1.5)
    return monitor


def test_what_a_disk_refuses_is_written_once_it_is_well(gpu_node: NodeRig, faulty_disk: Path) -> None:
    monitor = running(gpu_node, **gpu_node.faulty(faulty_disk))
    for used, code in zip(range(10, 60, 10), REFUSALS, strict=False):
        gpu_node.disk(str(code))
        gpu_node.until_sampled(f"gpu used={used}G\n")
        gpu_node.until_sampled("gpu used=2G\n")
        assert all(peak_gib(line) < used for line in gpu_node.lines())
        gpu_node.disk("")
        gpu_node.until_line(f"{used} GiB", partial(has_peak, used + 0.5))
    end = gpu_node.stop(monitor)
    assert (end["event"], end["dropped"]) == ("end", 0)
    assert len(gpu_node.lines()) == len(gpu_node.peaks_path.read_text().splitlines())


def test_a_file_server_that_is_gone_from_the_start_and_comes_back_gets_every_peak(
    gpu_node: NodeRig, faulty_disk: Path
) -> None:
    gpu_node.disk("hang")
    gpu_node.scenario("gpu used=1G\n")
    monitor = gpu_node.monitor(**gpu_node.faulty(faulty_disk))
    gpu_node.until_sampled("gpu used=70G\n")  # it measures meanwhile
    gpu_node.until_sampled("gpu used=2G\n")
    gpu_node.disk("")
    gpu_node.until_used(2.5)
    assert (gpu_node.stop(monitor)["dropped"], peak_gib(gpu_node.lines()[-1])) == (0, 70.5)
    assert events(gpu_node) == ["start", "end"]


def test_a_file_server_that_is_gone_to_the_end_costs_what_was_not_written(gpu_node: NodeRig, faulty_disk: Path) -> None:
    """The monitor ends all the same and says so; also where a rank's record would have to be read there."""
    (gpu_node.run_directory / "attempts" / ATTEMPT / "ranks").mkdir(parents=True)
    monitor = running(gpu_node, **gpu_node.faulty(faulty_disk))
    gpu_node.disk("hang")
    gpu_node.rank("sleep", "600")
    gpu_node.until_sampled("gpu used=70G\n")
    assert terminated(monitor) == LOST
    assert (events(gpu_node), peak_gib(gpu_node.lines()[-1])) == (["start"], 1.5)


def test_a_driver_that_hangs_and_comes_back_and_hangs_to_the_end(gpu_node: NodeRig) -> None:
    gpu_node.rank("sleep", "600")
    monitor = running(gpu_node, *SHORT_STALL)
    gpu_node.until_line("the rank", lambda line: line.get("processes"))
    gpu_node.scenario("gpu used=1G\nslow nvmlDeviceGetMemoryInfo_v2 us=800000\n")
    gpu_node.until_event("nvml_stalled")
    gpu_node.scenario("gpu used=9G\n")
    gpu_node.until_event("nvml_back")
    gpu_node.until_used(9.5)
    gpu_node.scenario("gpu used=9G\n" + DRIVER_HANGS)
    until(lambda: events(gpu_node).count("nvml_stalled") == 2, "the second stall")
    before = len(gpu_node.lines())
    until(lambda: len(gpu_node.lines()) > before + 2, "lines during the stall")
    end = gpu_node.stop(monitor)  # waits far less than the hang lasts
    assert (end["event"], end["nvml_answered"], peak_gib(end)) == ("end", False, 9.5)
    assert end["processes"][0]["resident_bytes"] > 0


def test_a_driver_that_hangs_from_the_start(gpu_node: NodeRig) -> None:
    gpu_node.scenario("gpu\n" + DRIVER_HANGS)
    gpu_node.rank("sleep", "600")
    monitor = gpu_node.monitor(*SHORT_STALL)
    gpu_node.until_line("the rank", lambda line: line.get("processes"))
    end = gpu_node.stop(monitor)
    assert (end["gpus"], end["nvml_answered"]) == ([], False)
    assert events(gpu_node) == ["nvml_stalled", "start", "end"]


def test_sigkill_keeps_what_was_written_and_a_successor_closes_the_torn_line(gpu_node: NodeRig) -> None:
    gpu_node.scenario("gpu used=40G\n")
    monitor = gpu_node.monitor()
    gpu_node.until_used(40.5)
    monitor.kill()
    monitor.wait()
    assert peak_gib(gpu_node.lines()[-1]) == 40.5
    with gpu_node.peaks_path.open("a") as file:
        file.write('{"v":1,"event":"beat","gp')
    successor = running(gpu_node)
    gpu_node.stop(successor)
    assert events(gpu_node) == ["start", "start", "end"]


@pytest.mark.parametrize("fault", ["stopped", *in_soak("killed", "hung")])
def test_a_program_does_not_notice_what_becomes_of_the_monitor(gpu_node: NodeRig, fault: str) -> None:
    monitor = running(gpu_node, *SHORT_STALL)
    trainer = gpu_node.rank("sh", "-c", "read word; echo $word; exit 5")
    gpu_node.until_line("the rank", lambda line: line.get("processes"))
    if fault == "hung":
        gpu_node.scenario("gpu used=1G\n" + DRIVER_HANGS)
        gpu_node.until_event("nvml_stalled")
    else:
        monitor.send_signal(signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
    said, complained = trainer.communicate("trained\n")
    assert (trainer.returncode, said, complained) == (5, "trained\n", "")
    assert gpu_node.record()["exit_code"] == 5


def test_a_full_disk_tears_a_line_and_the_next_carries_all(gpu_node: NodeRig) -> None:
    gpu_node.scenario("gpu used=1G\n")
    monitor = gpu_node.monitor(setup=lambda: _limit_file_size(0, 4096))
    until(lambda: gpu_node.peaks_path.exists() and gpu_node.peaks_path.stat().st_size == 4096, "a full file")
    gpu_node.until_sampled("gpu used=70G\n")
    gpu_node.until_sampled("gpu used=2G\n")
    assert all(peak_gib(line) < 2 for line in gpu_node.lines())
    _limit_file_size(monitor.pid, resource.RLIM_INFINITY)
    assert peak_gib(gpu_node.until_used(2.5)) == 70.5
    assert gpu_node.stop(monitor)["dropped"] == 0


def test_a_disk_that_fills_up_does_not_change_a_programs_fate(cpu_node: NodeRig) -> None:
    trainer = cpu_node.rank("sh", "-c", "read word; exit 6")
    cpu_node.until_record()
    _limit_file_size(trainer.pid, 0)
    _, said = trainer.communicate("go\n")
    assert trainer.returncode == 6
    assert "not written" in said
    assert cpu_node.record()["ended_at"] is None  # the record of the start is whole
    assert [path.name for path in (cpu_node.attempt_directory / "ranks").iterdir()] == [f"{NODE}.jsonl"]


def test_a_run_directory_that_cannot_be_written_does_not_change_a_programs_fate(cpu_node: NodeRig) -> None:
    cpu_node.run_directory.write_text(NO_DIRECTORY)
    trainer = cpu_node.rank("sh", "-c", "kill -9 $$")
    _, said = trainer.communicate()
    assert trainer.returncode == -signal.SIGKILL
    assert said.count("not written: Not a directory") == 2  # at its start and at its end


def test_a_monitor_without_a_run_directory_exits_with_0(gpu_node: NodeRig) -> None:
    gpu_node.run_directory.write_text(NO_DIRECTORY)
    monitor = gpu_node.monitor()
    gpu_node.until_sampled("gpu used=1G\n")
    assert terminated(monitor) == LOST


def _limit_file_size(pid: int, size: int) -> None:
    """A full disk for one process alone (0: the caller): what it writes past `size` is refused."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
