"""Microseconds of the memory formula per layout of recipes/llama3-70b.yaml, on one core: at once, and from halves.

Every legal split of the model with every set of words the search tries, amounts at 1. Bar: at most 1 at once; from
halves at most 0.7 for what runs, and 0.15 for each layout made of it and of what is held. Run with OMP_NUM_THREADS=1
(numpy's element-wise work is single-threaded anyway).

    python benchmarks/memory_formula.py [ROUNDS]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import numpy as np

from llmlaunch.frameworks.framework import backend_for
from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.estimator import worst_ranks
from llmlaunch.memory.grouped_pricing import distinct_states, model_state_bytes, transient_bytes, worst_of_sums
from llmlaunch.memory.job import Job
from llmlaunch.planner.legality import first_failed, situation
from llmlaunch.planner.search_space import TechniqueSpace, enumerate_splits, technique_space, technique_values
from llmlaunch.planner.setting import Setting, node_of, setting_of
from llmlaunch.recipe.load import load_recipe

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "llama3-70b.yaml"


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    recipe = load_recipe(RECIPE)
    setting, node = setting_of(recipe, backend_for(recipe)), node_of(recipe)
    splits, words = legal_splits(setting), technique_space(recipe, setting.backend)
    places = list(product(range(len(words.step)), range(len(words.state))))
    points = [spoken_by(setting, words, place, splits) for place in places]
    few, held_of = distinct_states(setting.job, splits)
    holding = [spoken_by(setting, words, (0, j), few) for j in range(len(words.state))]
    running = [spoken_by(setting, words, (i, 0), splits) for i in range(len(words.step))]
    held_halves = [model_state_bytes(*held, node) for held in holding]
    running_halves = [transient_bytes(*way, node) for way in running]

    count, ways = len(splits) * len(places), len(splits) * len(running)
    timed("at once", count, rounds, 1.0, lambda: every(worst_ranks, points))
    holds = [(*held, node) for held in holding]
    timed("what is held", len(few) * len(holding), rounds, None, lambda: every(model_state_bytes, holds))
    runs = [(*way, node) for way in running]
    timed("what runs", ways, rounds, 0.7, lambda: every(transient_bytes, runs))
    pairs = [(running_halves[i], held_halves[j], held_of) for i, j in places]
    timed("both halves and the node", count, rounds, 0.15, lambda: every(worst_of_sums, pairs))


def every(work: Callable[..., object], arguments: Sequence[tuple[object, ...]]) -> None:
    """Nothing is kept: new memory costs more than the formula."""
    for given in arguments:
        work(*given)


def legal_splits(setting: Setting) -> LayoutColumns:
    recipe, backend = setting.recipe, setting.backend
    splits = enumerate_splits(recipe, backend.space(recipe))
    rules = [rule for rule in backend.rules(recipe) if not rule.of_techniques]
    return splits.take(np.flatnonzero(first_failed(rules, situation(recipe, splits)) < 0))


def spoken_by(
    setting: Setting, words: TechniqueSpace, places: tuple[int, int], splits: LayoutColumns
) -> tuple[Job, LayoutColumns]:
    techniques = words.step[places[0]], words.state[places[1]]
    return setting.job_with(*techniques), splits.with_techniques(**technique_values(*techniques))


def timed(name: str, layouts: int, rounds: int, bar: float | None, work: Callable[[], object]) -> None:
    times = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    each, best = (seconds / layouts * 1e6 for seconds in (statistics.median(times), min(times)))
    print(f"{name}: {layouts:,} layouts, {each:.3f} us a layout (best {best:.3f}); bar: {bar}")


if __name__ == "__main__":
    main()
