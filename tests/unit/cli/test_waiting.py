"""A command that keeps a person waiting says what it is doing and how far it is, on a terminal alone."""

from __future__ import annotations

import contextlib
import io
import sys
import threading

import pytest

from llmlaunch.cli.output import notify
from llmlaunch.cli.waiting import waiting_for
from llmlaunch.progress import counting, report


class Terminal(io.StringIO):
    """A stream that says of itself that it is a terminal, and waits until a text was written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = threading.Condition()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self.changed:
            count = super().write(text)
            self.changed.notify_all()
        return count

    def until(self, text: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: text in self.getvalue(), timeout=60), self.getvalue()

    def lines(self) -> list[str]:
        """Return what a person sees: a carriage return begins the line anew, and CSI K empties the rest of it."""
        return [line.rpartition("\r")[2].replace("\x1b[K", "") for line in self.getvalue().split("\n")]


def terminal_of(monkeypatch: pytest.MonkeyPatch, term: str = "xterm") -> Terminal:
    """Make stderr a terminal, in the test itself: pytest sets it anew between a fixture and its test."""
    monkeypatch.setenv("TERM", term)
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def test_what_takes_long_is_shown_with_its_count_and_is_gone_when_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    with waiting_for("collecting", 0.0):
        for number in counting("runs", ["a", "b", "c"]):
            if number == "b":
                terminal.until("collecting, runs 1 of 3, ")
    assert terminal.lines() == [""]


def test_of_many_a_share_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    with waiting_for("searching", 0.0):
        report("splits", 4000, 10_000)
        terminal.until("searching, splits 40%, ")


def test_what_is_counted_within_belongs_to_the_item_it_was_counted_for(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    with waiting_for("planning", 0.0), waiting_for("of an inner room", 0.0):
        report("clusters", 0, 2)
        report("splits", 7, 9)
        terminal.until("planning, clusters 0 of 2, splits 7 of 9, ")
        report("clusters", 1, 2)
        terminal.until("planning, clusters 1 of 2, ")
        assert "clusters 1 of 2, splits" not in terminal.getvalue()
    assert "inner" not in terminal.getvalue()


def test_a_message_has_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    with waiting_for("searching", 0.0):
        terminal.until("searching, ")
        notify("warning: something")
    assert "warning: something" in terminal.lines()


def test_a_terminal_that_cannot_write_over_a_line_gets_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch, "dumb")
    with waiting_for("searching", 0.0):
        terminal.until("searching")
    assert terminal.getvalue() == "searching ...\n"


def test_what_is_done_in_time_is_not_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    before = threading.active_count()
    with waiting_for("searching", 3600.0):
        pass
    assert terminal.getvalue() == ""
    assert threading.active_count() <= before


def test_a_mistake_ends_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    with contextlib.suppress(ValueError), waiting_for("searching", 0.0):
        terminal.until("searching")
        raise ValueError("a mistake")
    assert terminal.lines() == [""]


def test_a_log_gets_no_such_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    before = threading.active_count()
    with waiting_for("searching", 0.0):
        report("splits", 1, 2)
        assert threading.active_count() == before
    assert stream.getvalue() == ""
