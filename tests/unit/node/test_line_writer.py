"""A line on its way is written by the disk or kept by the spool, and arrives once whatever comes first."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from llmlaunch.node.files import PeaksFile
from llmlaunch.node.line_writer import LineWriter
from llmlaunch.node.local_spool import Spool

PEAKS = "peaks/node1.jsonl"


class Disk:
    """Does what it was given when the test says so."""

    def __init__(self) -> None:
        self.tasks: list[Callable[[], None]] = []
        self.waited = 0.0

    def give(self, task: Callable[[], None]) -> None:
        self.tasks.append(task)

    def waiting_seconds(self) -> float:
        return self.waited

    def finish(self, timeout_seconds: float) -> bool:
        self.work()
        return True

    def work(self) -> None:
        while self.tasks:
            self.tasks.pop(0)()


class Rig:
    def __init__(self, place: Path) -> None:
        self.run = place / "run"
        self.run.mkdir()
        self.disk = Disk()
        self.spool = Spool(place / "spool", self.run)
        self.outbox = LineWriter(self.disk, PeaksFile(self.run / PEAKS), self.spool, PEAKS, 5.0, 0.0)  # type: ignore[arg-type]

    def arrived(self) -> list[int]:
        path = self.run / PEAKS
        return [json.loads(line)["n"] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_lines_arrive_in_order(rig: Rig) -> None:
    for number in range(3):
        rig.outbox.put({"n": number})
    rig.outbox.finish(1)
    assert rig.arrived() == [0, 1, 2]


def test_a_delivery_between_two_lines_that_hang_doubles_neither(rig: Rig) -> None:
    rig.outbox.put({"n": 0})
    rig.outbox.settle()  # asks for a delivery, behind the line that hangs
    rig.outbox.put({"n": 1})
    rig.disk.waited = 9
    rig.outbox.settle()
    rig.outbox.put({"n": 2})
    rig.disk.waited = 0
    rig.disk.work()
    rig.outbox.put({"n": 3})
    rig.outbox.finish(1)
    assert sorted(rig.arrived()) == [0, 1, 2, 3]
    assert rig.outbox.dropped == 0


def test_what_is_refused_is_kept_and_delivered(rig: Rig) -> None:
    rig.run.rmdir()
    rig.run.write_text("a file where the directory should be")
    rig.outbox.put({"n": 0})
    rig.disk.work()
    rig.outbox.settle()
    rig.disk.work()
    rig.run.unlink()
    rig.run.mkdir()
    rig.outbox.put({"n": 1})
    rig.outbox.finish(1)
    assert sorted(rig.arrived()) == [0, 1]


def test_what_neither_takes_is_counted_once_and_written_if_the_server_comes_back(rig: Rig) -> None:
    rig.spool.folder.parent.write_text("no spool, either")
    rig.outbox.put({"n": 0})
    rig.disk.waited = 9
    rig.outbox.settle()
    rig.outbox.settle()
    assert rig.outbox.dropped == 1
    rig.disk.waited = 0
    rig.disk.work()
    assert rig.arrived() == [0]
