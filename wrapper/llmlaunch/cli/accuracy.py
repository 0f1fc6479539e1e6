"""`llmlaunch accuracy`: predicted against measured, per record and family."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from llmlaunch.assets import asset
from llmlaunch.cli.output import notify, print_json, say_next
from llmlaunch.cli.waiting import waiting_for
from llmlaunch.report.text import one_line, percent
from llmlaunch.rundir.values import counted, to_type

FILE = click.Path(path_type=Path)
POOR_ERROR = 0.1  # a mean error beyond which a family is worth calibrating


@click.command("accuracy")
@click.argument("files", metavar="[FILE]...", nargs=-1, type=FILE)
@click.option("--json", "as_json", is_flag=True, help="Print every record and family as JSON.")
@click.option("--records", "each", is_flag=True, help="Also a line for each record.")
def accuracy_command(files: tuple[Path, ...], as_json: bool, each: bool) -> int:
    """Score the estimator on measured records: those of each FILE, JSON lines (docs/store.md says the format), or
    without one those of the store. Finished runs are collected first.

    \b
    llmlaunch accuracy              of the runs in the store
    llmlaunch accuracy records.jsonl --records

    Exit code 0. 2: a file is no measurements. 3: an estimate cannot be right, which is a bug of llmlaunch.
    """
    from llmlaunch.accuracy.scoring import refuse_broken, score_all
    from llmlaunch.app.stored_runs import whole_records
    from llmlaunch.calibration.records import read_records
    from llmlaunch.cluster.cards import machines
    from llmlaunch.report.accuracy_text import accuracy_json, accuracy_text, records_text

    records = [record for file in files for record in read_records(file)] if files else whole_records(notify)
    if not records:
        notify("no measurements in the store yet; give a FILE of records, or run a recipe: llmlaunch submit RECIPE")
    with waiting_for(f"scoring {counted(len(records), 'record')}"):
        scores = score_all(records, machines())
    answer = accuracy_json(scores)
    if as_json:
        print_json(answer)
    else:
        click.echo((records_text(answer) + "\n\n" if each else "") + accuracy_text(answer))
        say_next(*(_next_steps(answer["families"], files, each) if records else _first_runs()))
    refuse_broken(scores)
    return 0


def _first_runs() -> Iterator[tuple[str, str]]:
    yield to_type("submit", asset("recipes", "quickstart.yaml"), "--local", "--follow"), "a run on this machine"


def _next_steps(families: Mapping[str, Any], files: Sequence[Path], each: bool) -> Iterator[tuple[str, str]]:
    """Yield what to do about the scores; a poor family is named beside what mends it."""
    errors = {name: family["mape"] for name, family in families.items() if family.get("mape") is not None}
    error, worst = max(((error, name) for name, error in errors.items()), default=(0.0, ""))
    off = f"; {one_line(worst)} is {percent(error)} off" if error > POOR_ERROR else ""
    if not each:
        yield to_type("accuracy", *files, "--records"), "each record"
    if files:
        yield to_type("measurements", "import", *files), f"into the store, to learn from{off}"
    else:
        yield to_type("calibrate"), f"learn from them what predictions leave out{off}"
