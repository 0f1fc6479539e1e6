"""Logs are read as they grow, by node and attempt, and from their end without reading what is before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmlaunch.launchers.base import Submission
from llmlaunch.launchers.logs import JobLogs


@pytest.fixture
def submission(tmp_path: Path) -> Submission:
    (tmp_path / "logs").mkdir()
    (tmp_path / "run.json").write_text(json.dumps({"nodes": 2}))
    return Submission("slurm", "12", tmp_path, 0.0)


def write(submission: Submission, name: str, text: str | bytes) -> None:
    with (submission.run_dir / "logs" / f"{name}.log").open("ab") as file:
        file.write(text.encode() if isinstance(text, str) else text)


@pytest.fixture
def one_node(submission: Submission) -> Submission:
    (submission.run_dir / "run.json").write_text(json.dumps({"nodes": 1}))
    return submission


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("long", [1, 100_000])  # longer than a block
@pytest.mark.parametrize("tail", [0, 2, 4])
def test_the_last_lines(submission: Submission, tail: int, long: int, ended: bool) -> None:
    lines = ["a" * long, "b" * long, "", "c" * long]
    write(submission, "12.0.node1", "\n".join(lines) + ("\n" if ended else ""))
    shown = list(JobLogs(submission, tail=tail).to_end())
    assert shown == [f"node1: {line}" for line in lines[len(lines) - tail :]]


def test_the_end_of_a_large_log_does_not_cost_its_length(submission: Submission) -> None:
    with (submission.run_dir / "logs" / "12.0.node1.log").open("wb") as file:
        file.truncate(2**40)  # a hole of 1 TiB
        file.seek(0, 2)
        file.write(b"\nstep 7\nstep 8\n")
    assert list(JobLogs(submission, tail=2).to_end()) == ["node1: step 7", "node1: step 8"]


def test_the_nodes_and_attempts_asked_for(submission: Submission) -> None:
    for attempt in ("12.0", "12.9", "12.10"):
        for node in ("job", "node2", "node10"):
            write(submission, f"{attempt}.{node}", f"{attempt}\n")
    assert list(JobLogs(submission).to_end()) == [
        f"{node}: {attempt}" for attempt in ("12.0", "12.9", "12.10") for node in ("job", "node2", "node10")
    ]
    last = JobLogs(submission, nodes=frozenset({"node10"}), attempts=frozenset({"12.10"}))
    assert list(last.to_end()) == ["node10: 12.10"]
    write(submission, "12.11.node10", "comes later\n")
    write(submission, "12.11.node2", "of another node\n")
    write(submission, "12.10.node10", "goes on\n")
    assert last.new_lines() == ["node10: goes on", "node10: comes later"]


def test_a_tail_goes_on_where_it_ended(submission: Submission) -> None:
    write(submission, "12.0.node1", "one\ntwo\n")
    logs = JobLogs(submission, tail=1)
    assert logs.new_lines() == ["node1: two"]
    write(submission, "12.0.node1", "three\n")
    write(submission, "12.1.node1", "four\nfive\n")  # came later: all of it is new
    assert logs.new_lines() == ["node1: three", "node1: four", "node1: five"]


def test_several_nodes_are_told_apart(submission: Submission) -> None:
    logs = JobLogs(submission)
    write(submission, "12.0.job", "begins\n")
    write(submission, "12.0.127.77.0.1", "one\n")
    write(submission, "12.0.node2.monitor", "not the training\n")
    write(submission, "120.0.node1", "another job\n")
    assert sorted(logs.new_lines()) == ["127.77.0.1: one", "job: begins"]
    write(submission, "12.1.node2", "after the requeue\n")
    assert logs.new_lines() == ["node2: after the requeue"]
    assert logs.new_lines() == []


def test_a_line_is_shown_when_it_is_whole(one_node: Submission) -> None:
    logs = JobLogs(one_node)
    write(one_node, "12.0.node1", "loss: 4.2 Größ".encode()[:-1])
    assert logs.new_lines() == []
    write(one_node, "12.0.node1", "ße\n 10%\r 50%\r100%\r\n".encode() + b"\xff\n")
    assert logs.new_lines()[1:] == ["100%", "�"]


def test_a_long_log_is_shown_whole_and_one_begun_again_from_its_start(one_node: Submission) -> None:
    logs = JobLogs(one_node)
    lines = [f"step {i} {'x' * 100}" for i in range(30_000)]  # more than one read of 1 MiB
    lines.insert(7, "y" * 3_000_000)  # and a line longer than one
    write(one_node, "12.0.node1", "\n".join(lines))
    assert list(logs.to_end()) == lines
    assert list(logs.to_end()) == []
    (one_node.run_dir / "logs" / "12.0.node1.log").write_text("short\n")
    assert logs.new_lines() == ["short"]
