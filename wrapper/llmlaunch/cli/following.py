"""Watch submitted runs to their end, then show how they ended, predicted against measured, and what to type next."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmlaunch.app.run_lookup import note_ends
from llmlaunch.cli.next_steps import after_end, run_path, while_going_on
from llmlaunch.cli.output import next_lines, notify, say_next
from llmlaunch.errors import UserError
from llmlaunch.launchers.base import JobState, Submission
from llmlaunch.launchers.run_files import can_be_resumed
from llmlaunch.report.run_text import advice_text, cause_text
from llmlaunch.report.text import paragraph
from llmlaunch.rundir import file_names
from llmlaunch.rundir.files import read_object
from llmlaunch.rundir.reached_steps import ended_before_first_step, run_step
from llmlaunch.rundir.run import begun_attempts
from llmlaunch.rundir.values import counted, to_type
from llmlaunch.store.location import stored_json
from llmlaunch.watch.screen import Screen, outliving_the_terminal

FAILED = 1


def follow_run(submission: Submission, raw: bool, json_on_stdout: bool) -> int:
    """Follow a run to its end, also where the terminal is closed on the way: the run is collected then, too. With
    `json_on_stdout` everything is written to stderr."""
    from llmlaunch.watch.follow import follow

    messages = Screen(sys.stderr, lasting=True)
    screen = messages if json_on_stdout else Screen(sys.stdout, lasting=True)
    with outliving_the_terminal():
        state = follow(submission, screen, raw)
        if not state.ended:
            return 0
        note_ends([(submission, state)], notify)
        _show_outcome(submission.run_dir, state, screen, messages)
    return 0 if state.phase == "succeeded" else FAILED


def follow_sweep(submissions: Sequence[Submission], json_on_stdout: bool) -> int:
    """Follow several runs to the end of the last, then collect them and show those that failed."""
    from llmlaunch.launchers.run_files import run_name
    from llmlaunch.watch.follow import follow_several

    messages = Screen(sys.stderr, lasting=True)
    screen = messages if json_on_stdout else Screen(sys.stdout, lasting=True)
    with outliving_the_terminal():
        states = follow_several(submissions, screen)
        ended = [submission for submission in submissions if states[submission.job_id].ended]
        for submission in ended:
            note_ends([(submission, states[submission.job_id])], notify)
        _collected([submission.run_dir for submission in ended], messages)
        failed = [submission for submission in ended if states[submission.job_id].phase != "succeeded"]
        for submission in failed:
            screen.say(f"{run_name(submission.run_dir)}:")
            for line in ending(submission.run_dir, states[submission.job_id]):
                screen.say(f"  {line}")
        screen.say(f"{len(ended) - len(failed)} of {counted(len(submissions), 'run')} succeeded")
        steps = [(to_type("runs"), "predicted against measured, run by run")]
        if failed:
            place = run_path(failed[0].run_dir)
            steps = [(to_type("logs", place, "--tail", 50), ""), (to_type("resume", place), ""), *steps]
        for line in next_lines(steps):
            screen.say(line)
    return FAILED if failed else 0


def watch_runs(submissions: Sequence[Submission], as_json: bool, interval_seconds: float) -> int:
    """Watch runs until all have ended, or Ctrl-C: drawn in place on a terminal, a line for each change in a pipe. What
    one run became is summed up when it has ended. Return 1 where one of them ended without success."""
    from llmlaunch.watch.loop import JsonView, LineView, StatePoller, View, watch
    from llmlaunch.watch.run_reader import RunReader

    poller = StatePoller(submissions, notify)
    readers = [RunReader(submission) for submission in submissions]
    view: View
    shown: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    screen = Screen(sys.stdout)
    if screen.live and not as_json:
        from llmlaunch.watch.frames import TerminalView

        view = terminal = TerminalView()
        shown = terminal.shown()
    else:
        view = JsonView(screen.say) if as_json else LineView(screen.say)
    with shown, contextlib.suppress(KeyboardInterrupt):
        watch(poller, readers, view, interval_seconds, lambda states: note_ends(states, notify))
    if not as_json and len(submissions) == 1:
        state = poller.looks[0].state
        if state.ended:
            _show_outcome(submissions[0].run_dir, state, screen, Screen(sys.stderr))
        else:
            say_next(*while_going_on(submissions[0].run_dir))
    failed = any(look.state.ended and look.state.phase != "succeeded" for look in poller.looks)
    return FAILED if failed else 0


def _show_outcome(run_dir: Path, state: JobState, screen: Screen, messages: Screen) -> None:
    """Collect the run; show how it ended, what was predicted of it beside what was measured, and what to type next."""
    from llmlaunch.report.outcome_text import outcome_lines, peaks_text
    from llmlaunch.store.location import where

    screen.say("")
    for line in ending(run_dir, state):
        screen.say(line)
    records = _collected([run_dir], messages)
    status = read_object(run_dir / file_names.STATUS) or {}
    layout = str(status.get("layout") or "")
    plan, run = (read_object(run_dir / layout / name) or {} for name in (file_names.PLAN, file_names.RUN))
    attempts = begun_attempts(run_dir)
    early = [attempt.name for attempt in attempts if ended_before_first_step(attempt)]
    reached = {**status, "step": run_step(attempts)}
    for line in outcome_lines(plan, run, reached, records, early):
        screen.say(line)
    if records:
        screen.say(peaks_text(records, str(run.get("peak_kind") or "device"), early))
        screen.say_folded(f"The record lies in {where().shown}, its files in {run_path(run_dir)}")
    for line in next_lines(after_end(run_dir, state, _cause(run_dir, state))):
        screen.say(line)


def _collected(run_dirs: Sequence[Path], messages: Screen) -> list[Mapping[str, Any]]:
    """Take the runs into the store, and return their measurements; none where the store cannot be used."""
    from llmlaunch.store.collect import collect
    from llmlaunch.store.database import open_store
    from llmlaunch.store.measurements import Filters, contents

    records: list[Mapping[str, Any]] = []
    try:
        with open_store() as store:
            for outcome in collect(store, run_dirs):
                messages.say(outcome.sentence())
                if outcome.run_id:
                    records += [stored_json(text) for text in contents(store, Filters(run=outcome.run_id))]
    except UserError as failure:  # how the run ended is shown all the same
        messages.say(f"warning: not collected: {failure}")
    return records


def _cause(run_dir: Path, state: JobState) -> Mapping[str, Any]:
    """Return what ended a run without success; empty where nobody knows."""
    status = (read_object(run_dir / file_names.STATUS) or {}) if state.phase in ("failed", "stopped") else {}
    cause = status.get("cause")
    return cause if isinstance(cause, dict) else {}


def ending(run_dir: Path, state: JobState) -> list[str]:
    """Return how the run ended, why, and what to do about it; the first line is `The run <phase>: <why>`."""
    cause = _cause(run_dir, state)
    why = [state.reason] if state.reason else []
    if cause and cause_text(cause) not in state.reason:
        why.insert(0, cause_text(cause))
    if cause.get("kind") == "crash":  # no more than a line somebody printed: the ranks' own ends say more
        why.reverse()
    scheduler = f" [{state.state}]" if state.state and state.phase != "succeeded" else ""
    lines = [f"The run {state.phase}{scheduler}" + (f": {why[0]}" if why else ""), *(f"  {more}" for more in why[1:])]
    return [*lines, *paragraph(advice_text(cause, submitted=can_be_resumed(run_dir)))]
