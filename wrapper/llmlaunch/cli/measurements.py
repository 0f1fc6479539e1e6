"""`llmlaunch collect` and `llmlaunch measurements`: measured peaks into the store, and out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmlaunch.app.run_lookup import directory_of
from llmlaunch.cli.output import notify, print_json, say, say_next_of_table
from llmlaunch.cli.waiting import waiting_for
from llmlaunch.errors import UserError
from llmlaunch.rundir.values import counted, to_type

if TYPE_CHECKING:
    from llmlaunch.store.collect import Outcome


UNREADABLE = 2
ENOUGH_RUNS = 10  # a calibration of memory rests on no fewer (docs/calibration.md)
HEAD = ("id", "family", "backend", "gpu", "kind", "pipeline rank", "peak GiB", "predicted GiB", "run")


@click.command("collect")
@click.argument("words", nargs=-1, metavar="[RUN|DIR]... [KEY=VALUE]...")
@click.option(
    "--recipe",
    type=click.Path(path_type=Path),
    metavar="RECIPE",
    help="The recipe of an observed command; without it the command is read.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was done about each run as JSON.")
def collect_command(words: tuple[str, ...], recipe: Path | None, as_json: bool) -> int:
    """Take the measured peaks of finished runs into the store: of all known ones, or of those named.

    A named run that is still going on is collected as far as it got. A run directory that was submitted with bare
    `sbatch job.sbatch` becomes known by naming it, and so does what `llmlaunch observe` wrote, or the folder `observed`
    of several: the command is read into a recipe, which KEY=VALUE completes or --recipe replaces, and its peaks are
    compared with what would have been predicted. Exit code 2: a named one could not be read.

    \b
    llmlaunch collect               all that have finished
    llmlaunch collect runs/llama3-8b-20260101-120000
    """
    with waiting_for("collecting finished runs"):
        outcomes = _collect(_directories(words, recipe))
    if as_json:
        print_json({"runs": [outcome.as_json() for outcome in outcomes]})
    for outcome in outcomes:
        unreadable = outcome.did == "unreadable"
        if unreadable or not as_json:
            say(("error: " if words and unreadable else "") + outcome.sentence(), err=unreadable)
    if not outcomes:
        notify("no runs to collect; name a run directory")
    if not as_json:
        say_next_of_table(*_after_collecting(outcomes))
    return UNREADABLE if words and any(outcome.did == "unreadable" for outcome in outcomes) else 0


def _after_collecting(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, str]]:
    if not outcomes:
        yield to_type("submit", "RECIPE"), "measures a run"
        return
    if len(outcomes) >= ENOUGH_RUNS:
        yield to_type("calibrate"), "learns what predictions leave out"
    yield to_type("accuracy"), "predicted against measured, over all runs"
    yield to_type("runs"), "what became of each"


def _directories(words: Sequence[str], recipe: Path | None) -> list[Path] | None:
    """Return the directories that a person named, observed ones made runs like any other; None where none is named.
    Raises UserError for a recipe or an override without a run."""
    from llmlaunch.app.observed_runs import describe_observed, observed_directories

    overrides = [word for word in words if "=" in word and not Path(word).exists()]
    names = [word for word in words if word not in overrides]
    if not names and (recipe is not None or overrides):
        raise UserError("collect: name the observed run that the recipe or the key is of")
    named = [directory_of(name, notify) for name in names]
    directories = [each for directory in named for each in observed_directories(directory)]
    for directory in directories:
        missing = describe_observed(directory, recipe, overrides, notify)
        if missing is not None:
            notify(f"warning: {missing}")
    return directories or None


def _collect(directories: list[Path] | None) -> list[Outcome]:
    from llmlaunch.store.location import store_exists

    if directories is None and not store_exists():
        return []
    from llmlaunch.store.collect import collect
    from llmlaunch.store.database import open_to_write

    with open_to_write() as store:
        for warning in store.warnings:
            notify(f"warning: {warning}")
        return collect(store, directories)


def _filters(function: Callable[..., Any]) -> Callable[..., Any]:
    for name, what in (
        ("run", "of one run (any of its names)"),
        ("kind", "of one kind of peak, e.g. device"),
        ("gpu", "of one GPU type"),
        ("backend", "of one backend"),
        ("family", "of one family"),
    ):
        function = click.option(f"--{name}", metavar="TEXT", help=f"Only records {what}.")(function)
    return function


@click.group("measurements")
def measurements_command() -> None:
    """The measured peaks in the store, in the format of docs/store.md: one JSON object per record.

    \b
    llmlaunch measurements list
    llmlaunch measurements export records.jsonl
    """


@measurements_command.command("list")
@_filters
@click.option("--json", "as_json", is_flag=True, help="Print the records as JSON.")
def list_command(as_json: bool, **filters: str | None) -> None:
    """List the records, in the order they came in. Runs that have finished since are collected first."""
    contents = _contents(filters)
    if as_json:
        _echo_json(contents)
    elif contents:
        from llmlaunch.store.location import stored_json

        say(_records_table([stored_json(content) for content in contents]))
        say_next_of_table((to_type("accuracy"), "predicted against measured, by family"))
    else:
        notify("no measurements")
        say_next_of_table((to_type("collect"), "peaks of finished runs"), (to_type("init"), "a first recipe"))


@measurements_command.command("import")
@click.argument("words", nargs=-1, required=True, metavar="FILE... [KEY=VALUE]...")
@click.option("--recipe", metavar="RECIPE", help="The recipe of the job that wrote the logs, with its layout pinned.")
@click.option("--cluster", metavar="NAME", help="The cluster that the job ran on.")
@click.option("--one-job", is_flag=True, help="The files are of one job, such as those of its ranks.")
@click.option("--replace", is_flag=True, help="Take the file's record where the store holds its id with other content.")
@click.option("--skip-bad", is_flag=True, help="Take the good records, and say which lines were left out and why.")
@click.option("--json", "as_json", is_flag=True, help="Print the counts as JSON.")
def import_command(
    words: tuple[str, ...],
    recipe: str | None,
    cluster: str | None,
    one_job: bool,
    replace: bool,
    skip_bad: bool,
    as_json: bool,
) -> None:
    """Take over the measurement records in each FILE, all or none of a file, or what a log says of memory and time.

    Logs are the output of Megatron-LM, DeepSpeed and Transformers' Trainer, trainer_state.json, and W&B's history,
    system metrics and summary. What a log does not say of its job comes from --recipe, its overrides KEY=VALUE, and
    --cluster. Importing twice changes nothing.
    """
    from llmlaunch.app.imported_logs import ImportOptions, JobSource, import_files, split_words

    paths, overrides = split_words(words)
    source, import_options = JobSource(recipe, overrides, cluster, one_job), ImportOptions(replace, skip_bad)
    with waiting_for(f"reading {counted(len(paths), 'file')}"):
        done = import_files(paths, source, import_options, notify)
    for file, line in done.bad:
        notify(f"warning: {file}, line {line.number}: {line.why}; left out")
    counts = {"added": done.added, "replaced": done.replaced, "unchanged": done.unchanged}
    if as_json:
        print_json({**counts, "bad": [vars(line) for _, line in done.bad], "store": done.store})
    else:
        summary = ", ".join(f"{count} {what}" for what, count in counts.items())
        say(f"{summary}{f', {len(done.bad)} bad' if done.bad else ''} in {done.store}")
        say_next_of_table(
            (to_type("accuracy"), "predicted against measured"),
            (to_type("calibrate"), "learn from them what predictions leave out"),
        )


@measurements_command.command("export")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@_filters
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of one record a line.")
def export_command(file: Path | None, as_json: bool, **filters: str | None) -> None:
    """Write the records to FILE, or to stdout, as they came in: the same JSON, in the same order.

    Runs that have finished since are collected first. With FILE, --json prints how many records were written.
    """
    contents = _contents(filters)
    if file is not None:
        from llmlaunch.store.measurements import write_lines

        write_lines(contents, file)
        if as_json:
            print_json({"exported": len(contents), "file": str(file)})
        else:
            notify(f"{counted(len(contents), 'record')} written to {file}")
            say_next_of_table((to_type("accuracy", file), "predicted against measured"))
    elif as_json:
        _echo_json(contents)
    else:
        for content in contents:
            say(content)


def _contents(filters: dict[str, str | None]) -> list[str]:
    from llmlaunch.app.stored_runs import measurements

    with waiting_for("collecting finished runs"):
        return [record.text for record in measurements(**filters, notify=notify)]


def _echo_json(contents: list[str]) -> None:
    """The records' own texts, not written anew: numbers stay as they were measured."""
    say('{"measurements": [' + ",\n".join(contents) + "]}")


def _records_table(records: list[dict[str, Any]]) -> str:
    from llmlaunch.report.text import one_line, table
    from llmlaunch.units import gib

    def size(value: object) -> str:
        return gib(value) if isinstance(value, int) else "-"

    rows = []
    for record in records:
        texts = [record.get(key) for key in ("id", "family", "backend", "gpu", "peak_kind", "pipeline_rank")]
        cells = ["-" if text is None else one_line(str(text)) for text in texts]
        sizes = [size(record.get("peak_bytes")), size(record.get("predicted_bytes"))]
        rows.append([*cells, *sizes, one_line(str(record.get("run_id") or "-"))])
    return table(HEAD, rows, indent="")
