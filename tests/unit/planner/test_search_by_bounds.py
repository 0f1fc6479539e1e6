"""A search that leaves out what cannot be among the first gives the same first ones as pricing everything."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from llmlaunch.layout import LayoutColumns, refusal_counts
from llmlaunch.memory.grouped_pricing import (
    WorstBytes,
    distinct_states,
    model_state_bytes,
    transient_bytes,
    worst_of_sums,
)
from llmlaunch.memory.job import Job
from llmlaunch.planner.legality import first_failed, situation, technique_legality
from llmlaunch.planner.memory_bounds import LeastSeconds, MemoryBounds, least_state_bytes_of, passes_with
from llmlaunch.planner.plan import Candidate
from llmlaunch.planner.pricing import price_all
from llmlaunch.planner.search import EXACT, SearchResult, search
from llmlaunch.planner.search_space import (
    enumerate_splits,
    enumerate_uneven,
    technique_space,
)
from llmlaunch.planner.setting import Setting, node_of
from llmlaunch.planner.stage_search import balanced, costs_of, have_cuts
from llmlaunch.planner.technique_batches import alike_steps, apply_alike, group_equal
from llmlaunch.timing.passes import pass_seconds
from support.plans import apply_techniques, gallery_setting
from support.soak import SOAK

FEW = "layout={tensor: [1, 2], context: 1, micro_batch_size: [1, 2]}"
JOBS = {
    "dense": ("llama3-8b", "nodes=1", FEW),
    "dense, uneven": ("llama3-8b", "nodes=1", "model.num_layers=14", FEW),
    "small card": ("llama3-8b", "nodes=1", "cluster=a100-40gb-x8", FEW),
    "mixture": ("mixtral-8x7b", "nodes=2", "layout={tensor: [1, 2], micro_batch_size: 1, context: 1}"),
    "dense layers first": (
        "deepseek-v2-lite",
        "nodes=1",
        "layout={tensor: 1, micro_batch_size: 1, context: 1, expert_tensor: 1}",
    ),
    "heads before the loss": (
        "llama3-8b",
        "nodes=1",
        "model={base: llama3-8b, num_layers: 12, mtp_num_layers: 1}",
        "layout={tensor: 1, context: 1, micro_batch_size: [1, 2], mtp_stage: before-last}",
    ),
    "dense layers and heads before the loss": (
        "deepseek-v2-lite",
        "nodes=1",
        "model={base: deepseek-v2-lite, num_layers: 9, mtp_num_layers: 1}",
        "layout={tensor: 1, micro_batch_size: 1, context: 1, expert_tensor: 1, mtp_stage: before-last}",
    ),
    "windows": (
        "llama3-8b",
        "nodes=1",
        "model={base: llama3-8b, num_layers: 13, sliding_window: {tokens: 256, full_every: 3}}",
        "training.sequence_length=16384",
        "layout={tensor: 1, context: 1, micro_batch_size: [1, 2]}",
    ),
    "deepspeed": ("llama2-7b-deepspeed", "nodes=1"),
    "long": ("llama3-8b", "nodes=2", "training.sequence_length=65536", "layout={tensor: 4, micro_batch_size: 1}"),
}
HYBRID = ("mixtral-8x7b", "nodes=2", "model=nemotron-3-nano", "layout={tensor: 1, micro_batch_size: 1, context: 1}")
LIMITS = {"usual": (), "tight": ("memory={limit: 0.3}",), "none": ("memory={limit: 0.02, floor_gib: 0}",)}


def setting(job: str, *overrides: str) -> Setting:
    name, *own = HYBRID if job == "hybrid" else JOBS[job]
    return gallery_setting(name, *own, *overrides)


def first(asked: Setting, result: SearchResult) -> list[Candidate]:
    return [result.candidate(asked.recipe, place) for place in range(min(EXACT, len(result.first)))]


def rule_counts(result: SearchResult) -> Counter[str]:
    keys = {rule.key for rule in result.rules}
    return Counter({key: count for key, count in result.refused.items() if key in keys})


# Each job with one limit, in `make soak` with each.
LIMITED = [(job, limit) for n, job in enumerate(JOBS) for limit in (LIMITS if SOAK else [[*LIMITS][n % 3]])]


@pytest.mark.parametrize(("job", "limit"), LIMITED)
def test_the_first_ones_are_those_of_the_whole_space(job: str, limit: str) -> None:
    asked = setting(job, *LIMITS[limit])
    bounded, whole = search(asked), search(asked, whole=True)
    assert bool(np.any(bounded.safe)) == bool(np.any(whole.safe))
    assert rule_counts(bounded) == rule_counts(whole)
    assert sum(bounded.refused.values()) + np.count_nonzero(bounded.safe) == bounded.searched
    split = bounded.points.layouts
    assert np.all(split.data * split.tensor * split.pipeline * split.context == asked.recipe.world_size)
    if np.any(whole.safe):
        assert np.all(np.diff(bounded.preferred_seconds[bounded.first]) >= -1e-9)
        assert first(asked, bounded) == first(asked, whole)
    else:
        assert first(asked, bounded)[:1] == first(asked, whole)[:1]


def legal_splits(asked: Setting, count: int) -> list[LayoutColumns]:
    """Return up to about so many even splits and so many uneven ones, spread over all."""
    recipe, space = asked.recipe, asked.backend.space(asked.recipe)
    rules = [rule for rule in asked.backend.rules(recipe) if not rule.of_techniques]
    both = enumerate_splits(recipe, space), enumerate_uneven(recipe, space)
    legal = [splits.take(first_failed(rules, situation(recipe, splits)) < 0) for splits in both if len(splits)]
    return [splits.take(np.arange(0, len(splits), 1 + len(splits) // count)) for splits in legal]


@pytest.mark.parametrize("job", [*JOBS, "hybrid"])
def test_no_candidate_is_cheaper_than_its_bounds(job: str) -> None:
    asked = setting(job)
    space = technique_space(asked.recipe, asked.backend)
    for splits in legal_splits(asked, 30):
        uneven = bool(np.any(splits.uneven))
        splits = splits.take(have_cuts(asked.job, splits)) if uneven else splits
        bounds, rows = LeastSeconds(asked, space, splits), np.arange(len(splits))
        least = bounds.of_any(rows)
        for index in range(0, len(space.step), 1 + len(space.step) // 60):
            step, cut = space.step[index], splits
            if uneven:
                job, layouts = asked.job_with(step, space.state[0]), splits
                layouts = layouts.with_techniques(0, step.recompute, step.recompute_layers, step.offload_layers)
                cut = balanced(job, layouts, costs_of(job, asked.cluster, layouts))
            seconds = passes_with(asked, space, step, cut).total
            if uneven:
                keeping_all = bounds.keeping(step.keeping_all, rows)
                in_balance = bounds.with_steps(space, np.full(len(rows), index), 0, rows)
            else:
                in_balance = keeping_all = passes_with(asked, space, step.keeping_all, splits).total
            for bound in (least, keeping_all, in_balance):
                assert np.all(bound <= seconds * (1 + 1e-9)), step


@pytest.mark.parametrize("job", ["dense", "mixture", "deepspeed", "dense layers first"])
def test_no_candidate_needs_less_than_its_model_states(job: str) -> None:
    asked = setting(job)
    recipe, backend = asked.recipe, asked.backend
    space = technique_space(recipe, backend)
    splits = legal_splits(asked, 60)[0]
    rows = price_all(asked, splits, space, [rule for rule in backend.rules(recipe) if rule.of_techniques]).rows
    least = least_state_bytes_of(asked, space, splits)
    assert np.all(least[rows.state_techniques, rows.split] <= rows.device_bytes)


def worst_bytes(asked: Setting, job: Job, layouts: LayoutColumns) -> WorstBytes:
    distinct, state_of = distinct_states(job, layouts)
    node = node_of(asked.recipe)
    return worst_of_sums(transient_bytes(job, layouts, node), model_state_bytes(job, distinct, node), state_of)


@pytest.mark.parametrize("share", [0.2, 0.6])
@pytest.mark.parametrize("job", ["dense", "mixture", "deepspeed", "dense layers first", "hybrid"])
def test_no_candidate_that_fits_is_left_out_by_the_memory_of_its_layers(job: str, share: float) -> None:
    usual = setting(job)
    most_bytes = int(share * usual.limit.memory_bytes)
    asked = replace(usual, limit=replace(usual.limit, limit_bytes=most_bytes, fits_bytes=None))
    space = technique_space(asked.recipe, asked.backend)
    out = 0
    for splits in legal_splits(asked, 20):
        splits = splits.take(have_cuts(asked.job, splits)) if np.any(splits.uneven) else splits
        for states in group_equal(asked, space):
            memory = MemoryBounds(asked, space, splits, states)
            for alike in alike_steps(space, range(0, len(space.step), 1 + len(space.step) // 20)):
                fits = memory.may_fit(alike, np.arange(len(splits)))
                step, row = np.divmod(np.arange(fits.size), len(splits))
                job_of, layouts = apply_alike(asked, space, alike[step], states[-1], splits.take(row))
                if np.any(splits.uneven):
                    layouts = balanced(job_of, layouts, costs_of(job_of, asked.cluster, layouts))
                worst = worst_bytes(asked, job_of, layouts)
                fit = worst.device_bytes <= asked.limit.most_bytes
                assert not np.any(~fits.ravel() & fit)
                out += int(np.count_nonzero(~fits))
    assert out


@pytest.mark.parametrize("job", ["dense", "mixture", "dense layers first"])
def test_layouts_with_several_sets_of_modules_cost_what_each_costs_alone(job: str) -> None:
    asked = setting(job)
    space = technique_space(asked.recipe, asked.backend)
    splits = legal_splits(asked, 4)[0]
    for alike in alike_steps(space, range(0, len(space.step), 1 + len(space.step) // 60)):
        step = np.repeat(alike, len(splits))
        mixed, layouts = apply_alike(asked, space, step, 0, splits.take(np.tile(np.arange(len(splits)), len(alike))))
        costs = worst_bytes(asked, mixed, layouts), pass_seconds(mixed, asked.cluster, layouts).total
        for place, index in enumerate(alike.tolist()):
            mine = slice(place * len(splits), (place + 1) * len(splits))
            alone, plain = apply_techniques(space, (index, 0), splits)
            own = asked.job_of(alone)
            worst = worst_bytes(asked, own, plain)
            assert np.array_equal(costs[0].device_bytes[mine], worst.device_bytes), space.step[index]
            assert np.array_equal(costs[0].host_bytes[mine], worst.host_bytes), space.step[index]
            assert costs[1][mine] == pytest.approx(pass_seconds(own, asked.cluster, plain).total, rel=1e-12)


@pytest.mark.parametrize("job", JOBS if SOAK else ["dense, uneven", "mixture", "deepspeed", "long"])
def test_rules_that_are_looked_up_say_what_they_say_of_every_layout(job: str) -> None:
    asked = setting(job)
    recipe = asked.recipe
    space = technique_space(recipe, asked.backend)
    rules = [rule for rule in asked.backend.rules(recipe) if rule.of_techniques]
    for splits in legal_splits(asked, 100):
        legality = technique_legality(space, splits, rules, range(len(space.step)))
        refused: Counter[str] = Counter()
        for i, j in np.ndindex(len(space.step), len(space.state)):
            failed = first_failed(rules, situation(*apply_techniques(space, (i, j), splits)))
            if not space.switches[i]:
                refused += Counter(refusal_counts(rules, failed))
                assert np.array_equal(failed < 0, legality.legal(i, j))
            assert not np.any(legality.legal(i, j) & (failed >= 0))
        assert legality.refused == refused
