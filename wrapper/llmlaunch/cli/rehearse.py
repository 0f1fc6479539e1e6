"""`llmlaunch rehearse`: single ranks of the planned job, run alone before it is submitted."""

from __future__ import annotations

import os
import secrets
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmlaunch.cli.planned import Planned, planned, recipe_arguments
from llmlaunch.cli.printed import print_json
from llmlaunch.errors import NothingSafe, UserError
from llmlaunch.rundir.messages import counted, to_type

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from llmlaunch.backends.base import Rendered
    from llmlaunch.rehearsal.ranks import AskedRank, RehearsedRank

__all__ = ["command"]


@dataclass(frozen=True)
class _Recorded:
    """The store that holds the records now, None where none does, and all it knows of this shape."""

    store: str | None
    of_shape: Sequence[RehearsedRank]


def _install(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    """In place of a rehearsal: what a trace needs, in the person's own data folder."""
    if not wanted or ctx.resilient_parsing:
        return
    from llmlaunch.rehearsal.install import install, user_folder

    install(user_folder(), _say)
    ctx.exit(0)


@click.command("rehearse")
@recipe_arguments
@click.option("--rank", default="worst", metavar="worst|all|N", help="Which pipeline ranks [worst].")
@click.option(
    "--on",
    "place",
    type=click.Choice(["auto", "trace", "gpu"]),
    default="auto",
    help="One GPU, or real Megatron-LM code without any [auto: what is at hand].",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="With --on gpu: the run directory; must be new.")
@click.option(
    "--install-frameworks",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_install,
    help="Install what a trace needs into your data folder, and end.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(recipe: str, overrides: tuple[str, ...], rank: str, place: str, output: Path | None, as_json: bool) -> int:
    """Plan RECIPE and run single ranks of it alone for a few steps: the true peak, before the queue.

    Tensor, context and data peers of a pipeline rank hold the same, so one process speaks for all of them. What it
    shows is put beside the estimate by term, recorded, and the verdict follows it.

    Exit code 0: safe. 2: invalid, or nothing at hand to rehearse on. 3: not safe.
    """
    from llmlaunch.rehearsal.ranks import asked_ranks

    result = planned(recipe, overrides)
    asked = asked_ranks(result.plan, result.recipe.model, rank)
    _say_what_is_left_out(result)
    rendered = result.rendered()
    ranks = _begun(result, rendered, asked, place, output)
    rehearsed: list[RehearsedRank] = []
    try:
        for one in ranks:
            rehearsed.append(one)
    except UserError:
        if rehearsed:  # what ranks showed before one failed stays true
            _record(result, rendered, rehearsed)
        raise
    rehearsed.sort(key=lambda one: one.pipeline_rank)
    return _show(result, rehearsed, _record(result, rendered, rehearsed), as_json)


def _say_what_is_left_out(result: Planned) -> None:
    """The plan may be another one than before: what a rehearsal refuted is not chosen again."""
    from llmlaunch.planner.search import REHEARSED

    count = result.plan.refused.get(REHEARSED, 0)
    if count:
        _say(f"note: {counted(count, 'layout')} left out: refuted by a rehearsal")


def _say(line: str) -> None:
    click.echo(line, err=True)


def _begun(
    result: Planned, rendered: Rendered, asked: Sequence[AskedRank], place: str, output: Path | None
) -> Iterator[RehearsedRank]:
    """Each rank as it is done."""
    from llmlaunch.rehearsal.place import chosen_place

    recipe, plan = result.recipe, result.plan
    where = chosen_place(recipe, place, _say)
    if where.environment is not None:
        from llmlaunch.rehearsal.traced import traced

        if output is not None:
            raise UserError("-o: a trace leaves no run directory; it belongs to --on gpu")
        _say(where.why)
        return traced(where.environment, recipe, plan, rendered, asked, _say)
    from llmlaunch.rehearsal.on_gpu import run_alone

    assert where.launcher is not None
    return run_alone(
        recipe, plan, result.json, rendered, asked, where.launcher, output or _directory(recipe.name), _say
    )


def _directory(name: str) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return Path(os.environ.get("LLMLAUNCH_RUNS", "runs")) / f"{name}-rehearsal-{stamp}-{secrets.token_hex(2)}"


def _record(result: Planned, rendered: Rendered, rehearsed: Sequence[RehearsedRank]) -> _Recorded:
    """Into the store, with all that was rehearsed of this shape before. The result stands where there is none."""
    from llmlaunch.rehearsal.records import records_of
    from llmlaunch.store.database import open_store
    from llmlaunch.store.location import where
    from llmlaunch.store.measurements import put_rehearsed, rehearsed_of

    typed = to_type(*sys.argv[1:])
    records = records_of(result.recipe, result.plan, rendered, rehearsed, time.time(), typed)
    try:
        with open_store() as store:
            put_rehearsed(store, records)
            return _Recorded(where().shown, rehearsed_of(store, result.recipe, result.plan))
    except UserError as failure:
        _say(f"warning: not recorded: {failure}")
        return _Recorded(None, ())


def _show(
    result: Planned,
    rehearsed: Sequence[RehearsedRank],
    recorded: _Recorded,
    as_json: bool,
) -> int:
    from llmlaunch.rehearsal.next_layout import next_layout
    from llmlaunch.rehearsal.rehearsal_json import rehearsal_json
    from llmlaunch.rehearsal.rehearsal_text import rehearsal_text
    from llmlaunch.rehearsal.verdict import judged, unseen_by_a_trace
    from llmlaunch.report.console import print_verdict

    recipe, plan = result.recipe, result.plan
    unseen = unseen_by_a_trace(result.setting.job_of(recipe), plan.layout)
    found = judged(plan, (*recorded.of_shape, *rehearsed), recipe.memory, unseen)
    following = next_layout(result.setting, plan, found)
    if as_json:
        print_json(rehearsal_json(plan, rehearsed, found, following, recorded.store))
    else:
        print_verdict(rehearsal_text(plan, rehearsed, found, following), found.safe)
        if recorded.store is not None:
            click.echo(f"Recorded in {recorded.store} for this shape and version alone (evidence: rehearsed)")
        if found.safe and plan.beyond_budget is not None:
            click.echo(f"Beyond the budget: {plan.beyond_budget}")
        elif found.safe:
            click.echo(f"Next: {to_type('submit', Path(recipe.path), *recipe.overrides)}")
    return 0 if found.safe else NothingSafe.exit_code
