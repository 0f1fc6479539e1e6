"""`llmlaunch calibrate`: learn memory and step times from measured runs; list, show, and go back."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from llmlaunch.cli.output import notify, print_json, say, say_next
from llmlaunch.cli.waiting import waiting_for
from llmlaunch.errors import UserError
from llmlaunch.report.terminal import filled, shown_on
from llmlaunch.report.text import correction_words, one_line, percent, signed_percent, table
from llmlaunch.rundir.values import counted, to_type
from llmlaunch.store.location import store_exists

if TYPE_CHECKING:
    from llmlaunch.calibration.calibrations import Calibration, Errors, Quantity
    from llmlaunch.calibration.ratios import Bound
    from llmlaunch.store.calibrations import Answer, Learning, Use
    from llmlaunch.store.database import Store


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
def calibrate_command(
    context: click.Context, backend: str | None, accelerator: str | None, dry_run: bool, as_json: bool
) -> int:
    """Learn from the measured runs in the store what predictions leave out: of memory per backend and accelerator, of
    step times per backend, machine and kind of model.

    Runs that have finished since are collected first, and of those that go on the step times so far. What is learned
    is tried on runs it has not seen, shown beside what is in use now, and refused where it would be worse or rests on
    too few runs; that is no failure, and the exit code is 0. Everything taken is kept: `calibrate use` goes back.

    \b
    llmlaunch calibrate --dry-run
    llmlaunch calibrate list
    """
    if context.invoked_subcommand is not None:
        if backend or accelerator or dry_run or as_json:
            raise click.UsageError(f"give options after the word: calibrate {context.invoked_subcommand} ...")
        return 0
    from llmlaunch.store.calibrations import Learning, calibrate
    from llmlaunch.store.collect import collect_running, open_collected
    from llmlaunch.store.database import WRITER_SECONDS

    learning = Learning((), {})
    if store_exists():
        with waiting_for("learning from the runs in the store"), open_collected(notify, WRITER_SECONDS) as store:
            collect_running(store)  # their first steps tell of step times, though not of memory
            learning = calibrate(store, time.time(), backend, accelerator, dry_run)
    if as_json:
        print_json(learning.as_json())
    elif learning.answers or learning.left_out:
        say(learning_text(learning))
    if not learning.answers:
        notify("no measured run to learn from yet; predictions stay as they are")
    if not as_json:
        say_next(*_next_steps(learning))
    return 0


def _next_steps(learning: Learning) -> Iterator[tuple[str, str]]:
    if "taken" in {answer.did for answer in learning.answers}:
        yield to_type("check", "RECIPE"), "the prediction with what was learned"
    yield to_type("submit", "RECIPE"), "a run, whose peaks llmlaunch collect takes in"
    if not learning.answers:
        yield to_type("measurements", "import", "FILE"), "runs that were measured elsewhere"


@calibrate_command.command("list")
@BACKEND
@ACCELERATOR
@JSON
def list_command(backend: str | None, accelerator: str | None, as_json: bool) -> None:
    """List every calibration ever taken, the oldest first, and what is in use."""
    from llmlaunch.calibration.calibrations import MEMORY, TIME
    from llmlaunch.frameworks.recorded import TABLES
    from llmlaunch.store.calibrations import all_calibrations, key_of, uses

    calibrations: list[Calibration[Any]] = []
    used: Sequence[Use] = ()
    if store_exists():
        table = None if backend is None else TABLES.get(backend, backend)
        with _opened_store() as store, store.read() as connection:
            calibrations = all_calibrations(connection, table, accelerator)
            keys = {*map(key_of, calibrations)}
            used = [use for use in uses(connection, table) if (use.backend, use.accelerator) in keys]
    of_memory, of_times = ([one for one in calibrations if one.quantity is quantity] for quantity in (MEMORY, TIME))
    if as_json:
        lists = {"calibrations": of_memory, "step_times": of_times}
        listed = {name: [one.as_json() for one in entries] for name, entries in lists.items()}
        print_json({**listed, "uses": [vars(entry) for entry in used]})
    elif calibrations:
        say("\n\n".join(list_text(entries, used) for entries in (of_memory, of_times) if entries))
    else:
        notify("no calibration was taken yet")
        say_next((to_type("calibrate"), "learns from the measured runs in the store"))


@calibrate_command.command("show")
@click.argument("calibration", metavar="ID")
@JSON
def show_command(calibration: str, as_json: bool) -> None:
    """Show one calibration whole: what it was learned from, how well it predicted, and when it was in use."""
    from llmlaunch.store.calibrations import find_calibration, uses

    with _opened_store() as store, store.read() as connection:
        record, used = find_calibration(connection, calibration), uses(connection)
    if as_json:
        print_json(record.as_json())
    else:
        say(calibration_text(record, used))


@calibrate_command.command("use")
@click.argument("calibration", metavar="ID|none")
@click.option("--backend", metavar="NAME", help="With none: of which backend.")
@click.option("--accelerator", metavar="NAME", help="With none: on which accelerator.")
@JSON
def use_command(calibration: str, backend: str | None, accelerator: str | None, as_json: bool) -> None:
    """Go back to an earlier calibration, or to none, neither of memory nor of step times. This is kept, too."""
    from llmlaunch.frameworks.recorded import TABLES
    from llmlaunch.store.calibrations import find_calibration, key_of, keys_in_use, use, use_of

    table = None if backend is None else TABLES.get(backend, backend)
    wanted = None if calibration == NONE else calibration
    if wanted is None and (table is None or accelerator is None):
        raise UserError("calibrate use none: say of what, with --backend NAME --accelerator NAME")
    with _opened_store() as store, store.write() as connection:
        if wanted is not None:
            key = key_of(find_calibration(connection, wanted))
            keys = [(table or key[0], accelerator or key[1])]
        else:
            keys = keys_in_use(connection, str(table), str(accelerator))
        before = [use_of(connection, *key) for key in keys]
        if not keys:
            raise UserError(f"calibrate use none: no calibration is in use for {table} on {accelerator}")
        for key in keys:
            use(connection, *key, wanted, time.time())
    if as_json:
        changed = zip(keys, before, strict=True)
        rows = [
            {"backend": name, "accelerator": where, "used": wanted, "before": earlier}
            for (name, where), earlier in changed
        ]
        print_json(rows[0] | {"changed": rows})
    else:
        for (name, where), earlier in zip(keys, before, strict=True):
            say(f"{name} on {one_line(where)}: {wanted or NONE} is in use now, before it {earlier or NONE}")


def _opened_store() -> Store:
    if not store_exists():
        raise UserError(
            "calibrate: there is no store yet; runs that were submitted or imported make one, and then "
            "`llmlaunch calibrate` learns from them"
        )
    from llmlaunch.store.database import open_store

    return open_store()


def learning_text(learning: Learning) -> str:
    parts = ["\n".join(_answer(answer)) for answer in learning.answers]
    if learning.left_out:
        parts.append(_sentence("Left out: " + _counts(learning.left_out)))
    return "\n\n".join(parts)


def _sentence(text: str) -> str:
    return "\n".join(filled(text, shown_on().width, others="  "))


def _answer(answer: Answer) -> list[str]:
    outcome, calibration = answer.result, answer.result.calibration
    where = _where(outcome.quantity, outcome.backend, outcome.accelerator)
    if calibration is None or answer.did == "unchanged":
        return [_sentence(f"{where}: {answer.did}, {answer.why}")]
    lines = [f"{where}: {_data(calibration)}", *_learned(calibration)]
    consequence = "the correction in use stays" if answer.before is not None else "none is in use"
    if answer.did == "taken":
        return [*lines, f"  taken as {calibration.id}", f"  go back with: {_going_back(answer)}"]
    return [*lines, f"  {answer.did}: {answer.why}; {consequence}"]


def _where(quantity: Quantity[Any], backend: str, accelerator: str) -> str:
    return one_line(f"{backend}{', ' if quantity.prefix else ' on '}{accelerator}")


def _going_back(answer: Answer) -> str:
    if answer.before is not None:
        return to_type("calibrate", "use", answer.before.id)
    about = ["--backend", answer.result.backend, "--accelerator", one_line(answer.result.device)]
    return to_type("calibrate", "use", "none", *about)


def _data(calibration: Calibration[Any]) -> str:
    data = calibration.data
    died = f", {data.died} of them ran out of memory" if data.died else ""
    return f"{counted(data.runs, 'run')} ({counted(data.records, 'record')}){died}"


def _learned(calibration: Calibration[Any]) -> list[str]:
    return [
        f"  families   {_counts(calibration.data.families)}",
        f"  versions   {_counts(calibration.data.versions)}",
        f"  correction {_correction(calibration)}",
        _errors(calibration.before, calibration.after),
    ]


def _correction(calibration: Calibration[Any]) -> str:
    from llmlaunch.calibration.calibrations import MEMORY

    correction = calibration.correction
    if calibration.quantity is MEMORY:
        return correction_words(correction.torch_share, correction.outside_bytes)
    learned = [f"{name} {signed_percent(factor - 1.0)}" for name, factor in correction.factors.items() if factor != 1.0]
    return ", ".join(learned) or "as predicted"


def _errors(before: Errors, after: Errors) -> str:
    rows = [
        ["mean error", percent(before.mape), percent(after.mape)],
        ["bias", signed_percent(before.bias), signed_percent(after.bias)],
        ["worst under-prediction", percent(before.worst_under), percent(after.worst_under)],
        ["predicted too low", percent(before.under_share), percent(after.under_share)],
    ]
    for old, new in zip(before.bounds, after.bounds, strict=True):
        rows.append([f"margin at risk {new.risk:g}", _ratio(old.worse), _ratio(new.worse)])
        rows.append(["  over all runs", _of(old.ratio, old.runs, old), _of(new.ratio, new.runs, new)])
        near = [_of(b.near_limit_ratio, b.near_limit_runs, b) for b in (old, new)]
        rows.append(["  near the limit", *near])
    return table(["", "in use", "new, cross-validated"], rows)


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"x {ratio:.3f}"


def _of(ratio: float | None, runs: int, bound: Bound) -> str:
    if ratio is not None:
        return f"x {ratio:.3f} ({counted(runs, 'run')})"
    return f"{runs} of {counted(bound.needed, 'run')}" if runs < bound.needed else f"too many of {runs} died"


def calibration_text(calibration: Calibration[Any], uses: Sequence[Use]) -> str:
    """One calibration whole, with when it was in use."""
    where = _where(calibration.quantity, calibration.backend, calibration.accelerator)
    stale = ", not that of this program: calibrate again" if calibration.outdated else ""
    lines = [
        f"{one_line(calibration.id)}: {where}, {_data(calibration)}",
        f"  made       {_when(calibration.made_at)} by llmlaunch {calibration.llmlaunch}, "
        f"estimator {calibration.estimator[:12]}{stale}",
        f"  data       {calibration.data.digest[:12]}",
        *_learned(calibration),
    ]
    return "\n".join([*lines, *_times_in_use(calibration.id, uses, calibration.backend, calibration.accelerator)])


def _times_in_use(calibration_id: str, uses: Sequence[Use], backend: str, accelerator: str) -> list[str]:
    times = [use for use in uses if (use.backend, use.accelerator) == (backend, accelerator)]
    ends = [*(_when(use.since) for use in times[1:]), "now"]
    mine = [(use.since, end) for use, end in zip(times, ends, strict=True) if use.calibration_id == calibration_id]
    return [f"  in use     from {_when(since)} to {end}" for since, end in mine] or ["  in use     never"]


def list_text(calibrations: Sequence[Calibration[Any]], uses: Sequence[Use]) -> str:
    now = {(use.backend, use.accelerator): use for use in uses}
    rows = []
    for calibration in calibrations:
        use = now.get((calibration.backend, calibration.accelerator))
        since = _when(use.since) if use is not None and use.calibration_id == calibration.id else "-"
        errors = f"{percent(calibration.before.mape)} > {percent(calibration.after.mape)}"
        about = [calibration.backend, calibration.accelerator, str(calibration.data.runs), _correction(calibration)]
        rows.append([one_line(text) for text in (calibration.id, *about, errors, since)])
    head = ["id", "backend", "accelerator", "runs", "correction", "mean error", "in use since"]
    return table(head, rows, indent="")


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _counts(counts: Mapping[str, int]) -> str:
    return one_line(", ".join(f"{name}: {count}" for name, count in counts.items()))
