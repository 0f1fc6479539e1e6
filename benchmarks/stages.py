"""Uneven stages for splits of recipes/llama3-70b.yaml all at once, against a dynamic programme for each; what they win.

Bar: 3 us a pipeline rank for its capacity and 2 us a split for the layers by rank, at least 100 times faster than one
by one, with the same answers. Run with OMP_NUM_THREADS=1.

    python benchmarks/stages.py [ROUNDS]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from llmlaunch.frameworks.framework import backend_for
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.job import Job
from llmlaunch.planner.setting import Setting, setting_of
from llmlaunch.planner.stage_balance import balance_alike, balance_kinds
from llmlaunch.planner.stage_capacities import capacities, fitting
from llmlaunch.recipe.load import load_recipe
from llmlaunch.timing.stages import stage_seconds

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
SPLITS, ONE_BY_ONE = 4000, 200
PIPELINES = (2, 4, 8, 16)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    setting = setting_of(recipe := load_recipe(RECIPES / "llama3-70b.yaml"), backend_for(recipe))
    job, layers, limit = setting.job, recipe.model.num_layers, setting.limit.limit_bytes
    splits = some_splits()
    costs = stage_seconds(job, recipe.cluster, splits)
    most = capacities(job, splits, limit)
    inputs = costs.layers[0], costs.first, costs.last, splits.pipeline, layers, most
    table, feasible = balance_alike(*inputs)
    ranks = int(splits.pipeline.sum())
    timed(f"capacities of {ranks:,} ranks", len(splits), rounds, lambda: capacities(job, splits, limit))
    at_once = timed("layers by rank", len(splits), rounds, lambda: balance_alike(*inputs))
    rows = np.linspace(0, len(splits) - 1, ONE_BY_ONE).astype(int)
    fits = [fitting(job, splits.take(np.array([row])), limit) for row in rows]

    def one_by_one() -> list[tuple[int, ...] | None]:
        return [
            balance_kinds([costs.layers[0][r]] * layers, costs.first[r], costs.last[r], int(splits.pipeline[r]), held)
            for r, held in zip(rows, fits, strict=True)
        ]

    each = timed("a dynamic programme for each", len(rows), 3, one_by_one)
    found = [tuple(table[r][: splits.pipeline[r]].tolist()) if feasible[r] else None for r in rows]
    print(f"ratio {each / at_once:,.0f}; the same answers: {found == one_by_one()}; {int(feasible.sum()):,} have one")
    for name in ("llama3-8b", "llama3-70b", "mixtral-8x7b"):
        won(setting_of(recipe := load_recipe(RECIPES / f"{name}.yaml"), backend_for(recipe)))


def some_splits() -> LayoutColumns:
    """Splits of 80 layers over 2 to 16 ranks, of every size and micro-batch."""
    rows = [
        Layout(tensor, pipeline, 1, context, 512 // (tensor * pipeline * context), 1, 1, micro, int(tensor > 1), zero)
        for tensor in (1, 2, 4, 8)
        for pipeline in range(2, 17)
        for context in (1, 2, 4, 8)
        for micro in (1, 2, 4, 8, 16)
        for zero in (0, 1)
        if tensor * pipeline * context <= 512
    ]
    layouts = LayoutColumns.of(rows)
    return layouts.take(np.resize(np.arange(len(layouts)), SPLITS))


def timed(name: str, rows: int, rounds: int, work: Callable[[], object]) -> float:
    times = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    each = statistics.median(times) / rows * 1e6
    print(f"{name}: {rows:,} splits, {each:,.2f} us a split, {each * rows / 1e3:.1f} ms")
    return each


def won(setting: Setting) -> None:
    """How much faster the slowest stage is than that of even stages, TP8 and micro-batches of one sequence."""
    job: Job = setting.job
    layers, parts = job.shape.num_layers, []
    for pipeline in PIPELINES:
        one = LayoutColumns.of([Layout(8, pipeline, data=8, sequence_parallel=1)])
        costs = stage_seconds(job, setting.recipe.cluster, one)
        layer = costs.layers[0]
        free = np.full((1, pipeline), layers)
        table, _ = balance_alike(layer, costs.first, costs.last, one.pipeline, layers, free)
        beside = np.zeros(pipeline)
        beside[0], beside[-1] = costs.first[0], costs.last[0]
        even = float((layers / pipeline * layer[0] + beside).max())
        parts.append(f"PP{pipeline} {even / float((table[0] * layer[0] + beside).max()) - 1:.1%}")
    print(f"{job.shape.name}: the pace rises by {', '.join(parts)}")


if __name__ == "__main__":
    main()
