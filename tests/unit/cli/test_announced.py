"""A command that keeps a person waiting says what it is doing, on a terminal alone."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from llmlaunch.cli.output import announced_after


class Terminal(io.StringIO):
    """A stream that says of itself that it is a terminal, and tells when something was written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        count = super().write(text)
        if "searching" in text:
            self.written.set()
        return count


def test_what_takes_long_is_announced_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with announced_after(0.0, "searching"):
        assert terminal.written.wait(60)
    assert terminal.getvalue() == "searching\n"


def test_what_is_done_in_time_is_not_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, before = Terminal(), threading.active_count()
    monkeypatch.setattr(sys, "stderr", terminal)
    with announced_after(3600.0, "searching"):
        pass
    assert terminal.getvalue() == ""
    for thread in threading.enumerate()[before:]:
        thread.join(60)
    assert threading.active_count() <= before


def test_a_log_gets_no_such_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    before = threading.active_count()
    with announced_after(0.0, "searching"):
        assert threading.active_count() == before
    assert stream.getvalue() == ""
