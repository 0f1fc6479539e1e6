"""`llmlaunch status --watch`: on a terminal drawn in place, in a pipe a line for each change."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from llmlaunch.cli.printed import say
from llmlaunch.cli.submitted import note_ends
from llmlaunch.launchers.base import Submission
from llmlaunch.watch.lines import JsonView, LineView
from llmlaunch.watch.loop import StatePoller, View, watch
from llmlaunch.watch.run_reader import RunReader
from llmlaunch.watch.screen import Screen
from llmlaunch.watch.terminal import TerminalView, can_draw

__all__ = ["watch_runs"]

FAILED = 1


def watch_runs(submissions: Sequence[Submission], as_json: bool, interval_seconds: float) -> int:
    """Watch runs until all have ended, or until Ctrl-C. Returns 1 if any of them ended without success, else 0."""
    poller = StatePoller(submissions, lambda line: say(line, err=True))
    readers = [RunReader(submission) for submission in submissions]
    view: View
    shown: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if can_draw() and not as_json:
        view = terminal = TerminalView()
        shown = terminal.shown()
    else:
        write = Screen(sys.stdout).say
        view = JsonView(write) if as_json else LineView(write)
    with shown, contextlib.suppress(KeyboardInterrupt):
        watch(poller, readers, view, interval_seconds, note_ends)
    failed = any(look.state.ended and look.state.phase != "succeeded" for look in poller.looks)
    return FAILED if failed else 0
