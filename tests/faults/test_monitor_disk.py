"""The run directory's disk refuses, hangs or comes back: no line is lost, none is there twice."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.node_rig import ATTEMPT, GIB, NODE, NodeRig, until

pytestmark = pytest.mark.faults

HANG = ("--hang-after", "0.2")
REFUSALS = {"EIO": 5, "ENOSPC": 28, "EROFS": 30, "ESTALE": 116, "EDQUOT": 122}


def peak_gib(line: dict[str, Any]) -> float:
    return float(line["gpus"][0]["device_peak_bytes"] / GIB)


def assert_whole_and_once(node: NodeRig) -> None:
    """Every line of the file can be read, and none is there twice."""
    lines = node.peaks_path.read_bytes().splitlines()
    assert [line for line, times in Counter(lines).items() if times > 1] == []
    assert len(node.lines()) == len(lines)


def started(node: NodeRig, faulty_disk: Path, *options: str) -> Any:
    """A monitor whose disk is well and that has seen 1 GiB in use."""
    node.scenario("gpu used=1G\n")
    monitor = node.monitor(*options, **node.faulty(faulty_disk))
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
    other.terminate()
    _, said = other.communicate()
    assert (other.returncode, said) == (0, "")


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
    monitor.terminate()
    _, said = monitor.communicate()
    assert (monitor.returncode, said) == (0, "")
    assert gpu_node.lines() == []
    gpu_node.run_directory.mkdir(exist_ok=True)
    successor(gpu_node)
    events = [line["event"] for line in gpu_node.lines()]
    assert (events[0], events[-1], peak_gib(gpu_node.lines()[-1])) == ("start", "end", 70.5)
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
    monitor = started(gpu_node, faulty_disk, *HANG)
    gpu_node.disk("hang")
    until_spooled(gpu_node, 70)
    monitor.send_signal(signal.SIGTERM)
    monitor.communicate()  # far less than the hang lasts
    assert monitor.returncode == 0
    assert gpu_node.spooled()[-1]["event"] == "end"
    gpu_node.disk("")
    successor(gpu_node)
    assert [line["event"] for line in gpu_node.lines() if line["event"] != "beat"] == ["start", "end"]
    assert max(map(peak_gib, gpu_node.lines())) == 70.5
    assert_whole_and_once(gpu_node)


def test_a_file_server_that_is_gone_amid_a_delivery(gpu_node: NodeRig, faulty_disk: Path) -> None:
    """What was on its way waits in a file of its own, and arrives before what was said after it."""
    monitor = started(gpu_node, faulty_disk, *HANG)
    gpu_node.disk(str(REFUSALS["EIO"]))
    until_spooled(gpu_node, 30)
    gpu_node.disk("hang")
    until(lambda: any(gpu_node.spool.glob("*/peaks/*.taken.jsonl")), "a delivery")
    until_spooled(gpu_node, 70)
    monitor.terminate()
    monitor.communicate()
    gpu_node.disk("")
    successor(gpu_node)
    peaks = [peak_gib(line) for line in gpu_node.lines()]
    assert (peaks, set(peaks)) == (sorted(peaks), {1.5, 30.5, 70.5})
    assert gpu_node.lines()[-1]["event"] == "end"
    assert_whole_and_once(gpu_node)


def test_a_file_server_that_is_gone_from_the_start(gpu_node: NodeRig, faulty_disk: Path) -> None:
    gpu_node.scenario("gpu used=7G\n")
    gpu_node.disk("hang")
    monitor = gpu_node.monitor(*HANG, **gpu_node.faulty(faulty_disk))
    until(lambda: any(line["event"] == "beat" for line in gpu_node.spooled()), "a spooled beat")
    monitor.terminate()
    monitor.communicate()
    assert monitor.returncode == 0
    assert [line["event"] for line in gpu_node.spooled() if line["event"] != "beat"] == ["start", "end"]


def test_a_file_server_that_comes_back(gpu_node: NodeRig, faulty_disk: Path) -> None:
    monitor = started(gpu_node, faulty_disk, *HANG)
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
    gpu_node.run_directory.write_text("a file where the directory should be")
    monitor = gpu_node.monitor()
    gpu_node.until_sampled("gpu used=2G\n")
    monitor.terminate()
    _, said = monitor.communicate()
    assert (monitor.returncode, said, list(bait.iterdir())) == (0, "", [])


def test_a_rank_record_on_a_server_that_is_gone_does_not_keep_it(gpu_node: NodeRig, faulty_disk: Path) -> None:
    gpu_node.scenario("gpu used=1G\n")
    (gpu_node.run_directory / "attempts" / ATTEMPT / "ranks").mkdir(parents=True)
    monitor = gpu_node.monitor(*HANG, **gpu_node.faulty(faulty_disk))
    gpu_node.until_used(1.5)
    gpu_node.disk("hang")
    gpu_node.rank("sleep", "600")
    gpu_node.until_sampled("gpu used=70G\n")
    monitor.terminate()
    monitor.communicate()
    assert monitor.returncode == 0
    gpu_node.disk("")
    successor(gpu_node)
    assert (gpu_node.lines()[-1]["event"], peak_gib(gpu_node.lines()[-1])) == ("end", 70.5)
