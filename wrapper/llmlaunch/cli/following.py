"""Watch submitted runs to their end, then show how they ended, and predicted against measured memory."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmlaunch.app.run_lookup import note_ends
from llmlaunch.cli.output import notify
from llmlaunch.launchers.base import JobState, Submission
from llmlaunch.report.run_text import cause_text
from llmlaunch.report.text import signed_percent, table
from llmlaunch.rundir import file_names
from llmlaunch.rundir.files import read_object
from llmlaunch.rundir.values import counted, to_type
from llmlaunch.units import gib
from llmlaunch.watch.screen import Screen, outliving_the_terminal

__all__ = ["follow_run", "follow_sweep", "watch_runs"]

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
    from llmlaunch.store.collect import collect
    from llmlaunch.store.database import open_store
    from llmlaunch.watch.follow import follow_several

    messages = Screen(sys.stderr, lasting=True)
    screen = messages if json_on_stdout else Screen(sys.stdout, lasting=True)
    with outliving_the_terminal():
        states = follow_several(submissions, screen)
        ended = [submission for submission in submissions if states[submission.job_id].ended]
        for submission in ended:
            note_ends([(submission, states[submission.job_id])], notify)
        with open_store() as store:
            for outcome in collect(store, [submission.run_dir for submission in ended]):
                messages.say(outcome.sentence())
        failed = [submission for submission in ended if states[submission.job_id].phase != "succeeded"]
        for submission in failed:
            screen.say(f"{run_name(submission.run_dir)}:")
            for line in _ending(submission.run_dir, states[submission.job_id]):
                screen.say(f"  {line}")
        screen.say(f"{len(ended) - len(failed)} of {counted(len(submissions), 'run')} succeeded")
    return FAILED if failed else 0


def watch_runs(submissions: Sequence[Submission], as_json: bool, interval_seconds: float) -> int:
    """Watch runs until all have ended, or Ctrl-C: drawn in place on a terminal, a line for each change in a pipe.
    Return 1 where one of them ended without success."""
    from llmlaunch.watch.loop import StatePoller, View, watch
    from llmlaunch.watch.run_reader import RunReader
    from llmlaunch.watch.views import JsonView, LineView, TerminalView, can_draw

    poller = StatePoller(submissions, notify)
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
        watch(poller, readers, view, interval_seconds, lambda states: note_ends(states, notify))
    failed = any(look.state.ended and look.state.phase != "succeeded" for look in poller.looks)
    return FAILED if failed else 0


def _show_outcome(run_dir: Path, state: JobState, screen: Screen, messages: Screen) -> None:
    """Collect the run; show how it ended and what to type next, predicted against measured memory, and where the record
    lies."""
    from llmlaunch.sinks.delivery import chosen_sinks, pass_on
    from llmlaunch.store.collect import collect
    from llmlaunch.store.database import open_store
    from llmlaunch.store.location import where
    from llmlaunch.store.measurements import Filters, contents

    screen.say("")
    for line in _ending(run_dir, state):
        screen.say(line)
    with open_store() as store:
        for outcome in collect(store, [run_dir]):
            messages.say(outcome.sentence())
            for delivery in pass_on(store, chosen_sinks(), {str(outcome.run_id)}):
                if sentence := delivery.sentence():
                    messages.say(sentence)
            texts = contents(store, Filters(run=outcome.run_id)) if outcome.run_id else []
            if texts:
                screen.say(_comparison([json.loads(text) for text in texts]))
                screen.say(f"The record lies in {where().shown}, its files in {run_dir}")


def _ending(run_dir: Path, state: JobState) -> list[str]:
    """Return how the run ended, why, and what to type next; the first line is `The run <phase>: <why>`."""
    status = (read_object(run_dir / file_names.STATUS) or {}) if state.phase in ("failed", "stopped") else {}
    cause = status.get("cause") if isinstance(status.get("cause"), dict) else None
    why = [state.reason] if state.reason else []
    if cause and cause_text(cause) not in state.reason:
        why.insert(0, cause_text(cause))
    if cause and cause.get("kind") == "crash":  # no more than a line somebody printed: the ranks' own ends say more
        why.reverse()
    scheduler = f" [{state.state}]" if state.state and state.phase != "succeeded" else ""
    lines = [f"The run {state.phase}{scheduler}" + (f": {why[0]}" if why else ""), *(f"  {more}" for more in why[1:])]
    return lines + [f"  {purpose}: {command}" for purpose, command in _next_commands(run_dir, state, cause)]


def _next_commands(run_dir: Path, state: JobState, cause: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Return the commands that a person may want to type next, each with its purpose."""
    if state.phase == "succeeded":
        return []
    node = cause.get("node") if cause else None
    commands = [("what was printed", to_type("logs", run_dir, *(("--node", node) if node else ()), "--tail", 50))]
    if cause and cause.get("sick"):
        commands.append(("nodes that are kept away from", to_type("nodes")))
    has_checkpoint = isinstance((read_object(run_dir / file_names.RUN) or {}).get("checkpoint"), dict)
    again = "go on from the last checkpoint" if has_checkpoint else "start it again"
    return [*(commands if state.phase == "failed" else []), (again, to_type("resume", run_dir))]


def _comparison(records: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with a row for each measured peak; predictions are of the layout that its attempt ran."""
    rows, attempts = [], list(dict.fromkeys(record.get("attempt") for record in records))
    for record in records:
        measured, predicted = record.get("peak_bytes"), record.get("predicted_bytes")
        if measured is None:
            continue
        figures = ["-", gib(measured), "-"]
        if predicted is not None:
            figures = [gib(predicted), gib(measured), signed_percent(predicted / measured - 1)]
        owner = _owner(record)
        if len(attempts) > 1:
            owner = f"attempt {attempts.index(record.get('attempt')) + 1}, {owner}"
        rows.append([owner, record["peak_kind"], *figures])
    head = ["", "kind", "predicted GiB", "measured GiB", "error"]
    return "Memory, predicted against measured\n" + table(head, rows)


def _owner(record: Mapping[str, Any]) -> str:
    """Return whose peak it is: a node's of main memory, else the worst rank's of a pipeline rank."""
    if record.get("global_rank") is None:
        return f"node {record.get('node')}"
    return f"rank {record.get('global_rank')} on {record.get('node')} (pipeline rank {record.get('pipeline_rank')})"
