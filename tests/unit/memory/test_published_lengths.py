"""The longest sequences that authors publish, predicted: MsT's (Luo et al. 2024) on one A100 of 80 GB."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

import pytest

from llmlaunch.facts import NONE
from llmlaunch.frameworks.deepspeed.backend import DeepSpeed
from llmlaunch.layout import RECOMPUTE_FULL, Layout
from llmlaunch.memory.estimator import RankEstimate, estimate
from llmlaunch.memory.job import Job
from llmlaunch.planner.setting import setting_of
from llmlaunch.units import GIB
from support.changed_facts import changed
from support.recipes import recipe_of

BF16 = "training.optimizer={main_parameters: bf16, first_moment: bf16, second_moment: bf16}"
# github.com/wdlctc/mini-s: minis/mini_sequence.py (8 pieces of an MLP, 16 of the loss), README.md (lengths)
PIECES = "layout={loss: tiled, loss_tiles: 16, mlp_chunks: 8}"
PUBLISHED = {"llama3-8b": 60_000, "llama2-7b": 84_000}
DEVICE = 79.1 * GIB  # torch's total_memory


def job(model: str, tokens: int, devices: int = 1) -> Job:
    recipe = recipe_of(
        "llama2-7b-deepspeed",
        BF16,
        PIECES,
        f"model={{base: {model}, max_position_embeddings: 1000000}}",
        *("nodes=1", f"training.sequence_length={tokens}", f"training.global_batch_size={devices}"),
    )
    return setting_of(recipe, DeepSpeed()).job_of(recipe)


def as_mst_trains(model: str, tokens: int) -> RankEstimate:
    """Parameters and Adam's moments in bf16, without master weights; each parameter is stepped as soon as it has its
    gradient (scripts/benchmark_replace.py), and the pieces of an MLP keep what they save until it has run backward."""
    asked = job(model, tokens)
    stepped_at_once = changed(
        asked.facts,
        optimizer_bytes_unsharded=4.0,
        gradient_life=None,
        step_bytes=NONE,
        step_bytes_sharded=NONE,
        touched_gradient_bytes=NONE,
        gradient_norm_bytes=NONE,
        flat_bucket_bytes=0.0,
        mlp_chunks_recomputed=False,
    )
    return estimate(replace(asked, facts=stepped_at_once), Layout(recompute=RECOMPUTE_FULL)).ranks[0]


@pytest.mark.parametrize(("model", "error"), [("llama3-8b", 0.15), ("llama2-7b", 0.02)])
def test_the_longest_sequence_is_the_published_one(model: str, error: float) -> None:
    lengths = range(40_000, 100_000, 500)
    longest = lengths[bisect_right(lengths, DEVICE, key=lambda tokens: as_mst_trains(model, tokens).device_bytes) - 1]
    assert longest == pytest.approx(PUBLISHED[model], rel=error)


@pytest.mark.parametrize(("devices", "least", "most"), [(1, 95, 105), (2, 65, 71)])
def test_bf16_states_of_deepspeed_are_not_so_narrow(devices: int, least: int, most: int) -> None:
    """Master weights and gradients are there besides: they need the second card, where Ulysses then holds twice 60,000
    tokens."""
    layout = Layout(context=devices, zero_stage=3, recompute=RECOMPUTE_FULL)
    needed = estimate(job("llama3-8b", 60_000 * devices), layout).ranks[0].device_bytes
    assert least <= needed / GIB <= most
