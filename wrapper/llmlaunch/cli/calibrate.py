"""`llmlaunch calibrate`: learn from measured runs; list, show, and go back."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from llmlaunch.cli.output import notify, print_json, say
from llmlaunch.errors import UserError
from llmlaunch.store.location import store_exists

if TYPE_CHECKING:
    from llmlaunch.calibration.calibrations import Calibration
    from llmlaunch.store.calibrations import Use
    from llmlaunch.store.database import Store

__all__ = ["command"]

NONE = "none"
JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
BACKEND = click.option("--backend", metavar="NAME", help="Only of this backend, e.g. megatron-lm.")
ACCELERATOR = click.option("--accelerator", metavar="NAME", help="Only on this accelerator, e.g. h100-80gb.")


@click.group("calibrate", invoke_without_command=True)
@BACKEND
@ACCELERATOR
@click.option("--dry-run", is_flag=True, help="Show what would be learned; keep and use nothing.")
@JSON
@click.pass_context
def command(context: click.Context, backend: str | None, accelerator: str | None, dry_run: bool, as_json: bool) -> int:
    """Learn from the measured runs in the store what predictions leave out, per backend and accelerator.

    Runs that have finished since are collected first. What is learned is tried on runs it has not seen, shown beside
    what is in use now, and refused where it would be worse or rests on too few runs; that is no failure, and the exit
    code is 0. Everything taken is kept: `calibrate use` goes back.
    """
    if context.invoked_subcommand is not None:
        if backend or accelerator or dry_run or as_json:
            raise click.UsageError(f"give options after the word: calibrate {context.invoked_subcommand} ...")
        return 0
    from llmlaunch.cli.calibration_text import learning_text
    from llmlaunch.store.calibrations import Learning, calibrate

    learning = Learning((), {})
    if store_exists():
        with _collected() as store:
            learning = calibrate(store, time.time(), backend, accelerator, dry_run)
    if as_json:
        print_json(learning.as_json())
    elif learning.answers or learning.left_out:
        say(learning_text(learning))
    if not learning.answers:
        notify("no measured run to learn from")
    return 0


@command.command("list")
@BACKEND
@ACCELERATOR
@JSON
def list_command(backend: str | None, accelerator: str | None, as_json: bool) -> None:
    """List every calibration ever taken, the oldest first, and what is in use."""
    from llmlaunch.calibration.records import TABLES
    from llmlaunch.cli.calibration_text import list_text
    from llmlaunch.store.calibrations import all_calibrations, uses

    calibrations: list[Calibration] = []
    used: Sequence[Use] = ()
    if store_exists():
        table = None if backend is None else TABLES.get(backend, backend)
        with _opened() as store, store.read() as connection:
            calibrations, used = all_calibrations(connection, table, accelerator), uses(connection, table, accelerator)
    if as_json:
        print_json(
            {"calibrations": [entry.as_json() for entry in calibrations], "uses": [vars(entry) for entry in used]}
        )
    elif calibrations:
        say(list_text(calibrations, used))
    else:
        notify("no calibrations")


@command.command("show")
@click.argument("calibration", metavar="ID")
@JSON
def show_command(calibration: str, as_json: bool) -> None:
    """Show one calibration whole: what it was learned from, how well it predicted, and when it was in use."""
    from llmlaunch.calibration.calibrations import estimator_digest
    from llmlaunch.cli.calibration_text import calibration_text
    from llmlaunch.store.calibrations import find_calibration, uses

    with _opened() as store, store.read() as connection:
        record, used = find_calibration(connection, calibration), uses(connection)
    if as_json:
        print_json(record.as_json())
    else:
        say(calibration_text(record, used, estimator_digest()))


@command.command("use")
@click.argument("calibration", metavar="ID|none")
@click.option("--backend", metavar="NAME", help="With none: of which backend.")
@click.option("--accelerator", metavar="NAME", help="With none: on which accelerator.")
@JSON
def use_command(calibration: str, backend: str | None, accelerator: str | None, as_json: bool) -> None:
    """Go back to an earlier calibration, or to none. This is kept, too."""
    from llmlaunch.calibration.records import TABLES
    from llmlaunch.store.calibrations import find_calibration, in_use, use

    table = None if backend is None else TABLES.get(backend, backend)
    wanted = None if calibration == NONE else calibration
    if wanted is None and (table is None or accelerator is None):
        raise UserError("calibrate use none: say of what, with --backend NAME --accelerator NAME")
    with _opened() as store, store.write() as connection:
        if wanted is not None:
            record = find_calibration(connection, wanted)
            table, accelerator = table or record.backend, accelerator or record.accelerator
        before = in_use(connection, str(table), str(accelerator))
        if wanted is None and before is None:
            raise UserError(f"calibrate use none: no calibration is in use for {table} on {accelerator}")
        use(connection, str(table), str(accelerator), wanted, time.time())
    earlier = None if before is None else before.id
    if as_json:
        print_json({"backend": table, "accelerator": accelerator, "used": wanted, "before": earlier})
    else:
        say(f"{table} on {accelerator}: {wanted or NONE} is in use now, before it {earlier or NONE}")


@contextmanager
def _collected() -> Iterator[Store]:
    from llmlaunch.store.collect import open_collected

    with open_collected(notify) as store:
        yield store


@contextmanager
def _opened() -> Iterator[Store]:
    if not store_exists():
        raise UserError("calibrate: there is no store yet; runs that were submitted or imported make one")
    from llmlaunch.store.database import open_store

    with open_store() as store:
        yield store
