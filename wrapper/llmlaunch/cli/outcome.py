"""What a followed run ends with: its state and cause, the command to type next, its true peaks, predicted against
measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmlaunch.launchers.base import JobState
from llmlaunch.report.run_text import cause_words
from llmlaunch.report.text import table
from llmlaunch.rundir.files import read_object
from llmlaunch.rundir.messages import to_type
from llmlaunch.units import gib
from llmlaunch.watch.screen import Screen

__all__ = ["ending", "tell_outcome"]


def tell_outcome(run_dir: Path, state: JobState, screen: Screen, warn: Screen) -> None:
    """Collect the run; say how it ended and what to type next, predicted against measured by rank, and where the
    record lies. `warn` takes what the store has to say."""
    from llmlaunch.sinks.delivery import chosen_sinks, pass_on
    from llmlaunch.store.collect import collect
    from llmlaunch.store.database import open_store
    from llmlaunch.store.location import where
    from llmlaunch.store.measurements import Filters, contents

    screen.say("")
    for line in ending(run_dir, state):
        screen.say(line)
    with open_store() as store:
        for outcome in collect(store, [run_dir]):
            warn.say(outcome.sentence())
            for passed in pass_on(store, chosen_sinks(), {str(outcome.run_id)}):
                if sentence := passed.sentence():
                    warn.say(sentence)
            found = [json.loads(t) for t in contents(store, Filters(run=outcome.run_id))] if outcome.run_id else []
            if found:
                screen.say(_comparison(found))
                screen.say(f"The record lies in {where().shown}, its files in {run_dir}")


def ending(run_dir: Path, state: JobState) -> list[str]:
    """How the run ended, why, and what to type next; the first line is `The run <phase>: <why>`."""
    status = (read_object(run_dir / "status.json") or {}) if state.phase in ("failed", "stopped") else {}
    cause = status.get("cause") if isinstance(status.get("cause"), dict) else None
    why = [state.reason] if state.reason else []
    if cause and cause_words(cause) not in state.reason:
        why.insert(0, cause_words(cause))
    if cause and cause.get("kind") == "crash":  # no more than a line somebody printed: the ranks' own ends say more
        why.reverse()
    scheduler = f" [{state.state}]" if state.state and state.phase != "succeeded" else ""
    lines = [f"The run {state.phase}{scheduler}" + (f": {why[0]}" if why else ""), *(f"  {more}" for more in why[1:])]
    return lines + [f"  {what}: {command}" for what, command in _next(run_dir, state, cause)]


def _next(run_dir: Path, state: JobState, cause: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """What a person may want to type, with the reason for it."""
    if state.phase == "succeeded":
        return []
    node = cause.get("node") if cause else None
    found = [("what was printed", to_type("logs", run_dir, *(("--node", node) if node else ()), "--tail", 50))]
    if cause and cause.get("sick"):
        found.append(("nodes that are kept away from", to_type("nodes")))
    again = "go on from the last checkpoint" if _has_checkpoint(run_dir) else "start it again"
    return [*(found if state.phase == "failed" else []), (again, to_type("resume", run_dir))]


def _has_checkpoint(run_dir: Path) -> bool:
    return isinstance((read_object(run_dir / "run.json") or {}).get("checkpoint"), dict)


def _whose(record: dict[str, Any]) -> str:
    """A record of main memory is a node's, one of the allocator the worst rank's of a pipeline rank."""
    if record.get("global_rank") is None:
        return f"node {record.get('node')}"
    return f"rank {record.get('global_rank')} on {record.get('node')} (pipeline rank {record.get('pipeline_rank')})"


def _comparison(records: list[dict[str, Any]]) -> str:
    """One row for each measured peak; the error is the prediction's, of the layout its attempt ran."""
    rows, attempts = [], list(dict.fromkeys(record.get("attempt") for record in records))
    for record in records:
        measured, predicted = record.get("peak_bytes"), record.get("predicted_bytes")
        if measured is None:
            continue
        figures = ["-", gib(measured), "-"]
        if predicted is not None:
            figures = [gib(predicted), gib(measured), f"{100 * (predicted / measured - 1):+.1f} %"]
        who = _whose(record)
        if len(attempts) > 1:
            who = f"attempt {attempts.index(record.get('attempt')) + 1}, {who}"
        rows.append([who, record["peak_kind"], *figures])
    head = ["", "kind", "predicted GiB", "measured GiB", "error"]
    return "Memory, predicted against measured\n" + table(head, rows)
