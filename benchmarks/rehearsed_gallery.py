"""The table of docs/rehearsed-gallery.md: for each Megatron-LM recipe of the gallery, what is predicted of its worst,
first and last pipeline rank against what real Megatron core holds there, traced without a GPU.

    python benchmarks/rehearsed_gallery.py [RECIPE ...]

Wants what `make install-frameworks` installs. Minutes a rank for the largest models. With names of recipes, only their
rows are made anew. Bar: 3 % of what a trace sees; a row beyond it names the term that differs most.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from llmlaunch.app import planned_run
from llmlaunch.app.planned_run import PlannedRun
from llmlaunch.rehearsal.place import find_trace_environment, how_to_get_one
from llmlaunch.rehearsal.ranks import ALL, RankChoice, RehearsedRank, chosen_ranks, compared, job_alone
from llmlaunch.rehearsal.traced import traced
from llmlaunch.rehearsal.verdict import unseen_by_a_trace
from llmlaunch.units import GIB

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "rehearsed-gallery.md"
BEGIN, END = "<!-- rows -->\n", "<!-- end of rows -->\n"
BAR = 0.03


def recipes() -> list[Path]:
    """Those of the gallery that train with Megatron-LM on GPUs."""
    return [path for path in sorted(ROOT.glob("recipes/*.yaml")) if "backend: megatron-lm" in path.read_text()]


def few_ranks(plan: PlannedRun) -> tuple[RankChoice, ...]:
    """The worst, the first and the last of the ranks that differ."""
    ranks = chosen_ranks(plan.plan, plan.recipe.model, ALL)
    last = plan.plan.layout.pipeline - 1
    worst = plan.plan.estimate.worst.pipeline_rank
    return tuple(one for one in ranks if {0, worst, last} & set(one.stands_for))


def rows_of(path: Path) -> Iterator[str]:
    environment = find_trace_environment()
    if environment is None:
        sys.exit(f"nothing to trace with: {how_to_get_one()}")
    plan = planned_run.plan(str(path), ())
    unseen = unseen_by_a_trace(plan.setting.job_of(plan.recipe), plan.plan.layout)
    job = job_alone(plan.setting, plan.recipe, plan.plan, plan.rendered, traced=True)
    told = traced(environment, plan.recipe, plan.plan, job, few_ranks(plan), lambda line: None)
    for rank in sorted(told, key=lambda rank: rank.pipeline_rank):
        yield row(path.stem, plan.plan.layout.describe(), rank, unseen[rank.pipeline_rank])


def row(name: str, layout: str, rank: RehearsedRank, unseen: Mapping[str, int]) -> str:
    """One rank: GiB predicted of what runs, of it what a trace cannot see, traced, and how far the rest was off."""
    predicted, held = rank.predicted_as_run.allocated_bytes, rank.allocated_bytes
    assert held is not None
    hidden = sum(unseen.values())
    off = (predicted - hidden) / held - 1.0
    why = largest_difference(rank) if abs(off) > BAR else ""
    cells = (name, layout, rank.pipeline_rank, *(f"{count / GIB:.2f}" for count in (predicted, hidden, held)))
    return f"| {' | '.join(map(str, cells))} | {100 * off:+.2f} % | {why} |\n"


def largest_difference(rank: RehearsedRank) -> str:
    """The term whose traced bytes are farthest from the predicted ones, with both."""
    apart = {line.term: (line.rehearsed_bytes or 0) - line.predicted_bytes for line in compared(rank)}
    name = max(apart, key=lambda name: abs(apart[name]))
    return f"`{name}` {apart[name] / GIB:+.2f} GiB"


def put(made: list[str]) -> None:
    """Into the page, in the place of the rows of the same recipes."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    kept, _, after = rest.partition(END)
    new = {line.split(" | ")[0] for line in made}
    rows = sorted([*(line for line in kept.splitlines(True) if line.split(" | ")[0] not in new), *made])
    PAGE.write_text(before + BEGIN + "".join(rows) + END + after)


def main() -> None:
    known = {path.stem: path for path in recipes()}
    names = sys.argv[1:] or list(known)
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"no such recipes: {', '.join(unknown)}; known: {', '.join(known)}")
    for path in (known[name] for name in names):
        made = list(rows_of(path))
        print("".join(made), end="", flush=True)
        put(made)


if __name__ == "__main__":
    main()
