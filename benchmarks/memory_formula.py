"""Microseconds of the memory formula per layout of recipes/llama3-70b.yaml, on one core: at once, and from halves.

Bar: at most 2 at once; from halves at most 0.7 for what runs, and 0.15 for each layout made of it and of what is held.
Run with OMP_NUM_THREADS=1 (numpy's element-wise work is single-threaded anyway).

    python benchmarks/memory_formula.py [ROUNDS]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from llmlaunch.backends.base import Backend
from llmlaunch.backends.registry import backend_for
from llmlaunch.layout import LayoutColumns, Situation
from llmlaunch.memory.estimator import worst_ranks
from llmlaunch.memory.halves import distinct_held, held_half, running_half, worst_of_halves
from llmlaunch.memory.job import Job
from llmlaunch.planner.enumerate import enumerate_layouts
from llmlaunch.planner.host import node_of
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.types import Recipe

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "llama3-70b.yaml"


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    recipe = load_recipe(RECIPE)
    backend = backend_for(recipe)
    job = Job(recipe.model, recipe.workload, backend.facts(recipe))
    layouts = enumerate_layouts(recipe, backend.space(recipe))
    legal = legal_layouts(layouts, recipe, backend)
    for name, columns in (("every layout enumerated", layouts), ("the legal ones", legal)):
        timed(name, len(columns), rounds, "bar: 2", lambda columns=columns: worst_ranks(job, columns))
    node, (outer, held_of) = node_of(recipe), distinct_held(job, legal)
    held, running = held_half(job, outer, node), running_half(job, legal, node)
    timed("what is held", len(outer), rounds, "of few", lambda: held_half(job, outer, node))
    timed("what runs", len(legal), rounds, "bar: 0.7", lambda: running_half(job, legal, node))
    timed("both, device and host", len(legal), rounds, "bar: 0.15", lambda: worst_of_halves(running, held, held_of))


def timed(name: str, rows: int, rounds: int, bar: str, work: Callable[[], object]) -> None:
    times = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    each, best = (seconds / rows * 1e6 for seconds in (statistics.median(times), min(times)))
    print(f"{name}: {rows:,} layouts, {each:.3f} us a layout (best {best:.3f}); {bar}")


def legal_layouts(layouts: LayoutColumns, recipe: Recipe, backend: Backend) -> LayoutColumns:
    situation = Situation(layouts, recipe.model, recipe.workload, recipe.cluster, recipe.nodes)
    passed = np.ones(len(layouts), dtype=bool)
    for rule in backend.rules(recipe):
        passed &= rule.allows(situation)
    return layouts.take(np.flatnonzero(passed))


if __name__ == "__main__":
    main()
