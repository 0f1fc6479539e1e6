"""`llmlaunch status --watch`: on a terminal drawn in place, in a pipe a line for each change."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

from llmlaunch.cli.printed import say
from llmlaunch.cli.submitted import note_ends
from llmlaunch.launchers.base import Submission
from llmlaunch.watch.loop import JsonView, PlainView, View, watch
from llmlaunch.watch.poller import Asked
from llmlaunch.watch.screen import Screen
from llmlaunch.watch.terminal import TerminalView, can_draw

__all__ = ["watch_runs"]

FAILED = 1


def watch_runs(submissions: Sequence[Submission], as_json: bool, interval_seconds: float) -> int:
    """Until all have ended, or Ctrl-C. 1: one of them ended without success."""
    asked = Asked(submissions, lambda line: say(line, err=True))  # it may speak, before anything is drawn
    view: View
    shown: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if can_draw() and not as_json:
        view = terminal = TerminalView()
        shown = terminal.shown()
    else:
        write = Screen(sys.stdout).say
        view = JsonView(write) if as_json else PlainView(write)
    with shown:
        looks = watch(asked, view, interval_seconds, note_ends)
    return FAILED if any(look.state.ended and look.state.phase != "succeeded" for look in looks) else 0
