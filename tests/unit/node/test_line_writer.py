"""A line waits in memory until the run directory takes it: in order, once, and no peak is lost while lines wait."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from llmlaunch.node import line_writer
from llmlaunch.node.files import PeaksFile
from llmlaunch.node.line_writer import DiskThread, LineWriter


class Disk(DiskThread):
    """Does what it was given when the test says so: until then it hangs."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks: list[Callable[[], None]] = []

    def give(self, task: Callable[[], None]) -> None:
        self.tasks.append(task)

    def finish(self, timeout_seconds: float) -> bool:
        self.work()
        return True

    def work(self) -> None:
        while self.tasks:
            self.tasks.pop(0)()


class Rig:
    def __init__(self, place: Path) -> None:
        self.peaks = place / "run" / "peaks" / "node1.jsonl"
        self.disk = Disk()
        self.writer = LineWriter(self.disk, PeaksFile(self.peaks), 0.0)

    def put(self, *events: str) -> None:
        for event in events:
            self.writer.put({"event": event.partition(" ")[0], "name": event})

    def arrived(self) -> list[str]:
        text = self.peaks.read_text() if self.peaks.is_file() else ""
        return [json.loads(line)["name"] for line in text.splitlines()]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_lines_arrive_in_order_and_a_beat_replaces_one_that_still_waits(rig: Rig) -> None:
    rig.put("start", "beat 1", "gpu_lost", "beat 2", "pace", "beat 3", "end")
    assert len(rig.disk.tasks) == 1  # a disk that hangs is asked once
    assert rig.writer.finish(1)
    assert (rig.arrived(), rig.writer.dropped) == (["start", "gpu_lost", "pace", "end"], 0)


def test_what_is_refused_is_tried_again_until_it_is_taken(rig: Rig) -> None:
    rig.peaks.parent.parent.write_text("a file where the run directory should be")
    rig.put("start", "beat 1")
    rig.disk.work()
    rig.writer.settle()
    rig.disk.work()
    rig.peaks.parent.parent.unlink()
    rig.writer.settle()
    rig.disk.work()
    assert rig.arrived() == ["start", "beat 1"]


def test_the_end_gives_up_on_a_disk_that_refuses_and_says_so(rig: Rig) -> None:
    rig.peaks.parent.parent.write_text("a file where the run directory should be")
    rig.put("end")
    assert not rig.writer.finish(0.0)


def test_where_too_many_wait_the_oldest_pace_is_given_up_and_the_newest_peaks_stay(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_writer, "MOST_WAITING", 3)
    rig.put("start", "pace 1", "pace 2", "beat 1", "pace 3", "beat 2", "gpu_lost")
    rig.writer.finish(1)
    assert (rig.arrived(), rig.writer.dropped) == (["start", "beat 2", "gpu_lost"], 3)
