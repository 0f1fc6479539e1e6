"""A search that leaves out what cannot be among the first gives the same first ones as pricing everything."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmlaunch.layout import LayoutColumns, refusal_counts
from llmlaunch.planner.bounds import StepBounds, least_seconds, least_state_bytes_of, passes_with
from llmlaunch.planner.legality import first_failed, situation, technique_legality
from llmlaunch.planner.plan import Candidate
from llmlaunch.planner.pricing import price_all
from llmlaunch.planner.search import EXACT, SearchResult, preferred_seconds, search
from llmlaunch.planner.search_space import apply_techniques, enumerate_splits, enumerate_uneven, technique_space
from llmlaunch.planner.setting import Setting
from support.plans import gallery_setting

FEW = "layout={tensor: [1, 2], context: 1, micro_batch_size: [1, 2]}"
JOBS = {
    "dense": ("llama3-8b", "nodes=1", FEW),
    "dense, uneven": ("llama3-8b", "nodes=1", "model.num_layers=14", FEW),
    "small card": ("llama3-8b", "nodes=1", "cluster=a100-40gb-x8", FEW),
    "mixture": ("mixtral-8x7b", "nodes=2", "layout={tensor: [1, 2], micro_batch_size: 1, context: 1}"),
    "dense layers first": (
        "deepseek-v2-lite",
        "nodes=1",
        "layout={tensor: 1, micro_batch_size: [1, 2], context: 1, expert_tensor: 1}",
    ),
    "deepspeed": ("llama2-7b-deepspeed", "nodes=1"),
    "long": ("llama3-8b", "nodes=2", "training.sequence_length=65536", "layout={tensor: 4, micro_batch_size: 1}"),
}
LIMITS = {"usual": (), "tight": ("memory={limit: 0.3}",), "none": ("memory={limit: 0.02, floor_gib: 0}",)}


def setting(job: str, *overrides: str) -> Setting:
    name, *own = JOBS[job]
    return gallery_setting(name, *own, *overrides)


def first(asked: Setting, result: SearchResult) -> list[Candidate]:
    return [result.candidate(asked.recipe, place) for place in range(min(EXACT, len(result.first)))]


def rule_counts(result: SearchResult) -> Counter[str]:
    keys = {rule.key for rule in result.rules}
    return Counter({key: count for key, count in result.refused.items() if key in keys})


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("job", JOBS)
def test_the_first_ones_are_those_of_the_whole_space(job: str, limit: str) -> None:
    asked = setting(job, *LIMITS[limit])
    bounded, whole = search(asked), search(asked, whole=True)
    assert bool(np.any(bounded.safe)) == bool(np.any(whole.safe))
    assert rule_counts(bounded) == rule_counts(whole)
    assert sum(bounded.refused.values()) + np.count_nonzero(bounded.safe) == bounded.searched
    if np.any(whole.safe):
        assert first(asked, bounded) == first(asked, whole)
    else:
        assert first(asked, bounded)[0] == first(asked, whole)[0]


@settings(max_examples=15, deadline=None)
@given(
    job=st.sampled_from(["dense", "small card", "mixture", "deepspeed"]),
    batch=st.sampled_from([16, 48, 64, 256]),
    share=st.sampled_from([0.05, 0.2, 0.4, 0.8]),
    preference=st.booleans(),
)
def test_even_stages_are_ranked_as_by_brute_force(job: str, batch: int, share: float, preference: bool) -> None:
    """Every legal layout is priced by itself; all that a search adds is order."""
    asked = setting(job, f"training.global_batch_size={batch}", f"memory={{limit: {share}}}")
    asked = asked.with_recipe(replace(asked.recipe, preference=preference, layers_by_stage=()))
    recipe, backend = asked.recipe, asked.backend
    space, rules = technique_space(recipe, backend), backend.rules(recipe)
    splits = enumerate_splits(recipe, backend.space(recipe))
    size_rules = [rule for rule in rules if not rule.of_techniques]
    splits = splits.take(first_failed(size_rules, situation(recipe, splits)) < 0)
    points = price_all(asked, splits, space, [rule for rule in rules if rule.of_techniques])
    limits = asked.limit.limit_bytes, asked.host_limit.limit_bytes
    safe = (points.rows.device_bytes <= limits[0]) & (points.rows.host_bytes <= limits[1])
    result = search(asked)
    assert bool(np.any(result.safe)) == bool(np.any(safe))
    if np.any(safe):
        expected = np.sort(preferred_seconds(recipe, points)[safe])[:EXACT]
        assert result.preferred_seconds[result.first[:EXACT]] == pytest.approx(expected, rel=1e-12)


def legal_splits(asked: Setting) -> list[LayoutColumns]:
    recipe, space = asked.recipe, asked.backend.space(asked.recipe)
    rules = [rule for rule in asked.backend.rules(recipe) if not rule.of_techniques]
    both = enumerate_splits(recipe, space), enumerate_uneven(recipe, space)
    return [splits.take(first_failed(rules, situation(recipe, splits)) < 0) for splits in both if len(splits)]


@pytest.mark.parametrize("job", JOBS)
def test_no_candidate_is_cheaper_than_its_bounds(job: str) -> None:
    asked = setting(job)
    space = technique_space(asked.recipe, asked.backend)
    for splits in legal_splits(asked):
        least, in_balance = least_seconds(asked, space, splits), bool(np.any(splits.uneven))
        bounds = StepBounds(asked, space, splits, in_balance)
        for step in space.step:
            seconds = passes_with(asked, space, step, splits, False).total
            assert np.all(least <= seconds * (1 + 1e-9))
            known = bounds.least(step)
            assert np.all(known <= seconds * (1 + 1e-9)), step
            if not in_balance:
                bounds.add(step, np.arange(len(splits)), seconds, known)


@pytest.mark.parametrize("job", ["dense", "mixture", "deepspeed", "dense layers first"])
def test_no_candidate_needs_less_than_its_model_states(job: str) -> None:
    asked = setting(job)
    recipe, backend = asked.recipe, asked.backend
    space = technique_space(recipe, backend)
    splits = legal_splits(asked)[0]
    rows = price_all(asked, splits, space, [rule for rule in backend.rules(recipe) if rule.of_techniques]).rows
    least = least_state_bytes_of(asked, space, splits)
    assert np.all(least[rows.state_techniques, rows.split] <= rows.device_bytes)


@pytest.mark.parametrize("job", JOBS)
def test_rules_that_are_looked_up_say_what_they_say_of_every_layout(job: str) -> None:
    asked = setting(job)
    recipe = asked.recipe
    space = technique_space(recipe, asked.backend)
    rules = [rule for rule in asked.backend.rules(recipe) if rule.of_techniques]
    for splits in legal_splits(asked):
        legality = technique_legality(recipe, space, splits, rules, range(len(space.step)))
        refused: Counter[str] = Counter()
        for i, j in np.ndindex(len(space.step), len(space.state)):
            failed = first_failed(rules, situation(*apply_techniques(recipe, space, (i, j), splits)))
            if not space.switches[i]:
                refused += Counter(refusal_counts(rules, failed))
                assert np.array_equal(failed < 0, legality.legal(i, j))
            assert not np.any(legality.legal(i, j) & (failed >= 0))
        assert legality.refused == refused
