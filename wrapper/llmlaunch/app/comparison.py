"""One recipe on several clusters and numbers of nodes: a plan for each, ranked by days within the recipe's budget."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np

from llmlaunch.app.messages import Notify, ignore
from llmlaunch.app.planned_run import PlannedRun, plan
from llmlaunch.app.variants import excess
from llmlaunch.cluster.load import load_cluster
from llmlaunch.errors import UserError
from llmlaunch.frameworks.framework import backend_for
from llmlaunch.planner.setting import setting_of
from llmlaunch.planner.sizing import no_split_reason, splittable
from llmlaunch.progress import counting
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.types import AUTO_NODES, Recipe
from llmlaunch.units import DAY

PlanCell = Callable[[str, Sequence[str]], PlannedRun]
"""Plans a job on a cluster with overrides of its recipe."""


@dataclass(frozen=True)
class ComparedCluster:
    """The recipe on one cluster and number of nodes. `cluster` is as it was named; `nodes` is None where `nodes: auto`
    has no plan. `run` is None where no layout is legal. `refused` says why the cell may not run, None where it may.
    `usd_per_device_hour` is None where nobody knows the price."""

    cluster: str
    nodes: int | None
    run: PlannedRun | None
    refused: str | None
    usd_per_device_hour: float | None

    @property
    def days(self) -> float | None:
        """Days of the job if nothing happens, as `check` says them."""
        return None if self.run is None else self.run.plan.length.seconds / DAY

    @property
    def p95_days(self) -> float | None:
        """Days within which the job ends with a probability of 95 %, stops and saves included."""
        end = None if self.run is None else self.run.plan.expected
        return None if end is None or end.p95_seconds is None else end.p95_seconds / DAY

    @property
    def gpu_hours(self) -> float | None:
        return None if self.run is None else self.run.plan.length.gpu_hours

    @property
    def usd(self) -> float | None:
        hours, price = self.gpu_hours, self.usd_per_device_hour
        return None if hours is None or price is None else hours * price

    def as_json(self) -> dict[str, Any]:
        """Return the cell in the shape of docs/schemas/compare.schema.json; `check` is what `check --json` prints."""
        return {
            "cluster": self.cluster,
            "nodes": self.nodes,
            "verdict": None if self.run is None else self.run.verdict,
            "refused": self.refused,
            "layout": None if self.run is None else self.run.plan.chosen.describe(),
            "days": self.days,
            "p95_days": self.p95_days,
            "gpu_hours": self.gpu_hours,
            "usd": self.usd,
            "usd_per_gpu_hour": self.usd_per_device_hour,
            "check": None if self.run is None else self.run.json,
        }


@dataclass(frozen=True)
class Comparison:
    """All cells: those that may run by days, then the others with the nearest to it first."""

    recipe: Recipe
    cells: tuple[ComparedCluster, ...]

    @property
    def may_run(self) -> tuple[ComparedCluster, ...]:
        return tuple(cell for cell in self.cells if cell.refused is None)

    @property
    def verdicts(self) -> frozenset[str]:
        return frozenset(cell.run.verdict for cell in self.cells if cell.run is not None)

    def best(self, figure: str) -> ComparedCluster | None:
        """Return the cell that may run with the least "days", "gpu_hours" or "usd"; None where none is known."""
        cells = [cell for cell in self.may_run if getattr(cell, figure) is not None]
        return min(cells, key=attrgetter(figure), default=None)

    def as_json(self) -> dict[str, Any]:
        places = {figure: self.best(figure) for figure in ("days", "gpu_hours", "usd")}
        return {
            "recipe": self.recipe.name,
            "budget": asdict(self.recipe.budget),
            "cells": [cell.as_json() for cell in self.cells],
            "best": {figure: None if cell is None else self.cells.index(cell) for figure, cell in places.items()},
        }


def compare(
    path: str,
    overrides: Sequence[str],
    clusters: Sequence[str],
    nodes: Sequence[int],
    prices: Mapping[str, float],
    notify: Notify = ignore,
    script: tuple[Recipe, PlanCell] | None = None,
) -> Comparison:
    """Plan the recipe on each cluster with each number of nodes; without any, with its own number. Locks are left
    aside. `prices` are dollars a device-hour by cluster, over those of the profiles. `script` is the recipe that was
    read of a script, and what plans it.

    Raises:
        UserError: the recipe is invalid, a cluster is unknown, or a price is of no cluster that is compared.
    """
    recipe = load_recipe(path, overrides) if script is None else script[0]
    plan_cell = script[1] if script else lambda cluster, words: plan(path, words, notify, replan=True)
    clusters = list(dict.fromkeys(clusters))
    device_prices = dict(_prices(clusters, prices))
    counts: list[int | None] = [*dict.fromkeys(nodes)] or [None]
    wanted = [(cluster, count) for cluster in clusters for count in counts]
    cells = []
    for cluster, count in counting("clusters", wanted):
        cell_overrides = [*overrides, f"cluster={json.dumps(cluster)}"]
        cell_overrides += [] if count is None else [f"nodes={count or 'auto'}"]
        cell = _cell(path, cell_overrides, cluster, count, plan_cell, of_script=script is not None)
        cells.append(replace(cell, usd_per_device_hour=device_prices[cluster]))
    return Comparison(recipe, tuple(sorted(cells, key=_rank)))


def _prices(clusters: Sequence[str], prices: Mapping[str, float]) -> Iterator[tuple[str, float | None]]:
    for name in prices:
        if name not in clusters:
            raise UserError(f"--price {name}: is not among --clusters {','.join(clusters)}; name one of them")
    for cluster in clusters:
        yield cluster, prices.get(cluster, load_cluster(cluster).site.usd_per_gpu_hour)


def _cell(
    path: str, overrides: Sequence[str], cluster: str, count: int | None, plan_cell: PlanCell, of_script: bool
) -> ComparedCluster:
    """Plan one cell. What its plan is refused for is said in it, and ends nothing."""
    try:
        run = plan_cell(cluster, overrides)
    except UserError as mistake:
        why = str(mistake) if of_script else _why_illegal(path, overrides, mistake)
        return ComparedCluster(cluster, count, None, why, None)
    return ComparedCluster(cluster, run.recipe.nodes, run, _why_refused(run), None)


def _why_illegal(path: str, overrides: Sequence[str], mistake: UserError) -> str:
    """Return why no layout is legal: that the devices cannot share batch, heads, layers and sequence, else the message
    without the place of the mistake."""
    try:
        recipe = load_recipe(path, overrides)
    except UserError:
        return str(mistake)
    if recipe.nodes != AUTO_NODES:
        setting = setting_of(recipe, backend_for(recipe))
        if not splittable(setting, np.array([recipe.nodes]))[0]:
            return no_split_reason(recipe, recipe.nodes)
    return str(mistake)


def _why_refused(run: PlannedRun) -> str | None:
    if run.plan.good:
        return None
    if run.plan.beyond_budget is not None:
        return "beyond the budget"
    return f"{run.verdict}: {excess(run.plan)}"


def _rank(cell: ComparedCluster) -> tuple[int, float]:
    """Those that may run by days; then those beyond the budget, then those that do not fit by what they lack."""
    if cell.run is None:
        return 3, 0.0
    if cell.refused is None or cell.run.plan.beyond_budget is not None:
        return int(cell.refused is not None), cell.days or 0.0
    limit = cell.run.plan.limit.limit_bytes
    return 2, cell.run.plan.device_bytes / max(limit, 1)
