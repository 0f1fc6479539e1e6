"""What a followed run ends with: its state, its true peaks in the store, predicted against measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from llmlaunch.launchers.base import JobState
from llmlaunch.report.text import gib, table

__all__ = ["tell_outcome"]


def tell_outcome(run_dir: Path, state: JobState, aside: bool) -> None:
    """Collect the run and print predicted against measured, by rank, and where the record lies; `aside`: on stderr."""
    from llmlaunch.store.collect import collect
    from llmlaunch.store.location import where
    from llmlaunch.store.measurements import Filters, contents
    from llmlaunch.store.open import open_store

    click.echo("", err=aside)
    because = f": {state.reason}" if state.reason else ""
    click.echo(f"The run {state.phase}{because}", err=aside)
    with open_store() as store:
        for outcome in collect(store, [run_dir]):
            click.echo(outcome.sentence(), err=True)
            found = [json.loads(t) for t in contents(store, Filters(run=outcome.run_id))] if outcome.run_id else []
            if found:
                click.echo(_comparison(found), err=aside)
                click.echo(f"The record lies in {where().shown}, its files in {run_dir}", err=aside)


def _comparison(records: list[dict[str, Any]]) -> str:
    """One row for each rank with a measured peak; the error is the prediction's."""
    rows = []
    for record in records:
        measured, predicted = record.get("peak_bytes"), record.get("predicted_bytes")
        if measured is None:
            continue
        figures = ["-", gib(measured), "-"]
        if predicted is not None:
            figures = [gib(predicted), gib(measured), f"{100 * (predicted / measured - 1):+.1f} %"]
        who = f"rank {record.get('global_rank')} on {record.get('node')} (pipeline rank {record.get('pipeline_rank')})"
        rows.append([who, record["peak_kind"], *figures])
    head = ["", "kind", "predicted GiB", "measured GiB", "error"]
    return "Memory, predicted against measured\n" + table(head, rows)
