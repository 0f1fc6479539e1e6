"""What attention to pooled keys and several residual streams hold (DeepSeek-V4), against sums done by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from layer_tensors import layer_tensors, mixture_layer, rank_layers, rank_tensors
from shapes import job_of

from llmlaunch.facts import MemoryFacts
from llmlaunch.families.lookup import find_model
from llmlaunch.frameworks.megatron.facts import MegatronOptions, megatron_facts
from llmlaunch.layers.parameters import count_parameters
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_SELECTIVE, Layout, LayoutColumns
from llmlaunch.memory.activations import largest_layer
from llmlaunch.memory.job import Job, RankColumns, all_ranks
from llmlaunch.memory.loss import final_norm, saved_by_heads
from llmlaunch.memory.weights import layer_parameters, rank_parameters
from llmlaunch.memory.workspace import layer_backward, passing_buffers
from llmlaunch.models.shape import CompressedAttention, ModelShape
from llmlaunch.techniques import NO_TECHNIQUES, Techniques
from support.changed_facts import changed

N = 4096  # tokens of a sequence
H, HEADS, WIDTH, RANK = 4096, 64, 512, 1024
QUERIES = HEADS * WIDTH
BLACKWELL = MegatronOptions(compute_capability=10.0)
FACTS = changed(megatron_facts(BLACKWELL), expert_imbalance=1.0)
NARROW = changed(megatron_facts(replace(BLACKWELL, fp8_recipe="mxfp8")), expert_imbalance=1.0)
SIX = find_model({"base": "deepseek-v4-flash", "num_layers": 6})  # layers that pool by 0, 0, 4, 128, 4 and 128
ALONE, STAGES = Layout(), Layout(pipeline=2, data=4)


def pooled(shape: ModelShape) -> CompressedAttention:
    assert shape.compressed_attention is not None
    return shape.compressed_attention


def alike(ratio: int, layers: int = 2) -> ModelShape:
    assert SIX.moe is not None
    moe = replace(SIX.moe, layer_pattern=(1,) * layers)
    return replace(SIX, num_layers=layers, moe=moe, compressed_attention=replace(pooled(SIX), ratios=(ratio,) * layers))


def value(
    function: Callable[[Job, RankColumns], Any],
    shape: ModelShape,
    layout: Layout = ALONE,
    facts: MemoryFacts = FACTS,
    techniques: Techniques = NO_TECHNIQUES,
    rank: int = 0,
) -> float:
    job = job_of(shape, layout, facts, techniques, N)
    return float(np.broadcast_to(function(job, all_ranks(job, LayoutColumns.of([layout]))), layout.pipeline)[rank])


def attention(job: Job, rows: RankColumns) -> Any:
    """Return all that a layer saves but its mixture's."""
    return sum(column for name, column in layer_tensors(job, rows, True).items() if name.startswith("attn"))


def attentions(job: Job, rows: RankColumns) -> Any:
    """Return the same of all layers of a rank."""
    return rank_tensors(job, rows, "attn")


QUERIES_KEPT = 2 * (2 * QUERIES + 2 * WIDTH) + 4 * HEADS + 4
LATENTS = 2 * 2 * RANK + 4
OUTPUT = 2 * 2 * QUERIES + 4 * HEADS + 2 * 8 * 1024
NORM = 2 * H + 4 + 2 * H
STREAMS = 2 * 4 * H + 2 * H + 6 * 4 * 6 + 4 * 16
POOLED_BYTES = {
    0: 4 * 128,
    4: 4 * (128 + 512) + 2 * WIDTH * (1 + 3 / 4) + 8 * 2 * WIDTH + 8 * 2 * 128 + 2 * (64 * 129 + 128 / 4),
    128: 4 * 256 + 2 * WIDTH * (1 + 3 / 128) + 8 * WIDTH,  # 32 pooled keys and 128 others fill two tiles
}


@pytest.mark.parametrize("ratio", POOLED_BYTES)
def test_attention_keeps_queries_and_outputs_twice_and_what_pools(ratio: int) -> None:
    kept = NORM + STREAMS + LATENTS + QUERIES_KEPT + OUTPUT + POOLED_BYTES[ratio]
    assert value(attention, alike(ratio)) == pytest.approx(N * kept)


def test_beside_narrow_linears_what_pools_reads_a_copy_in_sixteen_bits() -> None:
    narrow = 1 + 1 / 32
    more = 2 * narrow * H + 2 * narrow * RANK  # two projections of the stream, one of the queries, one of the indexer's
    assert value(attention, alike(4), facts=NARROW) - value(attention, alike(4)) == pytest.approx(N * more)
    less = value(attention, alike(4), facts=NARROW) - value(attention, alike(128), facts=NARROW)
    assert less - (value(attention, alike(4)) - value(attention, alike(128))) == pytest.approx(N * narrow * RANK)


def test_every_block_keeps_all_streams_and_what_it_puts_out() -> None:
    for shape in (SIX, replace(SIX, moe=None, num_layers=6)):
        more = [value(rank_layers, replace(shape, residual_streams=streams)) for streams in (4, 1)]
        assert more[0] - more[1] == pytest.approx(6 * 2 * N * STREAMS)
    hopper = changed(megatron_facts(replace(BLACKWELL, compute_capability=9.0)), expert_imbalance=1.0)
    copied = value(attentions, SIX, facts=hopper) - value(attentions, SIX)
    assert copied == pytest.approx(6 * N * 4 * 4 * H)


def test_ranks_pass_all_streams_on_and_the_last_brings_them_together() -> None:
    single = replace(SIX, residual_streams=1)
    full = replace(STAGES, recompute=RECOMPUTE_FULL)
    kept = [value(largest_layer, shape, full) for shape in (SIX, single)]
    assert kept[0] - kept[1] == pytest.approx(3 * N * 2 * H)
    sent = [value(lambda job, rows: passing_buffers(job, rows)["pipeline_buffers"], s, STAGES) for s in (SIX, single)]
    assert sent[0] - sent[1] == pytest.approx(3 * N * 2 * H)
    norms = [value(final_norm, shape, STAGES, rank=1) for shape in (SIX, single)]
    assert norms[0] - norms[1] == pytest.approx(N * 2 * 4 * H)


def test_backward_the_gradients_of_all_streams_meet_or_those_of_queries_and_outputs() -> None:
    lone = replace(alike(4), moe=None)
    stream = 2 * (4 * H + H)
    assert value(layer_backward, lone) == pytest.approx(N * (stream + 3 * 2 * 4 * H))
    wide = replace(lone, num_attention_heads=512)
    keys = 4 * WIDTH * (1 + 1 / 4)
    mlp = 2 * (2 * H + 2) + 3 * 2 * 2048  # freed by then
    made = 2 * 512 * WIDTH + keys - mlp
    assert value(layer_backward, wide) == pytest.approx(N * (stream + made))
    again = replace(ALONE, recompute=RECOMPUTE_SELECTIVE)
    recomputed = value(layer_backward, wide, again, techniques=Techniques(("mla_up_proj",)))
    assert recomputed - N * (stream + made) == pytest.approx(N * (2 * (2 * 512 * WIDTH + 2 * WIDTH) + 4 * 512 + 4))


@pytest.mark.parametrize("heads", [0, 1])
def test_a_rank_holds_its_layers_and_the_head_one_that_pools_nothing(heads: int) -> None:
    shape = replace(SIX, mtp_num_layers=heads)
    counted, moe = count_parameters(shape), SIX.moe
    assert moe is not None
    job = job_of(shape, STAGES, FACTS, NO_TECHNIQUES, N)
    ranks = rank_parameters(job, all_ranks(job, LayoutColumns.of([STAGES])))
    layers = counted.layers[:3], counted.layers[3:]
    table = shape.padded_vocab_size(1) * H
    experts = moe.num_experts * 3 * H * moe.ffn_hidden_size
    outside = table, table + counted.final_norm + heads * (counted.mtp - experts + table)
    for rank in range(2):
        assert ranks.dense[rank] == sum(each.total - each.experts for each in layers[rank]) + outside[rank]
        assert ranks.expert[rank] == sum(each.experts for each in layers[rank]) + rank * heads * experts
    kinds = [value(lambda job, rows: layer_parameters(job, rows)[0][0], alike(ratio)) for ratio in (0, 4, 128)]
    windowed = heads * (counted.mtp - experts - 3 * H - 2 * H**2 - 4 * (4 * H + 1) - 1)
    assert kinds[0] < kinds[2] < kinds[1]
    assert windowed == heads * kinds[0]


def test_a_layer_has_what_pools_what_chooses_and_what_mixes_streams() -> None:
    def parameters(shape: ModelShape) -> float:
        return value(lambda job, rows: layer_parameters(job, rows)[0][0], shape)

    none, four, many = (parameters(alike(ratio)) for ratio in (0, 4, 128))
    assert many - none == 2 * H * WIDTH + 128 * WIDTH + WIDTH
    choosing = 2 * H * 2 * 128 + H * 64 + RANK * 64 * 128 + 4 * 2 * 128 + 128
    assert four - none == 2 * H * 2 * WIDTH + 4 * 2 * WIDTH + WIDTH + choosing
    assert none - parameters(replace(alike(0), residual_streams=1)) == 2 * (4 * 6 * (4 * H + 1) + 3)


def test_heads_of_several_streams_project_each_and_bring_them_together() -> None:
    one = replace(SIX, mtp_num_layers=1)
    layer = value(mixture_layer, alike(0))
    around = 2 * 2 * H * (1 + 4)
    outputs = 2 * 2 * H
    assert value(saved_by_heads, one, STAGES, rank=1) == pytest.approx(layer + N * (around + outputs))
