"""A plan as a page for a browser: the grid of layouts, memory by pipeline rank, the ranking, and what was refused."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmlaunch.causes.redaction import masked, secret_values
from llmlaunch.layout import RECOMPUTE_NAMES
from llmlaunch.memory.estimator import RankEstimate, estimate
from llmlaunch.planner.plan import Candidate, Plan, as_planned
from llmlaunch.planner.search import SearchResult
from llmlaunch.planner.setting import Setting, node_of
from llmlaunch.report.grid import Cell, Grid, Row, grid_of
from llmlaunch.report.page import (
    BAR_UNITS,
    FAMILIES,
    bar,
    families_of,
    looks,
    page,
    spread_of,
    term_rows,
    tile,
    write_page,
)
from llmlaunch.report.plan_sentences import headroom_sentence, job_text, neighbour_row
from llmlaunch.report.plan_text import ranked_title
from llmlaunch.rundir.values import counted
from llmlaunch.units import duration, gib
from llmlaunch.verdicts import SAFE, TIGHT, UNKNOWN, UNSAFE

if TYPE_CHECKING:
    from llmlaunch.planner.neighbours import Neighbour


REFUSED = "refused"
MINUS = "\u2212"
LEVELS = 5  # shades of a safe cell
FULL_RANKS = 32  # bars of so many pipeline ranks; of more the first, the last and the worst
END_RANKS = 8
TERMS_OF_A_CELL = 8  # in its tooltip, the largest
STEP_LOOKS = ("weights", "activations", "buffers", "optimizer", "gradients", "outside")
FAMILY_NAMES = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations and loss",
    "buffers": "buffers and workspaces",
    "outside": "allocator cache, context, communicators",
}


def write_plan_page(
    setting: Setting, result: SearchResult, plan: Plan, neighbours: Sequence[Neighbour], command: str, path: Path
) -> None:
    """Write the page to `path`, whose name ends in .html. `command` is what the person typed. Raises UserError."""
    write_page(path, lambda: plan_page(setting, result, plan, neighbours, command))


def plan_page(setting: Setting, result: SearchResult, plan: Plan, neighbours: Sequence[Neighbour], command: str) -> str:
    recipe, grid = setting.recipe, grid_of(setting, result, plan)
    secrets = secret_values(os.environ, recipe.secrets)
    picture, cells = _grid(setting, plan, grid)
    values = {
        "what": "plan",
        "verdict": plan.verdict_with_budget,
        "verdict_words": _verdict_words(plan),
        "name": recipe.name,
        "job": job_text(recipe),
        "layout": plan.chosen.describe(),
        "changed": None if plan.changed is None else plan.changed.sentence(plan.chosen),
        "headroom": None if plan.fuller is None else headroom_sentence(plan.fuller, plan.fuller.candidate.describe()),
        "tiles": _tiles(plan),
        "advice": plan.beyond_budget or plan.advice,
        "grid": picture,
        "memory": _memory(plan),
        "time": _time(plan),
        "ranked": _ranked(plan),
        "neighbours": _neighbours(plan, neighbours),
        "refused": _refused(plan),
        "not_modelled": plan.not_modelled,
        "assumptions": plan.assumptions,
        "recipe": masked(recipe.text.strip(), secrets),
        "made_by": masked(command, secrets),
    }
    terms = list(dict.fromkeys(name for cell in cells for name, _ in cell.get("terms", ())))
    for cell in cells:
        cell["terms"] = [(terms.index(name), size) for name, size in cell.get("terms", ())]
    names = [name.replace("_", " ") for name in terms]
    return page("plan", f"{recipe.name}: {plan.verdict}", values, {"cells": cells, "terms": names})


def _verdict_words(plan: Plan) -> str:
    if plan.beyond_budget is not None:
        return f"{plan.verdict_with_risk}, beyond the budget"
    why = {
        SAFE: "it fits",
        TIGHT: "it fits the card, not the limit",
        UNSAFE: "it does not fit",
        UNKNOWN: plan.reason,
    }
    return f"{plan.verdict_with_risk}: {why[plan.verdict]}{', accepted by the recipe' if plan.accepted else ''}"


def _tiles(plan: Plan) -> list[dict[str, str]]:
    limit, worst = plan.limit, plan.estimate.worst
    free = limit.limit_bytes - worst.device_bytes
    room = f"{gib(free)} GiB to spare" if free >= 0 else f"{gib(-free)} GiB too much"
    rate = f"{plan.chosen.tokens_per_second_per_gpu:,.0f}"
    mfu = "" if plan.mfu is None else f"{plan.mfu:.0%} of its peak (MFU)"
    whole = f"{plan.length.gpu_hours:,.0f} device-hours, {_tokens(plan.length.tokens)} tokens"
    return [
        tile(
            f"Memory, worst of {counted(len(plan.estimate.ranks), 'pipeline rank')}",
            gib(worst.device_bytes),
            f"of {gib(limit.limit_bytes)} GiB",
            f"{room}; the card has {gib(limit.memory_bytes)}",
        ),
        tile("A step", f"{plan.chosen.step_seconds:.3g}", "s"),
        tile("Throughput of a device", rate, "tokens/s", mfu),
        tile(f"All {plan.length.steps:,} steps", duration(plan.length.seconds), note=whole),
    ]


def _tokens(count: int) -> str:
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:,}"


# --- the grid -------------------------------------------------------------------------------------------------------


def _grid(setting: Setting, plan: Plan, grid: Grid) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return what the template draws, and the tooltips of all cells."""
    safe = [cell.best for cell in grid.cells.values() if cell.best is not None and cell.safe]
    fastest = min((each.step_seconds for each in safe), default=1.0)
    cells: list[dict[str, Any]] = []
    rows = []
    before = grid.rows[0]
    for row in grid.rows:
        drawn = []
        for column in grid.columns:
            cell = grid.cells[row, column]
            drawn.append(_drawn(cell, plan, fastest, _place(grid, row, column), len(cells)))
            cells.append(_tooltip(setting, plan, cell, _place(grid, row, column)))
        rows.append({"labels": _labels(grid, row), "cells": drawn, "begins": grid.group(row) != grid.group(before)})
        before = row
    picture = {
        "about": (
            f"{plan.searched:,} layouts were searched. Each cell holds the fastest safe layout of its split and "
            "micro-batch size; where none is safe, the one that needs the least. Data parallelism takes the devices "
            "that are left. Point at a cell, or move to it with Tab and the arrow keys, for its terms of memory."
        ),
        "fields": [name.replace("_", " ") for name in grid.fields],
        "columns": grid.columns,
        "rows": rows,
        "remarks": _remarks(grid),
    }
    return picture, cells


def _remarks(grid: Grid) -> list[str]:
    if len(grid.rows) == grid.of_rows:
        return []
    return [
        f"{len(grid.rows)} of {grid.of_rows} rows are shown: those with the fastest safe layouts, and of the others "
        "those closest to fitting."
    ]


def _labels(grid: Grid, row: Row) -> list[str]:
    named = zip(grid.fields, row, strict=True)
    return [RECOMPUTE_NAMES[value] if name == "recompute" else str(value) for name, value in named]


def _place(grid: Grid, row: Row, column: int) -> str:
    labels = zip(grid.fields, _labels(grid, row), strict=True)
    return ", ".join([*(f"{name.replace('_', ' ')} {label}" for name, label in labels), f"micro-batch {column}"])


def _kind(cell: Cell, plan: Plan) -> str:
    if cell.best is None:
        return REFUSED
    if cell.safe:
        return SAFE
    return TIGHT if cell.best.device_bytes <= plan.limit.memory_bytes else UNSAFE


def _drawn(cell: Cell, plan: Plan, fastest: float, place: str, number: int) -> dict[str, Any]:
    kind, best = _kind(cell, plan), cell.best
    drawn: dict[str, Any] = {"kind": kind, "place": number, "chosen": False, "time_level": 0, "room_level": 0}
    if best is None:
        return drawn | {"label": f"{place}: refused, {cell.refused[1]}"}
    free = plan.limit.limit_bytes - best.device_bytes
    room = f"{gib(free)} GiB to spare" if free >= 0 else f"{gib(-free)} GiB too much"
    chosen = best == plan.chosen
    return drawn | {
        "chosen": chosen,
        "time": f"{_rounded(best.step_seconds)} s",
        "room": f"{'+' if free >= 0 else MINUS}{gib(abs(free))}",
        "time_level": _time_level(best.step_seconds / fastest),
        "room_level": LEVELS - 1 - min(int(LEVELS * max(free, 0) / max(plan.limit.limit_bytes, 1)), LEVELS - 1),
        "label": f"{place}: {'chosen, ' if chosen else ''}{kind}, {best.step_seconds:.3g} s a step, {room}",
    }


def _time_level(times_fastest: float) -> int:
    """The fastest is the deepest; each shade is a step slower."""
    return sum(times_fastest > bound for bound in (1.03, 1.12, 1.3, 1.7))


def _rounded(seconds: float) -> str:
    return f"{seconds:.{0 if seconds >= 100 else 1 if seconds >= 10 else 2}f}"


def _tooltip(setting: Setting, plan: Plan, cell: Cell, place: str) -> dict[str, Any]:
    best = cell.best
    if best is None:
        return {"title": place, "rows": [["refused", cell.refused[0]], [cell.refused[1], ""]]}
    free = plan.limit.limit_bytes - best.device_bytes
    rows = [
        ["verdict", _kind(cell, plan) + (", chosen" if best == plan.chosen else "")],
        ["a step", f"{best.step_seconds:.3g} s"],
        [f"{plan.estimate.peak_kind} peak, worst rank {best.worst_pipeline_rank}", f"{gib(best.device_bytes)} GiB"],
        ["to the limit", f"{'+' if free >= 0 else MINUS}{gib(abs(free))} GiB"],
    ]
    ordered = sorted(_worst_terms(setting, best).items(), key=lambda item: -item[1])
    terms = [(name, gib(size)) for name, size in ordered[:TERMS_OF_A_CELL] if size > 0]
    rest = sum(size for _, size in ordered[TERMS_OF_A_CELL:])
    if rest > 0:
        terms.append(("the rest", gib(rest)))
    return {"title": best.describe(), "rows": rows, "terms": terms}


def _worst_terms(setting: Setting, candidate: Candidate) -> Mapping[str, int]:
    job = setting.job_of(as_planned(setting.recipe, candidate))
    kind = setting.recipe.cluster.accelerator.peak_kind
    return estimate(job, candidate.layout, peak_kind=kind, node=node_of(setting.recipe)).worst.terms


# --- memory and time ------------------------------------------------------------------------------------------------


def _memory(plan: Plan) -> dict[str, Any]:
    limit, ranks = plan.limit, _shown_ranks(plan)
    whole = 1.02 * max(limit.memory_bytes, plan.estimate.worst.device_bytes)
    worst = plan.estimate.worst.pipeline_rank
    names = [name for name in ranks[0].terms if any(rank.terms[name] for rank in ranks)]
    rows = [[name.replace("_", " "), *(gib(rank.terms[name]) for rank in ranks)] for name in names]
    rows.append(["sum", *(gib(rank.device_bytes) for rank in ranks)])
    shown = "" if len(ranks) == len(plan.estimate.ranks) else f" {len(ranks)} of {len(plan.estimate.ranks)} are shown."
    return {
        "about": (
            f"What one device of each pipeline rank holds at its {plan.estimate.peak_kind} peak. Rank {worst} needs "
            f"the most. Up to {gib(limit.limit_bytes)} GiB is called safe: {limit.reason}. The card has "
            f"{gib(limit.memory_bytes)} GiB.{shown}"
        ),
        "chart": {
            "legend": looks(
                *((look, FAMILY_NAMES[look]) for look in FAMILIES),
                ("limit", f"limit, {gib(limit.limit_bytes)} GiB"),
                ("card", f"card, {gib(limit.memory_bytes)} GiB"),
            ),
            "bars": [_rank_bar(rank, whole, rank.pipeline_rank == worst) for rank in ranks],
            "lines": [
                {"look": "limit", "x": _along(limit.limit_bytes, whole)},
                {"look": "card", "x": _along(limit.memory_bytes, whole)},
            ],
        },
        "head": ["term", *(f"rank {rank.pipeline_rank}" for rank in ranks)],
        "rows": rows,
    }


def _shown_ranks(plan: Plan) -> list[RankEstimate]:
    ranks = list(plan.estimate.ranks)
    if len(ranks) <= FULL_RANKS:
        return ranks
    worst = plan.estimate.worst
    return [rank for i, rank in enumerate(ranks) if i < END_RANKS or i >= len(ranks) - END_RANKS or rank is worst]


def _rank_bar(rank: RankEstimate, whole: float, worst: bool) -> dict[str, Any]:
    size = f"{gib(rank.device_bytes)} GiB"
    rows = term_rows(rank.terms)
    name = f"rank {rank.pipeline_rank}{', worst' if worst else ''}"
    title = f"Pipeline rank {rank.pipeline_rank}: {size}"
    return bar(name, size, spread_of(list(families_of(rank.terms).items()), whole), rows, title, f"{title}. ")


def _along(size: float, whole: float) -> float:
    return round(min(BAR_UNITS * size / whole, BAR_UNITS - 3), 2)


def _time(plan: Plan) -> dict[str, Any]:
    seconds = plan.chosen.step_seconds
    shares = sorted(((name, value) for name, value in plan.step_terms.items() if value > 0), key=lambda item: -item[1])
    top, rest = shares[: len(STEP_LOOKS) - 1], shares[len(STEP_LOOKS) - 1 :]
    parts = [(name.replace("_", " "), value) for name, value in top]
    if rest:
        parts.append(("the rest", sum(value for _, value in rest)))
    pieces = [(look, value) for look, (_, value) in zip(STEP_LOOKS, parts, strict=False)]
    spread, took = spread_of(pieces, sum(value for _, value in pieces)), f"{seconds:.3g} s"
    rows = [(name.replace("_", " "), f"{value:.3g} s, {value / seconds:.1%}") for name, value in shares]
    return {
        "about": f"{seconds:.3g} s of the chosen layout, by what they are spent on.",
        "chart": {
            "legend": looks(
                *(
                    (look, f"{name}, {value / seconds:.0%}")
                    for look, (name, value) in zip(STEP_LOOKS, parts, strict=False)
                )
            ),
            "bars": [bar("a step", took, spread, rows, f"A step: {took}", f"A step takes {took}. ", "; ")],
            "lines": [],
        },
    }


# --- the tables -----------------------------------------------------------------------------------------------------


def _ranked(plan: Plan) -> dict[str, Any]:
    title = ranked_title(plan)
    rows = [
        [
            f"{place}. {each.describe()}",
            gib(each.device_bytes),
            gib(plan.limit.limit_bytes - each.device_bytes),
            _rounded(each.step_seconds),
            f"{each.tokens_per_second_per_gpu:,.0f}",
        ]
        for place, each in enumerate((plan.chosen, *plan.alternatives), 1)
    ]
    return {
        "title": title,
        "head": ["layout", "GiB, worst rank", "to spare", "s a step", "tokens/s/device"],
        "rows": rows,
    }


def _neighbours(plan: Plan, neighbours: Sequence[Neighbour]) -> dict[str, Any]:
    rows = []
    for neighbour in neighbours:
        (change, time, spare), remark = neighbour_row(plan, neighbour)
        rows.append(
            {
                "change": change.replace("->", "\u2192"),
                "time": time.replace("-", MINUS) or "\u2013",
                "spare": f"{spare.replace('-', MINUS)} GiB" if spare else "\u2013",
                "remark": remark,
            }
        )
    return {"rows": rows}


def _refused(plan: Plan) -> dict[str, Any]:
    count = plan.searched - sum(plan.refused.values())
    ordered = sorted(plan.refused.items(), key=lambda item: -item[1])
    return {
        "about": f"Of {plan.searched:,} layouts {count:,} are ranked; every other one was refused for the first reason "
        "that applies.",
        "rows": [
            {"key": key, "count": f"{number:,}", "sentence": plan.refusal_sentences.get(key, "")}
            for key, number in ordered
        ],
    }
