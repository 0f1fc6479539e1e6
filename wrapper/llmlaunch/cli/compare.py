"""`llmlaunch compare` and `llmlaunch diff`: one recipe on several clusters, and two recipes, plans or runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmlaunch.cli.output import notify, print_json, say, say_next
from llmlaunch.cli.planning import (
    ScriptInput,
    exit_code_with_launch,
    is_script,
    recipe_or_script,
    say_launch,
    script_options,
)
from llmlaunch.cli.waiting import waiting_for
from llmlaunch.errors import NothingSafe, NoVerdict, UserError
from llmlaunch.recipe.types import AUTO_NODES, MOST_NODES
from llmlaunch.rundir.foreign_values import is_whole_number
from llmlaunch.rundir.values import to_type
from llmlaunch.verdicts import EXIT_CODES, first_exit_code

if TYPE_CHECKING:
    from llmlaunch.app.comparison import Comparison
    from llmlaunch.app.existing_job import ExistingJob


@click.command("compare")
@recipe_or_script
@click.option("--clusters", required=True, metavar="A,B,...", help="Profiles by name or path, instead of RECIPE's.")
@click.option("--nodes", metavar="N,N,...", help="Numbers of nodes, or auto; absent = as RECIPE says.")
@click.option(
    "--price", "prices", multiple=True, metavar="CLUSTER=USD", help="Dollars a GPU-hour; absent = as the profile says."
)
@script_options
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
def compare_command(
    recipe: str,
    overrides: tuple[str, ...],
    clusters: str,
    nodes: str | None,
    prices: tuple[str, ...],
    script: ScriptInput,
    as_json: bool,
) -> int:
    """Plan RECIPE on each cluster with each number of nodes; rank them by days, with GPU-hours and price.

    Each line is what `check` says of RECIPE with that cluster and number of nodes. A lock beside RECIPE is left aside.

    \b
    llmlaunch compare recipe.yaml --clusters h100-80gb-x8,b200-x8
    llmlaunch compare recipe.yaml --clusters b200-x8 --nodes 2,4,8

    Exit code 0: at least one may run and stays within the budget. 2: the recipe is invalid. 3: none may.
    5: none may, and of one there is no verdict.
    """
    names = [name.strip() for name in clusters.split(",") if name.strip()]
    if not names:
        raise UserError("--clusters: names none; write for example --clusters h100-80gb-x8,b200-x8")
    counts = [] if nodes is None else [_nodes(word.strip()) for word in nodes.split(",")]
    by_cluster = dict(_price(word) for text in prices for word in text.split(","))
    if is_script(recipe, script if script.cluster else replace(script, cluster=names[0])):
        return _compare_script(recipe, overrides, names, counts, by_cluster, script, as_json)
    script.refuse_for(recipe)
    from llmlaunch.app.comparison import compare

    with waiting_for(f"planning {recipe}"):
        result = compare(recipe, overrides, names, counts, by_cluster, notify)
    return _end_comparison(result, recipe, overrides, names, as_json)


def _compare_script(
    name: str,
    overrides: Sequence[str],
    clusters: Sequence[str],
    counts: Sequence[int],
    prices: Mapping[str, float],
    script: ScriptInput,
    as_json: bool,
) -> int:
    """Plan the job of a script on each cluster. One without a verdict on the first has none."""
    from llmlaunch.app.comparison import compare
    from llmlaunch.app.existing_job import ExistingJob, job_of_source
    from llmlaunch.app.planned_run import PlannedRun
    from llmlaunch.cli.scripts import job_with_verdict, script_words

    job = job_with_verdict(name, overrides, replace(script, cluster=script.cluster or clusters[0]), False, as_json)
    if isinstance(job, int):
        return job

    def plan_cell(cluster: str, words: Sequence[str]) -> PlannedRun:
        other = job_of_source(job.source, cluster, words)
        if not isinstance(other, ExistingJob):
            raise other.error
        return other.run

    with waiting_for(f"planning {name}"):
        result = compare(name, overrides, clusters, counts, prices, notify, (job.run.recipe, plan_cell))
    if not as_json:
        say_launch(job)
    words = (*script_words(replace(script, cluster=None)), *overrides)
    try:
        code = _end_comparison(result, name, words, clusters, as_json, of_script=True)
    except (NothingSafe, NoVerdict) as refused:
        notify(f"error: {refused}")
        code = refused.exit_code
    return exit_code_with_launch(job, code)


def _end_comparison(
    result: Comparison,
    recipe: str,
    words: Sequence[str],
    clusters: Sequence[str],
    as_json: bool,
    of_script: bool = False,
) -> int:
    """Show the comparison; what to type next has `words` after the recipe or the script."""
    if as_json:
        print_json(result.as_json())
    else:
        from llmlaunch.report.comparison_text import comparison_text

        say(comparison_text(result.as_json()))
        if result.may_run:
            best = result.may_run[0]
            cluster = ("--cluster", best.cluster) if of_script else (f"cluster={best.cluster}",)
            say_next((to_type("check", Path(recipe), *words, *cluster, f"nodes={best.nodes}"), "the first of them"))
    if not result.may_run:
        refused = f"{recipe}: may run on none of {', '.join(clusters)}; the table says why"
        code = first_exit_code(EXIT_CODES[verdict] for verdict in result.verdicts)
        raise NoVerdict(refused) if code == NoVerdict.exit_code else NothingSafe(refused)
    return 0


def _nodes(word: str) -> int:
    if word == "auto":
        return AUTO_NODES
    if not (is_whole_number(word) and 1 <= int(word[:9]) <= MOST_NODES):
        raise UserError(
            f"--nodes {word[:40]}: is no number of nodes; write for example --nodes 8,16,32 or --nodes auto"
        )
    return int(word)


def _price(word: str) -> tuple[str, float]:
    name, equals, text = word.strip().rpartition("=")
    try:
        price = float(text)
    except ValueError:
        price = -1.0
    if not equals or not name or not 0 <= price < 1e6:
        raise UserError(f"--price {word[:80]}: is not CLUSTER=USD; write for example --price h100-80gb-x8=2.5")
    return name, price


@click.command("diff")
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@script_options
@click.option("--json", "as_json", is_flag=True, help="Print the differences as JSON.")
def diff_command(first: str, second: str, script: ScriptInput, as_json: bool) -> int:
    """Say what differs between A and B, and what it costs in memory and time.

    Each is a recipe, a script, a lock (`plan --lock`), a plan.json, or a run by its directory or id. A recipe or a
    script is planned as `check` does; the options for scripts count for both. What runs have measured is shown beside,
    and decides nothing.

    \b
    llmlaunch diff old.yaml new.yaml
    llmlaunch diff last recipe.yaml

    Exit code 0: no difference. 1: they differ, as with diff(1). 2: one of them cannot be read.
    """
    from llmlaunch.app.difference import describe, difference

    with waiting_for(f"comparing {first} and {second}"):
        sides = [
            describe(name, notify, _script_job(name, script) if is_script(name, script) else None)
            for name in (first, second)
        ]
        result = difference(*sides)
    if as_json:
        print_json(result)
    else:
        from llmlaunch.report.difference_text import difference_text

        say(difference_text(result))
        if is_script(second, script):
            from llmlaunch.cli.scripts import script_words

            say_next((to_type("check", Path(second), *script_words(script)), ""))
        elif Path(second).suffix in (".yaml", ".yml"):
            say_next((to_type("check", Path(second)), ""))
        else:
            say_next((to_type("runs"), "what became of the runs"))
    return int(result["differ"])


def _script_job(name: str, script: ScriptInput) -> ExistingJob:
    """Return the job of a script. Raises NoVerdict where what decides its memory was not read."""
    from llmlaunch.app.existing_job import ExistingJob
    from llmlaunch.cli.scripts import job_of

    job = job_of(name, (), script)
    if not isinstance(job, ExistingJob):
        raise job.error
    return job
