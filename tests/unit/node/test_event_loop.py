"""The loop of a node's program: signals, children, pipes and timers, one after the other, and no mistake ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from llmlaunch.node.event_loop import EventLoop

Events = list[object]
HEARD = (signal.SIGUSR1, signal.SIGTERM)


@pytest.fixture
def events() -> Events:
    return []


@pytest.fixture
def loop(events: Events) -> Iterator[EventLoop]:
    """It writes down what it calls. The signals of this process are as before in the end."""
    numbers = (*HEARD, signal.SIGCHLD)
    before = [signal.getsignal(number) for number in numbers]
    yield EventLoop(HEARD, events.append, lambda: events.append("child"))
    signal.set_wakeup_fd(-1)
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def pipe_of(data: bytes) -> int:
    """Return the end to read of a pipe that holds `data` and is closed at the other end."""
    read, write = os.pipe()
    os.write(write, data)
    os.close(write)
    return read


def test_signals_and_ends_of_children_are_taken_one_by_one(loop: EventLoop, events: Events) -> None:
    for number in HEARD:
        os.kill(os.getpid(), number)
    assert events == []  # never in the midst of other work
    subprocess.run([sys.executable, "-S", "-c", ""], check=True)
    loop.run(lambda: "child" in events)
    assert events == [*HEARD, "child"]


def test_what_has_come_so_far_can_be_taken_before_the_loop_runs(loop: EventLoop, events: Events) -> None:
    loop.take_pending()
    os.kill(os.getpid(), signal.SIGTERM)
    loop.take_pending()
    assert events == [signal.SIGTERM]


def test_a_pipe_is_read_to_its_end(loop: EventLoop) -> None:
    got: list[bytes] = []
    loop.read(pipe_of(b"a\nb\n"), got.append)
    ended: list[int] = []
    loop.after(0.3, lambda: ended.append(1))
    loop.run(lambda: bool(ended))
    assert b"".join(got) == b"a\nb\n"


def test_timers_are_called_in_time_and_end_with_the_run(loop: EventLoop, events: Events) -> None:
    loop.after(0.05, lambda: events.append("once"))
    loop.every(0.02, lambda: events.append("again"))
    loop.run(lambda: events.count("again") >= 5)
    assert events.count("once") == 1
    events.clear()
    loop.after(0.1, lambda: events.append("of the next run"))
    loop.run(lambda: "of the next run" in events)
    assert events == ["of the next run"]


def test_a_mistake_costs_one_event(loop: EventLoop, events: Events, capfd: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise KeyError("this one")

    loop.after(0.0, fails)
    loop.after(0.0, lambda: events.append("the next"))
    loop.run(lambda: bool(events))
    said = capfd.readouterr().err
    assert "a mistake of llmlaunch itself, which the training does not notice" in said
    assert "KeyError: 'this one'" in said


def test_a_drained_pipe_gives_what_it_holds_though_another_process_keeps_it_open(loop: EventLoop) -> None:
    read, write = os.pipe()
    got: list[bytes] = []
    loop.read(read, got.append)
    os.write(write, b"last words")
    loop.drain(read)
    loop.drain(read)  # nothing is left to forget
    assert got == [b"last words"]
    os.close(read)
    os.close(write)


def test_a_process_that_goes_on_writing_does_not_keep_the_loop(loop: EventLoop) -> None:
    with subprocess.Popen(["cat", "/dev/zero"], stdout=subprocess.PIPE) as endless:
        assert endless.stdout is not None
        loop.read(endless.stdout.fileno(), lambda data: None)
        loop.drain(endless.stdout.fileno())
        endless.kill()


def test_a_pipe_that_another_event_has_closed_is_not_read(loop: EventLoop, capfd: pytest.CaptureFixture[str]) -> None:
    """The end of a rank and its last words come at the same moment, and its pipe's number may be another file's by
    then."""
    pipes = [pipe_of(b"1"), pipe_of(b"2")]
    taken: list[bytes] = []

    def close_both(data: bytes) -> None:
        taken.append(data)
        for descriptor in pipes:
            loop.forget(descriptor)
            with suppress(OSError):
                os.close(descriptor)

    for descriptor in pipes:
        loop.read(descriptor, close_both)
    ended: list[int] = []
    loop.after(0.1, lambda: ended.append(1))
    loop.run(lambda: bool(ended))
    assert len(taken) == 1
    assert capfd.readouterr().err == ""
