"""Muon's matrices by hand: which rank has which, how long buffers are, and what a step makes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from shapes import LLAMA3_8B, MIXTRAL, job_of, ranks

from llmlaunch.families.hub_ids import load_preset
from llmlaunch.frameworks.megatron.facts import MegatronOptions, megatron_facts
from llmlaunch.layers.model import model_of
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.job import all_ranks, of_classes
from llmlaunch.memory.layer_wise import WholeMatrices, whole_matrices
from llmlaunch.models.shape import ModelShape, SlidingWindow

MUON = MegatronOptions(muon=True, matrices_whole=True)
H, FFN, QKV = 4096, 14336, 4096 + 2 * 1024
FIRST, SECOND, QUERIES, OUTPUT = 2 * FFN * H, FFN * H, QKV * H, H * H
LAYER = FIRST + SECOND + QUERIES + OUTPUT


def matrices(shape: ModelShape, layout: Layout, rank: int = 0) -> WholeMatrices:
    """Of one pipeline rank."""
    job = job_of(shape, layout, megatron_facts(MUON))
    every = whole_matrices(job, all_ranks(job, LayoutColumns.of([layout])))
    return WholeMatrices(**{name: column[rank : rank + 1] for name, column in vars(every).items() if column.ndim})


@pytest.mark.parametrize(
    ("data", "padding", "updated"),
    [
        (1, 0, 4 * LAYER),
        (4, 0, LAYER),  # a layer's worth each
        (16, 16 * FIRST - 4 * LAYER, FIRST),  # as long as the largest matrix, and four ranks have one of these
    ],
)
def test_a_buffer_is_as_long_as_the_fullest_rank_times_the_ranks(data: int, padding: int, updated: int) -> None:
    whole = matrices(LLAMA3_8B, Layout(pipeline=8, data=data, zero_stage=1), rank=1)
    assert (whole.dense, whole.dense_padding, whole.updated, whole.largest) == (4 * LAYER, padding, updated, FIRST)
    assert whole.expert == whole.expert_padding == 0


def test_the_first_stage_packs_bucket_after_bucket() -> None:
    """Of two ranks a bucket is full with one layer: the first matrix on one of them, and less on the other."""
    layout = Layout(pipeline=16, data=2, zero_stage=1)
    one, all_at_once = matrices(LLAMA3_8B, layout, 0), matrices(LLAMA3_8B, layout, 1)
    assert one.dense + one.dense_padding == 2 * 2 * FIRST
    assert one.updated == 2 * FIRST
    assert all_at_once.dense_padding == 0
    assert all_at_once.updated == LAYER


def test_chunks_are_packed_each_by_itself() -> None:
    layout = Layout(pipeline=4, virtual_pipeline=2, data=16, zero_stage=1)
    whole = matrices(LLAMA3_8B, layout, rank=1)
    assert whole.dense + whole.dense_padding == 2 * 16 * FIRST
    assert whole.updated == 2 * FIRST


def test_gated_delta_nets_and_shared_experts_are_made_of_matrices() -> None:
    """Qwen3-Next: 36 layers with a delta net, 12 with attention, and a mixture in each of them."""
    whole = matrices(load_preset("qwen3-next-80b-a3b"), Layout(data=1, zero_stage=1))
    h, expert = 2048, 3 * 2048 * 512
    delta = h * (2 * 16 * 128 + 2 * 32 * 128 + 2 * 32) + 32 * 128 * h
    attention = h * (2 * 16 * 256 + 2 * 2 * 256) + 16 * 256 * h
    assert whole.dense == 36 * delta + 12 * attention + 48 * (h * (512 + 1) + expert)
    assert whole.expert == 48 * 512 * expert


def test_kinds_of_layers_with_the_same_matrices_are_packed_as_one() -> None:
    windows = replace(LLAMA3_8B, sliding_window=SlidingWindow(1024, full_every=2))
    assert len(model_of(windows).kinds) == 2
    layout = Layout(pipeline=8, data=4, zero_stage=1)
    assert vars(matrices(windows, layout, rank=1)) == vars(matrices(LLAMA3_8B, layout, rank=1))


def test_a_bound_has_the_kind_of_layer_with_the_fewest_elements() -> None:
    """Of Qwen3-Next's mixtures those with attention, not with a delta net."""
    shape, layout = load_preset("qwen3-next-80b-a3b"), Layout(data=1, zero_stage=1)
    job, one = job_of(shape, layout, megatron_facts(MUON)), np.ones(1, dtype=np.int64)
    bound = of_classes(job, LayoutColumns.of([layout]), 0 * one, one, 0 * one, 12 * one)
    h, attention = 2048, 2048 * (2 * 16 * 256 + 2 * 2 * 256) + 16 * 256 * 2048
    assert whole_matrices(job, bound).dense == 12 * (attention + h * (512 + 1) + 3 * h * 512)


def test_each_of_five_steps_multiplies_three_times() -> None:
    whole = matrices(LLAMA3_8B, Layout(pipeline=8, data=1, zero_stage=1), rank=1)
    each = [(H, 2 * FFN), (H, FFN), (H, QKV), (H, H)]
    products = sum(5 * (4 * short**2 * long + 2 * short**3) for short, long in each)
    assert whole.products == pytest.approx(4 * products)
    spread = matrices(LLAMA3_8B, Layout(pipeline=8, data=4, zero_stage=1), rank=1)
    assert spread.products == pytest.approx(products)


def test_states_gradients_and_the_step_follow_the_matrices() -> None:
    layout = Layout(pipeline=8, data=16, zero_stage=1)
    adam, muon = (ranks(LLAMA3_8B, layout, megatron_facts(options))[1].terms for options in (MegatronOptions(), MUON))
    padding = 16 * FIRST - 4 * LAYER
    assert muon["parameters"] - adam["parameters"] == 2 * padding
    assert muon["gradients"] - adam["gradients"] == 4 * padding
    assert muon["optimizer_states"] - adam["optimizer_states"] == 8 * FIRST - 12 * 4 * LAYER / 16
    alone = Layout(data=1, zero_stage=0)
    adam, muon = (ranks(LLAMA3_8B, alone, megatron_facts(options))[0].terms for options in (MegatronOptions(), MUON))
    assert adam["optimizer_states"] - muon["optimizer_states"] == 4 * 32 * LAYER
    assert muon["parameters"] == adam["parameters"]


def test_experts_fill_buffers_of_their_own() -> None:
    """One expert in each of four layers over sixteen ranks: the fullest has one first matrix."""
    layout = Layout(pipeline=8, data=128, expert=8, zero_stage=1)
    whole = matrices(MIXTRAL, layout, rank=1)
    assert whole.expert_padding == 16 * FIRST - 4 * (FIRST + SECOND)
    adam, muon = (ranks(MIXTRAL, layout, megatron_facts(options))[1].terms for options in (MegatronOptions(), MUON))
    assert muon["parameters"] - adam["parameters"] == 2 * (whole.dense_padding + whole.expert_padding)
    shards = 12 * (whole.dense / 128 + whole.expert / 16)
    assert muon["optimizer_states"] - adam["optimizer_states"] == pytest.approx(8 * whole.updated - shards, abs=8)
