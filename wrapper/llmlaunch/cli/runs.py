"""`llmlaunch runs`: what became of the runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from llmlaunch.cli.printed import print_json

if TYPE_CHECKING:
    from llmlaunch.store.runs import Run

__all__ = ["command"]

HEAD = ("run", "recipe", "launcher", "job", "state", "kind", "predicted GiB", "measured GiB", "directory")


@click.command("runs")
@click.option("--json", "as_json", is_flag=True, help="Print the runs as JSON.")
def command(as_json: bool) -> None:
    """List the runs, the newest first, with the worst rank's predicted and measured peak.

    Runs that have finished since are collected first.
    """
    from llmlaunch.store.location import store_exists

    runs = _collected_runs() if store_exists() else []
    if as_json:
        print_json({"runs": [run.as_json() for run in runs]})
    elif runs:
        _print(runs)
    else:
        click.echo("no runs yet; `llmlaunch submit RECIPE` starts one", err=True)


def _collected_runs() -> list[Run]:
    from llmlaunch.store.collect import open_collected
    from llmlaunch.store.runs import list_runs

    with open_collected(lambda line: click.echo(line, err=True)) as store:
        return list_runs(store)


def _print(runs: list[Run]) -> None:
    from llmlaunch.causes.words import in_words
    from llmlaunch.report.text import gib, one_line, table

    rows = []
    for run in runs:
        state = run.state if run.cause is None else f"{run.state}: {in_words(run.cause)}"
        texts = (run.run_id, run.recipe, run.launcher, run.job_id, state, run.peak_kind)
        sizes = (run.predicted_bytes, run.measured_bytes)
        figures = ["-" if size is None else gib(size) for size in sizes]
        rows.append([*(one_line(text or "-") for text in texts), *figures, one_line(str(run.directory))])
    click.echo(table(HEAD, rows, indent=""))
