"""Microseconds of the memory formula per layout, over every layout of recipes/llama3-70b.yaml, on one core.

Bar: at most 2. Run with OMP_NUM_THREADS=1 (numpy's element-wise work is single-threaded anyway).

    python benchmarks/memory_formula.py [ROUNDS]
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import numpy as np

from llmlaunch.backends.base import Backend
from llmlaunch.backends.registry import backend_for
from llmlaunch.layout import LayoutColumns, Situation
from llmlaunch.memory.estimator import worst_ranks
from llmlaunch.memory.job import Job
from llmlaunch.planner.enumerate import enumerate_layouts
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
        times = []
        for _ in range(rounds):
            start = time.process_time()
            worst_ranks(job, columns)
            times.append(time.process_time() - start)
        each, best = (seconds / len(columns) * 1e6 for seconds in (statistics.median(times), min(times)))
        print(f"{name}: {len(columns):,} layouts, {each:.2f} us a layout (best {best:.2f}); bar: 2")


def legal_layouts(layouts: LayoutColumns, recipe: Recipe, backend: Backend) -> LayoutColumns:
    situation = Situation(layouts, recipe.model, recipe.workload, recipe.cluster, recipe.nodes)
    passed = np.ones(len(layouts), dtype=bool)
    for rule in backend.rules(recipe):
        passed &= rule.allows(situation)
    return layouts.take(np.flatnonzero(passed))


if __name__ == "__main__":
    main()
