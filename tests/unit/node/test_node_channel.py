"""The two ends of the way between the job and its nodes: whole lines, whatever is sent, and nobody waits."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import pytest

from llmlaunch.node.node_channel import (
    LONGEST_LINE_BYTES,
    MOST_WAITING_LINES,
    LineReader,
    LineSender,
    StepForwarder,
    step_news,
)
from llmlaunch.rundir.step_lines import Step, StepNews


class Channel:
    """A pipe with a sender at one end."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()
        os.set_blocking(self.read_end, False)
        self.sender = LineSender(self.write_end, "node1 ")
        self.lines: list[str] = []
        self._reader = LineReader(self.lines.append)

    def receive(self) -> list[str]:
        """Take what the pipe holds."""
        while True:
            try:
                data = os.read(self.read_end, 2**16)
            except BlockingIOError:
                return self.lines
            self._reader.take(data)

    def news(self) -> list[StepNews]:
        return [step_news(line.partition(" steps ")[2]) for line in self.receive()]


@pytest.fixture
def channel() -> Iterator[Channel]:
    channel = Channel()
    yield channel
    os.close(channel.read_end)
    os.close(channel.write_end)


def test_a_line_has_the_nodes_name_and_never_a_second_one_in_it(channel: Channel) -> None:
    channel.sender.send("ended", 0)
    channel.sender.send("told", "a\nnode2 ended 0")
    assert channel.receive() == ["node1 ended 0", "node1 told a node2 ended 0"]


def test_a_long_line_is_cut_at_a_thousand_bytes_with_the_name_and_the_line_end(channel: Channel) -> None:
    channel.sender.send("told", "ü" * 5000)
    data = os.read(channel.read_end, 2**16)
    assert (len(data), data[-1:], data.count(b"\n")) == (LONGEST_LINE_BYTES, b"\n", 1)
    LineReader(channel.lines.append).take(data)
    assert channel.lines[0].startswith("node1 told üü")


def test_who_does_not_read_holds_nobody_up_and_hears_the_newest_lines_in_order(channel: Channel) -> None:
    for number in range(20_000):
        channel.sender.send(number)
    first = len(channel.receive())
    channel.sender.send("last")
    numbers = [line.partition(" ")[2] for line in channel.receive()]
    assert numbers[:first] == [str(number) for number in range(first)]
    kept = [*range(20_000 - MOST_WAITING_LINES + 1, 20_000), "last"]
    assert numbers[first:] == [str(number) for number in kept][: len(numbers) - first]


def test_nobody_at_the_other_end_is_no_mistake() -> None:
    read, write = os.pipe()
    sender = LineSender(write)
    os.close(read)
    sender.send("ended", 0)
    os.close(write)
    sender.send("ended", 0)


def test_lines_come_whole_however_they_were_cut() -> None:
    lines: list[str] = []
    reader = LineReader(lines.append)
    for byte in b"node1 alive\nnode2 \xff\nnode":
        reader.take(bytes([byte]))
    assert lines == ["node1 alive", "node2 �"]


def test_what_never_ends_is_not_kept_whole() -> None:
    lines: list[str] = []
    reader = LineReader(lines.append)
    for _ in range(100):
        reader.take(b"x" * 2**16)
    reader.take(b"\nnode1 alive\n")
    assert len(lines[0]) <= 2**16
    assert lines[1] == "node1 alive"


def step(number: int | None, loss: float | None = None) -> Step:
    return Step(number, 40, loss)


def test_of_ranks_that_all_report_a_step_one_is_enough_and_a_loss_is_worth_another(channel: Channel) -> None:
    forwarder = StepForwarder(channel.sender)
    for said in (step(1), step(1), step(1, 3.0), step(1, 3.0), step(1), step(2, 2.0)):
        forwarder.forward(StepNews([said], False))
    assert [news.steps for news in channel.news()] == [[step(1)], [step(1, 3.0)], [step(2, 2.0)]]


def test_steps_without_a_number_all_go_up(channel: Channel) -> None:
    StepForwarder(channel.sender).forward(StepNews([step(None), step(None)], False))
    assert channel.news()[0].steps == [step(None), step(None)]


def test_a_loss_that_is_no_number_arrives_as_such(channel: Channel) -> None:
    StepForwarder(channel.sender).forward(StepNews([step(3, math.nan), step(4, math.inf)], False))
    first, second = channel.news()[0].steps
    assert math.isnan(first.loss or 0.0)
    assert second.loss == math.inf


def test_many_steps_go_up_in_lines_that_stay_whole_and_slow_comes_with_the_last(channel: Channel) -> None:
    steps = [Step(number, 10**12, 1.2345678901234567 * number) for number in range(100)]
    StepForwarder(channel.sender).forward(StepNews(steps, True))
    news = channel.news()
    assert [item for part in news for item in part.steps] == steps
    assert [part.slow for part in news] == [False] * 12 + [True]


def test_that_something_slow_begins_goes_up_without_a_step(channel: Channel) -> None:
    forwarder = StepForwarder(channel.sender)
    forwarder.forward(StepNews([], True))
    forwarder.forward(StepNews([], False))
    assert channel.news() == [StepNews([], True)]


@pytest.mark.parametrize(
    "text", ["", "{}", "[1, 2]", "[[[1]], false]", '[[["x", 1]], false]', "[[[1, 2, 3, 4, 5, 6, 7]], 0]"]
)
def test_what_nobody_has_sent_is_refused(text: str) -> None:
    with pytest.raises((ValueError, TypeError, IndexError)):
        step_news(text)
