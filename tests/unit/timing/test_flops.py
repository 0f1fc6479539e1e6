"""No layout is faster than its arithmetic, so nothing that would do is passed over for being too slow."""

from __future__ import annotations

from dataclasses import replace

import pytest
from timed_jobs import BASE, LLAMA, job, time_of, total

from llmlaunch.backends.registry import backend_for
from llmlaunch.models.kinds import attention_kinds
from llmlaunch.models.presets import load_preset
from llmlaunch.models.shape import Indexer, MlaShape, SlidingWindow
from llmlaunch.planner.search import search
from llmlaunch.planner.setting import setting_of
from llmlaunch.timing.arithmetic import least_device_seconds, model_flops_per_token
from llmlaunch.timing.products import attended_keys
from support.recipes import recipe_of

WINDOW = "model={base: llama3-8b, sliding_window: {tokens: 1024, full_every: 3}}"
CASES = {
    "dense": ("llama3-70b",),
    "small": ("llama3-8b",),
    "experts": ("mixtral-8x7b", "layout={expert_tensor: 1, recompute: none}"),
    "experts with a capacity": (
        "mixtral-8x7b",
        "layout={expert_tensor: 1, recompute: none}",
        "model.moe={num_experts: 8, topk: 2, ffn_hidden_size: 14336, capacity_factor: 0.5}",
    ),
    "data parallel": ("llama2-7b-deepspeed",),
    "adapters": ("llama2-7b-deepspeed", "training.adapters={rank: 8}"),
    "the last layers": ("llama2-7b-deepspeed", "training.trained_layers=2"),
    "rows sampled": ("llama2-7b-deepspeed", "what_if={sampled_share: 0.3}"),
    "long sequences": ("llama3-8b", "training.sequence_length=131072", "training.global_batch_size=16"),
    "another card": ("llama3-70b", "cluster=gb200-nvl72"),
    "windows": ("llama3-8b", WINDOW),
    "a window that is a mask": ("llama2-7b-deepspeed", "model={base: llama2-7b, sliding_window: {tokens: 1024}}"),
    "sparse attention": ("deepseek-v3", "model={base: deepseek-v3.2, num_layers: 16}"),
    "pooled keys": ("deepseek-v3", "model={base: deepseek-v4-flash, num_layers: 16}"),
    "state spaces": ("mixtral-8x7b", "layout={expert_tensor: 1, recompute: none}", "model=nemotron-3-nano"),
    "a CPU": ("quickstart",),
}


@pytest.mark.parametrize("name_and_overrides", CASES.values(), ids=CASES)
def test_no_layout_beats_the_floor(name_and_overrides: tuple[str, ...]) -> None:
    recipe = recipe_of(*name_and_overrides)
    for nodes in (1, 8):
        setting = setting_of(replace(recipe, nodes=nodes), backend_for(recipe))
        points = search(setting)
        if len(points.points):
            fastest = float(points.step_seconds.min()) * setting.recipe.world_size
            assert fastest >= least_device_seconds(setting.job, recipe.cluster)


def test_the_floor_is_near_enough_to_be_of_use() -> None:
    recipe = recipe_of("llama3-70b")
    setting = setting_of(recipe, backend_for(recipe))
    fastest = float(search(setting).step_seconds.min()) * recipe.world_size
    assert fastest < 2.0 * least_device_seconds(setting.job, recipe.cluster)


def test_a_token_passes_through_the_one_part_that_each_layer_has() -> None:
    """Nemotron 3 Nano: 23 Mamba-2 mixers, 6 of attention, 23 mixtures; of a mixer's states seven products a column."""
    nano = load_preset("nemotron-3-nano")
    h, inner, convolved = 2688, 64 * 64, 64 * 64 + 2 * 8 * 128
    mixer, attention = h * (inner + convolved + 64) + inner * h, h * (4096 + 2 * 256) + 4096 * h
    mixture = 6 * 2 * h * 1856 + 2 * h * 3712
    products = 2 * (23 * mixer + 6 * attention + 23 * mixture + h * 131072)
    scans = 23 * (7 * inner * 128 + 2 * 4 * convolved)
    scores = 6 * 2 * attended_keys(nano, 8192) * 2 * 4096
    assert model_flops_per_token(nano, 8192) == pytest.approx(3 * (products + scans + scores))


def test_a_token_attends_to_half_of_the_sequence_or_to_its_window() -> None:
    seen = [sum(min(i + 1, most) for i in range(8192)) / 8192 for most in (8192, 1024)]
    assert attended_keys(LLAMA, 8192) == pytest.approx(seen[0], abs=0.5)
    windows = replace(LLAMA, sliding_window=SlidingWindow(1024, full_every=3))  # 10 of 32 layers see everything
    assert attended_keys(windows, 8192) == pytest.approx((22 * seen[1] + 10 * seen[0]) / 32, abs=0.5)
    assert attended_keys(replace(LLAMA, sliding_window=SlidingWindow(8192)), 8192) == attended_keys(LLAMA, 8192)
    pieces = replace(LLAMA, sliding_window=SlidingWindow(1024, full_every=4, chunked=True))
    assert attended_keys(pieces, 8192) == (3 * 512 + 4096) / 4
    chosen = replace(LLAMA, mla=MlaShape(512, 512, 128, 64, 128), indexer=Indexer(64, 128, 1024))
    assert attended_keys(chosen, 8192) == pytest.approx(seen[1], abs=0.5)


def test_pooled_keys_are_as_many_as_there_are_or_as_are_chosen() -> None:
    def seen(ratio: int, most: int) -> float:
        window = sum(min(i + 1, 128) for i in range(8192)) / 8192
        return window + (sum(min((i + 1) // ratio, most) for i in range(8192)) / 8192 if ratio else 0.0)

    shape = load_preset("deepseek-v4-flash")
    for kind, ratio, most in zip(attention_kinds(shape), (0, 4, 128), (0, 512, 8192), strict=True):
        assert attended_keys(kind.shape, 8192) == pytest.approx(seen(ratio, most), abs=1.5)


def test_the_arithmetic_of_deepseek_v4_is_what_its_published_runs_count() -> None:
    """748 and 706 teraflops at 8,224 and 7,776 tokens a second and GPU (tests/data/published_rows.json, its source),
    where the indexer's scores are part of it."""
    shape = replace(load_preset("deepseek-v4-flash"), mtp_num_layers=1)
    for flops, tokens in ((748e12, 8224), (706e12, 7776)):
        assert model_flops_per_token(shape, 4096) == pytest.approx(flops / tokens, rel=0.015)


def test_layers_with_a_window_take_the_time_of_their_window() -> None:
    """Less by what they do not see, and nothing else of a step changes; a mask spares nothing."""
    window = replace(LLAMA, sliding_window=SlidingWindow(1024))
    whole, windowed = (time_of(BASE, job(shape)).terms for shape in (LLAMA, window))
    unseen = 2 * 3 * (attended_keys(LLAMA, 8192) - attended_keys(window, 8192)) * 2 * LLAMA.query_width * 32
    assert model_flops_per_token(LLAMA, 8192) - model_flops_per_token(window, 8192) == pytest.approx(unseen)
    assert {name for name in whole if windowed[name] != whole[name]} == {"attention", "pipeline_bubble", "stragglers"}
    assert windowed["attention"] / whole["attention"] == pytest.approx(attended_keys(window, 8192) / 4096, rel=0.1)
    masked = job(window)
    masked = replace(masked, facts=replace(masked.facts, windows_masked=True))
    assert total(BASE, masked) == total(BASE, job(LLAMA))
