"""Laws that hold of the time of every plan, whatever is trained and with whatever techniques."""

from __future__ import annotations

import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmlaunch.layout import LayoutColumns
from llmlaunch.memory.estimator import estimate
from llmlaunch.planner.plan_json import plan_json
from llmlaunch.planner.planning import plan_of
from llmlaunch.planner.search import SearchResult, search
from llmlaunch.planner.search_space import recipe_with_techniques
from llmlaunch.planner.setting import Setting, node_of
from llmlaunch.timing.step import step_time
from support.plans import setting_for
from support.random_recipes import random_searches
from support.recipes import recipe_of
from support.soak import examples

EQUAL = 1e-9  # sums of floats in another order
DENSE = "model={num_layers: 2, hidden_size: 2048, ffn_hidden_size: 8192, num_attention_heads: 32, vocab_size: 50257"
WIDE = "model={num_layers: 1, hidden_size: 12288, ffn_hidden_size: 49152"
ZERO_3 = "layout={tensor: 1, pipeline: 1, context: 1, micro_batch_size: 1, zero_stage: 3, recompute: full"
OF_MUON = "layout={tensor: 1, pipeline: 1, context: 4, micro_batch_size: 4, zero_stage: 1, recompute: full"
SMALL_BATCH = ("training.sequence_length=1024", "training.global_batch_size=128")
CASES = {
    "ZeRO 3 recomputes what it gathers": (
        "llama2-7b-deepspeed",
        f"{DENSE}, num_query_groups: 2, tied_embeddings: true}}",
        "cluster=a100-40gb-x8",
        "nodes=4",
        *SMALL_BATCH,
        f"{ZERO_3}, techniques: asked}}",
    ),
    "windows, too": (
        "llama2-7b-deepspeed",
        f"{DENSE}, num_query_groups: 2, tied_embeddings: true, sliding_window: {{tokens: 1024, full_every: 6}}}}",
        "cluster=a100-40gb-x8",
        "nodes=4",
        *SMALL_BATCH,
        f"{ZERO_3}, techniques: asked}}",
    ),
    "Muon pads its buffers": (
        "llama3-8b",
        f"{WIDE}, num_attention_heads: 96, vocab_size: 128256}}",
        "cluster={base: h100-94gb-sxm-x4, devices_per_node: 8}",
        "nodes=5",
        "training.sequence_length=4096",
        "training.global_batch_size=80",
        "training.optimizer=muon",
        f"{OF_MUON}, techniques: asked}}",
    ),
    "Muon over uneven stages": (
        "llama3-8b",
        "model={base: llama3-8b, num_layers: 14}",
        "nodes=1",
        "training.optimizer=muon",
        "layout={tensor: 1, context: 1, pipeline: [1, 4], micro_batch_size: 1, techniques: asked}",
    ),
    "Muon with ZeRO 0 and 1": (
        "llama3-8b",
        "model=llama3.2-1b",
        "nodes=1",
        "training.optimizer=muon",
        "layout={tensor: 1, context: 1, pipeline: 1, zero_stage: [0, 1], techniques: asked}",
    ),
    "layers below the trained ones": ("llama2-7b-deepspeed", "training.trained_layers=2", "layout.zero_stage=3"),
}


def search_of(name: str, *overrides: str) -> tuple[Setting, SearchResult]:
    setting = setting_for(recipe_of(name, *overrides))
    return setting, search(setting)


def held_alone(setting: Setting, result: SearchResult, index: int) -> None:
    """Price one point of a search by itself: seconds, their parts and bytes are those that it was ranked with."""
    candidate = result.at(setting.recipe, index)
    job = setting.job_of(recipe_with_techniques(setting.recipe, *result.points.techniques(index)))
    alone = step_time(job, setting.cluster, LayoutColumns.of([candidate.layout]))
    shown = candidate.describe()
    assert candidate.step_seconds == pytest.approx(float(alone.total[0]), rel=EQUAL), shown
    assert sum(float(term[0]) for term in alone.terms.values()) == pytest.approx(candidate.step_seconds, rel=EQUAL)
    kind = setting.recipe.cluster.accelerator.peak_kind
    detail = estimate(job, candidate.layout, peak_kind=kind, node=node_of(setting.recipe))
    assert candidate.device_bytes == detail.worst.device_bytes, shown


def points_of_interest(result: SearchResult, seed: int = 0) -> list[int]:
    """Return the first points of the ranking and a few of the others."""
    others = random.Random(seed).sample(range(len(result.points)), min(len(result.points), 12))
    return list(dict.fromkeys([*result.first[:6].tolist(), *others]))


@pytest.mark.parametrize("name_and_overrides", CASES.values(), ids=CASES)
def test_what_is_shown_is_what_was_ranked_and_its_parts_sum_to_it(name_and_overrides: tuple[str, ...]) -> None:
    setting, result = search_of(*name_and_overrides)
    for index in points_of_interest(result):
        held_alone(setting, result, index)
    plan = plan_of(setting, result, 0)
    assert sum(plan.step_terms.values()) == pytest.approx(plan.chosen.step_seconds, rel=EQUAL)


@examples(4)
@given(seed=st.integers(min_value=0, max_value=10**9))
def test_any_candidate_priced_alone_is_as_it_was_ranked_and_the_plans_figures_agree_with_each_other(seed: int) -> None:
    """Seconds of a step, its parts, tokens a second, MFU, the length of the job and its end are one story."""
    with TemporaryDirectory() as folder:
        for setting, result in random_searches(seed, Path(folder)):
            for index in points_of_interest(result, seed):
                held_alone(setting, result, index)
            recipe = setting.recipe
            shown = plan_json(plan_of(setting, result, 0))
            seconds, tokens = shown["step_seconds"], recipe.workload.tokens_per_step
            assert sum(shown["step_terms"].values()) == pytest.approx(seconds, rel=EQUAL)
            assert min(shown["step_terms"].values()) >= 0.0
            assert shown["tokens_per_second_per_gpu"] * seconds * recipe.world_size == pytest.approx(tokens)
            assert shown["step_evidence"]["predicted_seconds"] == pytest.approx(seconds, rel=EQUAL)
            assert shown["mfu"] is None or 0.0 < shown["mfu"] <= 1.0
            assert shown["job"]["seconds"] == pytest.approx(recipe.training.steps * seconds)
            assert shown["job"]["gpu_hours"] == pytest.approx(shown["job"]["seconds"] * recipe.world_size / 3600)
