"""The monitor may be killed, hang in the driver, or meet a disk that is full, refuses or hangs: what it knew is kept,
no line is lost or there twice, and training goes on."""

from __future__ import annotations

import os
import resource
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.node_rig import ATTEMPT, GIB, NODE, NodeRig, until

pytestmark = pytest.mark.faults

SHORT_STALL = ("--stall-after", "0.2")
DRIVER_HANGS = "slow * us=600000000\n"  # ten minutes: no test waits for it
SHORT_HANG = ("--hang-after", "0.2")
REFUSALS = {"EIO": 5, "ENOSPC": 28, "EROFS": 30, "ESTALE": 116, "EDQUOT": 122}
NO_DIRECTORY = "a file where the directory should be"


def events(node: NodeRig) -> list[str]:
    return [line["event"] for line in node.lines() if line["event"] != "beat"]


def peak_gib(line: dict[str, Any]) -> float:
    return float(line["gpus"][0]["device_peak_bytes"] / GIB)


def assert_whole_and_once(node: NodeRig) -> None:
    """Every line of the file can be read, and none is there twice."""
    lines = node.peaks_path.read_bytes().splitlines()
    assert [line for line, times in Counter(lines).items() if times > 1] == []
    assert len(node.lines()) == len(lines)


def terminated(monitor: Any) -> str:
    """What a monitor complained of that was told to end, and did so in order."""
    monitor.terminate()
    _, complaints = monitor.communicate()  # far less than a hang lasts
    assert monitor.returncode == 0
    return str(complaints)


def started(node: NodeRig, faulty_disk: Path, *options: str) -> Any:
    """A monitor whose disk is well and that has seen 1 GiB in use."""
    return running(node, *options, **node.faulty(faulty_disk))


def running(node: NodeRig, *options: str, **environment: str) -> Any:
    """A monitor that has seen 1 GiB in use."""
    node.scenario("gpu used=1G\n")
    monitor = node.monitor(*options, **environment)
    node.until_used(1.5)
    return monitor


def until_spooled(node: NodeRig, gibibytes: int) -> None:
    """So much is in use from now on; waits for a line in the spool that says so."""
    node.until_sampled(f"gpu used={gibibytes}G\n")
    until(lambda: any(peak_gib(line) > gibibytes for line in node.spooled()), "a line in the spool")


def successor(node: NodeRig) -> None:
    """A monitor of another run of this user on this node comes and goes."""
    place = ("--run-dir", str(node.run_directory.with_name("other")), "--attempt", "1", "--node", NODE)
    other = node.start("monitor", *place)
    until(node.all_delivered, "the spool to be empty")
    assert terminated(other) == ""


def test_lines_that_a_disk_refuses_wait_on_the_node_until_it_is_well(gpu_node: NodeRig, faulty_disk: Path) -> None:
    monitor = started(gpu_node, faulty_disk)
    for used, code in zip(range(10, 60, 10), REFUSALS.values(), strict=True):
        gpu_node.disk(str(code))
        until_spooled(gpu_node, used)
        assert all(peak_gib(line) < used for line in gpu_node.lines())
        gpu_node.disk("")
        until(gpu_node.all_delivered, "delivery")
        gpu_node.until_used(used + 0.5)
    end = gpu_node.stop(monitor)
    assert (end["event"], end["dropped"]) == ("end", 0)
    assert_whole_and_once(gpu_node)


def test_a_monitor_that_could_not_write_to_the_end_leaves_it_to_its_successor(
    gpu_node: NodeRig, faulty_disk: Path
) -> None:
    gpu_node.scenario("gpu used=70G\n")
    gpu_node.disk(str(REFUSALS["EROFS"]))
    monitor = gpu_node.monitor(**gpu_node.faulty(faulty_disk))
    until(lambda: any(line["event"] == "beat" for line in gpu_node.spooled()), "a spooled beat")
    assert terminated(monitor) == ""
    assert gpu_node.lines() == []
    gpu_node.run_directory.mkdir(exist_ok=True)
    successor(gpu_node)
    every = [line["event"] for line in gpu_node.lines()]
    assert (every[0], every[-1], peak_gib(gpu_node.lines()[-1])) == ("start", "end", 70.5)
    assert_whole_and_once(gpu_node)


def test_what_a_killed_monitor_spooled_is_delivered_by_the_next_one(gpu_node: NodeRig, faulty_disk: Path) -> None:
    monitor = started(gpu_node, faulty_disk)
    gpu_node.disk(str(REFUSALS["ENOSPC"]))
    until_spooled(gpu_node, 70)
    monitor.kill()
    monitor.wait()
    (spooled,) = gpu_node.spool.glob("*/peaks/*.jsonl")
    with spooled.open("a") as file:
        file.write('{"v":1,"event":"beat","gp')  # it died over this line
    successor(gpu_node)
    assert peak_gib(gpu_node.lines()[-1]) == 70.5
    assert_whole_and_once(gpu_node)


def test_a_file_server_that_is_gone_does_not_keep_it(gpu_node: NodeRig, faulty_disk: Path) -> None:
    monitor = started(gpu_node, faulty_disk, *SHORT_HANG)
    gpu_node.disk("hang")
    until_spooled(gpu_node, 70)
    terminated(monitor)
    assert gpu_node.spooled()[-1]["event"] == "end"
    gpu_node.disk("")
    successor(gpu_node)
    assert events(gpu_node) == ["start", "end"]
    assert max(map(peak_gib, gpu_node.lines())) == 70.5
    assert_whole_and_once(gpu_node)


def test_a_file_server_that_is_gone_amid_a_delivery(gpu_node: NodeRig, faulty_disk: Path) -> None:
    """What was on its way waits in a file of its own, and arrives before what was said after it."""
    monitor = started(gpu_node, faulty_disk, *SHORT_HANG)
    gpu_node.disk(str(REFUSALS["EIO"]))
    until_spooled(gpu_node, 30)
    # Before the hang: the first that meets it may be a line, and no delivery begins behind that.
    until(lambda: any(gpu_node.spool.glob("*/peaks/*.taken.jsonl")), "a delivery")
    gpu_node.disk("hang")
    until_spooled(gpu_node, 70)
    terminated(monitor)
    gpu_node.disk("")
    successor(gpu_node)
    peaks = [peak_gib(line) for line in gpu_node.lines()]
    assert (peaks, set(peaks)) == (sorted(peaks), {1.5, 30.5, 70.5})
    assert gpu_node.lines()[-1]["event"] == "end"
    assert_whole_and_once(gpu_node)


def test_a_file_server_that_is_gone_from_the_start(gpu_node: NodeRig, faulty_disk: Path) -> None:
    gpu_node.scenario("gpu used=7G\n")
    gpu_node.disk("hang")
    monitor = gpu_node.monitor(*SHORT_HANG, **gpu_node.faulty(faulty_disk))
    until(lambda: any(line["event"] == "beat" for line in gpu_node.spooled()), "a spooled beat")
    terminated(monitor)
    assert [line["event"] for line in gpu_node.spooled() if line["event"] != "beat"] == ["start", "end"]


def test_a_file_server_that_comes_back(gpu_node: NodeRig, faulty_disk: Path) -> None:
    monitor = started(gpu_node, faulty_disk, *SHORT_HANG)
    gpu_node.disk("hang")
    until_spooled(gpu_node, 70)
    gpu_node.disk("")
    until(gpu_node.all_delivered, "delivery by the same monitor")
    gpu_node.until_sampled("gpu used=2G\n")
    gpu_node.until_used(2.5)
    assert gpu_node.stop(monitor)["dropped"] == 0
    assert_whole_and_once(gpu_node)


@pytest.mark.parametrize("trap", ["link", "foreign", "open"])
def test_a_trap_where_the_spool_should_be_is_left_alone(gpu_node: NodeRig, tmp_path: Path, trap: str) -> None:
    bait = tmp_path / "bait"
    bait.mkdir(mode=0o700)
    if trap == "link":
        gpu_node.spool.symlink_to(bait)
    else:
        bait.rename(gpu_node.spool)
        bait = gpu_node.spool
        os.chown(bait, *((12345, 12345) if trap == "foreign" else (-1, -1)))
        bait.chmod(0o777 if trap == "open" else 0o755)
    gpu_node.scenario("gpu used=1G\n")
    gpu_node.run_directory.write_text(NO_DIRECTORY)
    monitor = gpu_node.monitor()
    gpu_node.until_sampled("gpu used=2G\n")
    assert (terminated(monitor), list(bait.iterdir())) == ("", [])


def test_a_rank_record_on_a_server_that_is_gone_does_not_keep_it(gpu_node: NodeRig, faulty_disk: Path) -> None:
    (gpu_node.run_directory / "attempts" / ATTEMPT / "ranks").mkdir(parents=True)
    monitor = started(gpu_node, faulty_disk, *SHORT_HANG)
    gpu_node.disk("hang")
    gpu_node.rank("sleep", "600")
    gpu_node.until_sampled("gpu used=70G\n")
    terminated(monitor)
    gpu_node.disk("")
    successor(gpu_node)
    assert (gpu_node.lines()[-1]["event"], peak_gib(gpu_node.lines()[-1])) == ("end", 70.5)


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
    gpu_node.until_line("the rank", lambda line: line.get("processes"))
    gpu_node.scenario("gpu used=40G\n" + DRIVER_HANGS)
    gpu_node.until_event("nvml_stalled")
    before = len(gpu_node.lines())
    until(lambda: len(gpu_node.lines()) > before + 2, "lines during the stall")
    end = gpu_node.stop(monitor)  # waits far less than the hang lasts
    assert (end["event"], end["nvml_answered"]) == ("end", False)
    assert end["gpus"][0]["device_peak_bytes"] == 40 * GIB + GIB // 2
    assert end["processes"][0]["resident_bytes"] > 0


def test_a_driver_that_hangs_from_the_start(gpu_node: NodeRig) -> None:
    gpu_node.scenario("gpu\n" + DRIVER_HANGS)
    gpu_node.rank("sleep", "600")
    monitor = gpu_node.monitor(*SHORT_STALL)
    gpu_node.until_line("the rank", lambda line: line.get("processes"))
    end = gpu_node.stop(monitor)
    assert (end["gpus"], end["nvml_answered"]) == ([], False)
    assert events(gpu_node) == ["nvml_stalled", "start", "end"]


def test_a_driver_that_comes_back(gpu_node: NodeRig) -> None:
    monitor = running(gpu_node, *SHORT_STALL)
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
    assert terminated(monitor) == ""
    assert gpu_node.spooled()[-1]["event"] == "end"  # for a later one, should the directory come back


def _limit_file_size(pid: int, size: int) -> None:
    """A full disk for one process alone (0: the caller): what it writes past `size` is refused."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
