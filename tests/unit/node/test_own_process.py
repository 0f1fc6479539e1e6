"""Work in a child process: whatever becomes of it, its parent goes on with what it was told."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from llmlaunch.node.own_process import answer_within
from support.node_rig import PATIENCE_SECONDS

LONG_ENOUGH, SHORT = PATIENCE_SECONDS, 1.0


def endless_list() -> list[Any]:
    shared: list[Any] = [1] * 10
    for _ in range(60):
        shared = [shared] * 10
    return shared


def raise_memory_error() -> None:
    raise MemoryError("no more")


def recurse() -> Any:
    return recurse()


def test_what_it_returns_is_the_answer() -> None:
    assert answer_within(LONG_ENOUGH, lambda tell: {"kind": "oom", "numbers": {"gpu": 3}}) == (
        {"kind": "oom", "numbers": {"gpu": 3}},
        "",
    )
    assert answer_within(LONG_ENOUGH, lambda tell: None) == (None, "")
    assert answer_within(LONG_ENOUGH, lambda tell: ["x" * 1_000_000]) == (["x" * 1_000_000], "")


@pytest.mark.parametrize(
    ("act", "problem"),
    [
        pytest.param(lambda: 1 // 0, "ZeroDivisionError: integer division or modulo by zero", id="an exception"),
        pytest.param(recurse, "RecursionError: maximum recursion depth exceeded", id="recursion"),
        pytest.param(raise_memory_error, "MemoryError: no more", id="memory"),
        pytest.param(lambda: sys.exit(3), "SystemExit: 3", id="an exit"),
        pytest.param(lambda: os.kill(os.getpid(), signal.SIGSEGV), "was ended by signal 11", id="a crash"),
        pytest.param(lambda: os.kill(os.getpid(), signal.SIGKILL), "was ended by signal 9", id="the kernel"),
    ],
)
def test_what_it_told_before_it_failed_is_kept(act: Callable[[], Any], problem: str) -> None:
    def work(tell: Callable[[Any], None]) -> Any:
        tell({"known": 1})
        tell({"known": 2})
        return act()

    answer = answer_within(LONG_ENOUGH, work)
    assert answer.value == {"known": 2}
    assert answer.problem.startswith(problem)


@pytest.mark.parametrize(
    "act",
    [
        pytest.param(lambda: time.sleep(PATIENCE_SECONDS), id="waiting"),
        pytest.param(lambda: len(str(endless_list())), id="a text without end"),
        pytest.param(lambda: __import__("re").match("(a+)+b", "a" * 60), id="an expression without end"),
    ],
)
def test_what_does_not_end_in_time_is_ended(act: Callable[[], Any]) -> None:
    def work(tell: Callable[[Any], None]) -> Any:
        tell("known")
        return act()

    assert answer_within(SHORT, work) == ("known", f"not done within {SHORT:g} s")


def test_it_keeps_no_pipe_of_its_parent_open() -> None:
    """The job script waits until nobody can write to the output of `finish` any more."""
    reader, writer = os.pipe()
    answer = answer_within(LONG_ENOUGH, lambda tell: os.path.exists(f"/proc/self/fd/{writer}"))  # noqa: PTH110
    os.close(writer)
    assert answer == (False, "")
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_what_is_no_json_is_a_problem() -> None:
    answer = answer_within(LONG_ENOUGH, lambda tell: object())
    assert (answer.value, answer.problem[:10]) == (None, "TypeError:")


def test_signals_that_are_blocked_here_end_it_all_the_same() -> None:
    """As in the process that observes a command."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        assert answer_within(SHORT, lambda tell: time.sleep(PATIENCE_SECONDS)).problem
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_without_a_process_to_spare_there_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    assert answer_within(LONG_ENOUGH, lambda tell: 1) == (
        None,
        "BlockingIOError: [Errno 11] Resource temporarily unavailable",
    )
