"""The gradient of the embedding table comes last of a micro-batch: beside a large table and few layers it is a peak."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from shapes import ranks

from llmlaunch.backends.megatron.facts import MegatronOptions, megatron_facts
from llmlaunch.layout import RECOMPUTE_FULL, Layout
from llmlaunch.memory.estimator import RankEstimate
from llmlaunch.models.shape import ModelShape
from llmlaunch.techniques import Adapters, Techniques

LENGTH, WIDTH, VOCABULARY = 4096, 4096, 128256
SHAPE = ModelShape("four-layers", 4, WIDTH, 14336, 32, 8, 128, VOCABULARY, 8192)
TABLE = 2 * VOCABULARY * WIDTH  # its gradient in bf16
STREAM = 2 * LENGTH * WIDTH
PIPELINE = Layout(pipeline=4, data=2, zero_stage=1)


def first_rank(layout: Layout, microbatches: int, shape: ModelShape = SHAPE, **job: Any) -> RankEstimate:
    return ranks(shape, layout, microbatches=microbatches, **job)[0]


def beside(rank: RankEstimate) -> int:
    return rank.terms["activations"] + rank.terms["layer_backward"]


def test_of_one_microbatch_nothing_else_is_left() -> None:
    assert beside(first_rank(PIPELINE, 1)) == TABLE + STREAM


@pytest.mark.parametrize("microbatches", [2, 3])
def test_the_other_microbatches_in_flight_are_kept(microbatches: int) -> None:
    rank = first_rank(PIPELINE, microbatches)
    others = rank.terms["activations"] * (microbatches - 1) / microbatches
    assert beside(rank) == pytest.approx(others + TABLE + STREAM)


def test_where_the_layers_let_go_of_more_they_are_the_peak() -> None:
    deep = replace(SHAPE, num_layers=32)
    large, small = (first_rank(PIPELINE, 8, shape=shape) for shape in (deep, replace(deep, vocab_size=1024)))
    assert large.terms["layer_backward"] == small.terms["layer_backward"]


def test_an_interleaved_pipeline_lets_go_of_one_chunk_alone() -> None:
    """Eight layers on two ranks in four chunks: of 11 chunks in flight, all but one are there; but with no more
    micro-batches than ranks, those of later chunks have run backward as well."""
    layout = Layout(pipeline=2, virtual_pipeline=4, data=4, zero_stage=1)
    eight = replace(SHAPE, num_layers=8)
    steady, few = first_rank(layout, 4, shape=eight), first_rank(layout, 2, shape=eight)
    chunks = 2 * (2 - 1) + (4 - 1) * 2 + 1
    assert beside(steady) == pytest.approx(steady.terms["activations"] * (chunks - 1) / chunks + TABLE + STREAM)
    assert beside(few) < beside(steady)


@pytest.mark.parametrize("fused", [True, False])
def test_a_tied_head_on_the_same_rank_doubles_it(fused: bool) -> None:
    """What the head gives waits; where that is a stub, which others use as well, their sum is a tensor of its own."""
    tied = replace(SHAPE, num_layers=2, tied_embeddings=True)
    facts = megatron_facts(MegatronOptions(gradient_accumulation_fusion=fused))
    layout = Layout(data=2, zero_stage=1, recompute=RECOMPUTE_FULL)
    rank = first_rank(layout, 1, shape=tied, facts=facts, length=64)
    assert beside(rank) + rank.terms["recomputed_layer"] == pytest.approx(2 * TABLE + 2 * 64 * WIDTH)


def test_the_gradient_of_a_tied_head_waits_for_the_embedding() -> None:
    """While layers run backward, of which the last to come holds most."""
    layout = Layout(data=2, zero_stage=1)
    wide = replace(SHAPE, ffn_hidden_size=65536, vocab_size=16384)
    unfused = megatron_facts(MegatronOptions(gradient_accumulation_fusion=False))
    apart, tied = (
        first_rank(layout, 1, shape=replace(wide, tied_embeddings=tied), facts=unfused).terms["layer_backward"]
        for tied in (False, True)
    )
    assert tied - apart == 2 * 16384 * WIDTH


def test_a_frozen_table_has_no_gradient() -> None:
    adapters = Techniques(adapters=Adapters(8))
    assert beside(first_rank(Layout(pipeline=4, data=2), 1, techniques=adapters)) < TABLE


def test_fp32_keeps_the_scores_of_attention() -> None:
    """Neither flash nor fused attention takes fp32."""
    layout = Layout(tensor=2, data=4, sequence_parallel=1, zero_stage=1)
    scores = 4 * 16 * LENGTH * LENGTH
    fp32 = first_rank(layout, 1, facts=megatron_facts(MegatronOptions("fp32"))).terms["activations"]
    bf16 = first_rank(layout, 1).terms["activations"]
    assert fp32 - 2 * bf16 == pytest.approx(4 * scores, rel=0.01)  # statistics are fp32 in both
