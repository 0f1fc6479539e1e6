"""Logs are read for steps, new bytes only, whatever becomes of the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmlaunch.backends.base import ProgressLines
from llmlaunch.backends.logs import any_script_lines, deepspeed_lines
from llmlaunch.node.progress import MOST_BYTES_A_LOOK, NodeLogs
from llmlaunch.rundir.step_lines import LONGEST_LINE
from support.step_lines import parser_of

ATTEMPT = "17.0"


class Logs:
    """The logs of one attempt, and their reader."""

    def __init__(self, directory: Path, lines: ProgressLines) -> None:
        self.directory = directory
        self.reader = NodeLogs(directory, ATTEMPT, parser_of(lines), nodes=100)

    def path(self, node: str) -> Path:
        return self.directory / f"{ATTEMPT}.{node}.log"

    def write(self, text: bytes, node: str = "node1") -> None:
        with self.path(node).open("ab") as file:
            file.write(text)

    def steps(self, everywhere: bool = False) -> list[int | None]:
        return [step.step for step in self.reader.look(everywhere).steps]


@pytest.fixture
def logs(tmp_path: Path) -> Logs:
    return Logs(tmp_path, deepspeed_lines())


def step(number: int) -> bytes:
    return f"step {number}/40 | loss 3.1 | 0.52 s/step | 1969 tokens/s\n".encode()


def test_only_new_lines_are_read(logs: Logs) -> None:
    logs.write(step(1) + step(2))
    assert logs.steps() == [1, 2]
    assert logs.steps() == []
    logs.write(step(3))
    assert logs.steps() == [3]


def test_a_torn_line_is_read_when_it_is_whole(logs: Logs) -> None:
    logs.write(step(1)[:20])
    assert logs.steps() == []
    logs.write(step(1)[20:])
    assert logs.steps() == [1]


def test_a_progress_bar_goes_back_to_the_start_of_its_line(tmp_path: Path) -> None:
    logs = Logs(tmp_path, any_script_lines(40))
    logs.write(b"\r  1/40 [00:01<00:39,  1.0it/s]\r  2/40 [00:02<00:38,  1.0it/s]\r")
    assert logs.steps() == [1, 2]


def test_logs_of_other_attempts_of_the_job_and_of_the_monitor_are_not_read(logs: Logs) -> None:
    for name in ("17.1.node1.log", f"{ATTEMPT}.job.log", f"{ATTEMPT}.node1.monitor.log", "117.0.node1.log"):
        (logs.directory / name).write_bytes(step(9))
    assert logs.steps(everywhere=True) == []


def test_files_that_come_late_are_cut_or_replaced(logs: Logs) -> None:
    assert logs.steps() == []
    logs.write(step(1) + step(2))
    assert logs.steps() == [1, 2]
    logs.path("node1").write_bytes(step(3))
    assert logs.steps() == [3]
    fresh = logs.directory / "fresh"
    fresh.write_bytes(step(4) + step(5))
    fresh.replace(logs.path("node1"))
    assert logs.steps() == [4, 5]
    logs.path("node1").unlink()
    assert logs.steps() == []


def test_an_unreadable_directory_and_a_folder_in_a_logs_place_are_no_news(logs: Logs) -> None:
    logs.path("node1").mkdir()
    assert logs.steps() == []
    logs.path("node1").rmdir()
    logs.directory.rmdir()
    assert logs.steps(everywhere=True) == []


def test_noise_is_read_from_its_end(logs: Logs) -> None:
    logs.write(step(1))
    assert logs.steps() == [1]
    with logs.path("node1").open("ab") as file:
        file.truncate(100 * 2**20)  # zeros: one line of 100 MB
    logs.write(b"\n" + b"\xff" * MOST_BYTES_A_LOOK + b"\n" + step(2))
    assert logs.steps() == [2]
    logs.write(b"x" * 2 * LONGEST_LINE)
    assert logs.steps() == []
    logs.write(b"x\n" + step(3))
    assert logs.steps() == [3]


def test_whoever_speaks_is_read_at_every_look_and_the_others_in_turn(logs: Logs) -> None:
    nodes = [f"node{number:03}" for number in range(100)]
    for node in nodes:
        logs.write(b"starting\n", node)
    logs.write(step(1), nodes[-1])
    looks = [logs.steps() for _ in range(4)]
    assert looks.count([1]) == 1
    logs.write(step(2), nodes[-1])
    assert logs.steps() == [2]
    logs.write(b"saving step 2\n", nodes[0])
    assert any(logs.reader.look().slow for _ in range(30))
    logs.write(b"saving step 2\n", nodes[0])
    assert logs.reader.look().slow
    logs.write(step(3), nodes[50])
    assert logs.steps(everywhere=True) == [3]
