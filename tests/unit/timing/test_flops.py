"""No layout is faster than its arithmetic, so nothing that would do is passed over for being too slow."""

from __future__ import annotations

from dataclasses import replace

import pytest
from timed_jobs import BASE, LLAMA, job, time_of, total

from llmlaunch.families.hub_ids import load_preset
from llmlaunch.frameworks.framework import backend_for
from llmlaunch.layers.attention import SoftmaxAttention
from llmlaunch.layers.model import model_of
from llmlaunch.layers.pooled_attention import PooledAttention
from llmlaunch.models.shape import Indexer, MlaShape, ModelShape, SlidingWindow
from llmlaunch.planner.search import search
from llmlaunch.planner.setting import setting_of
from llmlaunch.techniques import Techniques
from llmlaunch.techniques.requests import Adapters
from llmlaunch.timing.arithmetic import least_device_seconds, token_flops
from support.changed_facts import changed
from support.plans import plan_of
from support.recipes import recipe_of
from support.soak import SOAK, share

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


QUICK = ("data parallel", "adapters", "the last layers", "rows sampled", "a window that is a mask", "a CPU")


def attended_keys(shape: ModelShape, sequence_length: int) -> float:
    """Return the keys that a token attends to, averaged over the layers."""
    model = model_of(shape)
    blocks = [(count, layer.blocks[0]) for count, layer in zip(model.counts, model.kinds, strict=True)]
    keys = [
        count * block.attended_keys(sequence_length) for count, block in blocks if isinstance(block, SoftmaxAttention)
    ]
    return sum(keys) / shape.num_layers


@pytest.mark.parametrize("name", share(CASES, QUICK))
def test_no_layout_beats_the_floor(name: str) -> None:
    recipe = recipe_of(*CASES[name])
    for nodes in (1, 8) if SOAK else (1,):
        setting = setting_of(replace(recipe, nodes=nodes), backend_for(recipe))
        points = search(setting)
        if len(points.points):
            fastest = float(points.step_seconds.min()) * setting.recipe.world_size
            assert fastest >= least_device_seconds(setting.job, recipe.cluster)


def test_the_floor_is_near_enough_to_be_of_use() -> None:
    recipe = recipe_of("llama2-7b-deepspeed")
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
    scores = 6 * 2 * 4096 * 2 * 4096
    assert token_flops(nano, 8192).total == pytest.approx(3 * (products + scans + scores))


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
    for layer in model_of(shape).kinds:
        block = layer.blocks[0]
        assert isinstance(block, PooledAttention)
        most = {0: 0, 4: 512, 128: 8192}[block.ratio]
        assert block.attended_keys(8192) == pytest.approx(seen(block.ratio, most), abs=1.5)


def test_the_arithmetic_of_deepseek_v4_is_what_its_published_runs_count() -> None:
    """748 and 706 teraflops at 8,224 and 7,776 tokens a second and GPU (tests/data/published_rows.json, its source),
    where the indexer's scores are part of it."""
    shape = replace(load_preset("deepseek-v4-flash"), mtp_num_layers=1)
    for flops, tokens in ((748e12, 8224), (706e12, 7776)):
        assert token_flops(shape, 4096).total == pytest.approx(flops / tokens, rel=0.015)


def test_layers_with_a_window_take_the_time_of_their_window() -> None:
    """Less by what they do not see, and nothing else of a step changes; a mask spares nothing."""
    window = replace(LLAMA, sliding_window=SlidingWindow(1024))
    whole, windowed = (time_of(BASE, job(shape)).terms for shape in (LLAMA, window))
    unseen = 2 * 3 * (attended_keys(LLAMA, 8192) - attended_keys(window, 8192)) * 2 * LLAMA.query_width * 32
    assert token_flops(LLAMA, 8192).total - token_flops(window, 8192).total == pytest.approx(unseen)
    assert {name for name in whole if windowed[name] != whole[name]} == {"attention", "pipeline_bubble", "stragglers"}
    assert windowed["attention"] / whole["attention"] == pytest.approx(attended_keys(window, 8192) / 4096, rel=0.1)
    masked = job(window)
    masked = replace(masked, facts=changed(masked.facts, windows_masked=True))
    assert total(BASE, masked) == total(BASE, job(LLAMA))


def test_attention_of_packed_rows_works_out_the_whole_square() -> None:
    packed = job(LLAMA)
    packed = replace(packed, facts=changed(packed.facts, row_mask_bytes=1.0, windows_masked=True))
    whole, causal = (time_of(BASE, of).terms["attention"] for of in (packed, job(LLAMA)))
    assert 1.7 < whole / causal <= 2.0  # but for the last blocks of queries


def utilised(name: str, *overrides: str) -> float:
    """Return the share of the peaks that the arithmetic of a plan's step uses."""
    plan = plan_of(name, *overrides)
    assert plan.mfu is not None
    return plan.mfu


def test_frozen_layers_go_forward_alone_and_count_so() -> None:
    """Of 32 layers the last two are trained: three passes of those and of the head, one of the others."""
    layer = (token_flops(LLAMA, 8192).total - 6 * LLAMA.hidden_size * LLAMA.vocab_size) / 32
    some = token_flops(LLAMA, 8192, Techniques(trained_layers=2)).total
    assert some == pytest.approx(2 * layer + 30 * layer / 3 + 6 * LLAMA.hidden_size * LLAMA.vocab_size)
    assert token_flops(LLAMA, 8192, Techniques(trained_layers=32)) == token_flops(LLAMA, 8192)


def test_a_frozen_matrix_beside_an_adapter_has_no_weight_gradient() -> None:
    """Two products of each matrix and of the head, attention forward and backward, three of each adapter's two."""
    h, kv, ffn = LLAMA.hidden_size, LLAMA.key_value_width, LLAMA.ffn_hidden_size
    matrices = 32 * (2 * h * h + 2 * h * kv + 3 * h * ffn) + h * LLAMA.vocab_size
    scores = 32 * 3 * 2 * attended_keys(LLAMA, 8192) * 2 * LLAMA.query_width
    ends = {"q": 2 * h, "k": h + kv, "v": h + kv, "o": 2 * h, "gate": h + ffn, "up": h + ffn, "down": h + ffn}
    adapters = 32 * 6 * 16 * sum(ends.values())
    lora = token_flops(LLAMA, 8192, Techniques(adapters=Adapters(rank=16))).total
    assert lora == pytest.approx(2 * 2 * matrices + scores + adapters)
    first = 32 * 2 * 16 * (6 * h + ffn)  # the input of q, k, v, o, gate, up and down
    fixed = Techniques(adapters=Adapters(rank=16, frozen_down=True))
    assert lora - token_flops(LLAMA, 8192, fixed).total == pytest.approx(first)


def test_experts_with_a_capacity_compute_what_they_take() -> None:
    shape = load_preset("mixtral-8x7b")
    assert shape.moe is not None
    half = replace(shape, moe=replace(shape.moe, capacity_factor=0.5))
    more = replace(shape, moe=replace(shape.moe, capacity_factor=2.0))
    experts = 6 * 32 * 2 * 3 * 4096 * 14336
    assert token_flops(shape, 4096).total - token_flops(half, 4096).total == pytest.approx(experts / 2)
    assert token_flops(more, 4096) == token_flops(shape, 4096)


def test_sampled_rows_make_a_share_of_the_weight_gradients() -> None:
    less = token_flops(LLAMA, 8192).linears - token_flops(LLAMA, 8192, Techniques(sampled_share=0.25)).linears
    assert less == pytest.approx(token_flops(LLAMA, 8192).linears / 3 * 0.75)


def test_prediction_heads_count_as_the_kind_of_layer_that_they_have() -> None:
    shape = replace(load_preset("deepseek-v3"), mtp_num_layers=0)
    head = token_flops(replace(shape, mtp_num_layers=1), 4096).total - token_flops(shape, 4096).total
    predicting = model_of(shape).kinds[-1]
    mixture = predicting.token_elements + predicting.attended_elements(4096)
    h = shape.hidden_size
    assert head == pytest.approx(6 * (mixture + h * shape.vocab_size + 2 * h * h))


def test_quantized_layers_are_held_against_the_peak_of_their_format() -> None:
    plain, eight, four = (
        utilised("llama3-70b", "cluster=b300-x8", "layout={tensor: 4, pipeline: 4, techniques: asked}", *narrow)
        for narrow in ((), ("training.fp8=mxfp8",), ("training.fp4=nvfp4",))
    )
    assert four < eight < plain < 0.75


def test_recompute_is_no_work_of_the_model() -> None:
    """The same arithmetic over a longer step: recomputing shows as a lower utilisation."""
    few = "layout={tensor: 1, pipeline: 1, context: 1, micro_batch_size: 1, techniques: asked}"
    kept, again = (plan_of("llama3-8b", few, f"layout.recompute={kind}") for kind in ("none", "full"))
    assert kept.mfu is not None
    assert again.mfu is not None
    assert again.mfu * again.chosen.step_seconds == pytest.approx(kept.mfu * kept.chosen.step_seconds)
