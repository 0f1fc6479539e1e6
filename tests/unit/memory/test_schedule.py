"""In-flight micro-batches against the schedules themselves, run step by step."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shapes import LLAMA3_8B, MEGATRON

from llmlaunch.families.hub_ids import load_preset
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.job import Job, RankColumns, all_ranks
from llmlaunch.memory.layer_bytes import layers_of
from llmlaunch.memory.schedule import in_flight
from llmlaunch.models.shape import ModelShape, MoeShape
from llmlaunch.techniques import Techniques
from llmlaunch.workload import Workload
from support.soak import examples

Layers = TypeVar("Layers", int, float)  # or their weights


def most_layers_alive(layers_by_chunk: list[Layers], pipeline: int, rank: int, microbatches: int, group: int) -> Layers:
    """Run one rank's forward and backward steps in Megatron's order and count layers whose activations are alive, or
    weigh them.

    Forward steps take the chunks in turn, `group` micro-batches each; backward steps take them in reverse. One forward
    step more than the warm-up runs before the first backward.
    """
    chunks = len(layers_by_chunk)
    total = chunks * microbatches
    order = [(step // group) % chunks for step in range(total)]
    warmup = pipeline - rank - 1 if chunks == 1 else 2 * (pipeline - rank - 1) + (chunks - 1) * group
    warmup = min(warmup, total)
    alive = most = layers_by_chunk[0] * 0
    forward, backward = 0, 0
    while backward < total:
        if forward < total and forward <= warmup + backward:
            alive += layers_by_chunk[order[forward]]
            forward += 1
        else:
            alive -= layers_by_chunk[chunks - 1 - order[backward]]
            backward += 1
        most = max(most, alive)
    return most


def estimated(layout: Layout, microbatches: int) -> list[float]:
    """Layers alive on each rank."""
    job = Job(LLAMA3_8B, Workload(4096, microbatches), MEGATRON)
    alive = in_flight(job, all_ranks(job, LayoutColumns.of([layout])))
    return alive.layers.tolist()


def layer_weights(job: Job, rows: RankColumns) -> list[float]:
    """Return the bytes that each layer of the model saves."""
    layers = layers_of(job, rows)
    return [float(layers.totals[kind][0]) for kind in layers.model.order]


def bytes_alive(job: Job, rows: RankColumns) -> list[float]:
    """Return the bytes saved by all layers alive on each rank."""
    layers = layers_of(job, rows)
    products = zip(in_flight(job, rows).alive, layers.by_group(layers.totals), strict=True)
    return np.sum([count * size for count, size in products], axis=0).tolist()


@pytest.mark.parametrize("microbatches", [4, 8, 16])
def test_embedding_and_head_may_take_the_place_of_a_layer(microbatches: int) -> None:
    """The head's is asked at its first loss. Later micro-batches may keep a layer more, but not beside logits."""
    both_ends = Layout(pipeline=4, virtual_pipeline=2, layers_by_stage=(3, 4, 4, 4, 4, 4, 4, 3))
    alive = estimated(both_ends, microbatches)
    assert alive[0] == most_layers_alive([3, 4], 4, 0, microbatches, group=4)
    assert alive[3] == most_layers_alive([4, 3], 4, 3, microbatches=4, group=4)


@examples(20, 2000)
@given(data=st.data(), pipeline=st.sampled_from([2, 3, 4]), chunks=st.sampled_from([1, 2, 3]), turns=st.integers(1, 6))
def test_uneven_stages_keep_what_the_schedule_keeps(
    data: st.DataObject, pipeline: int, chunks: int, turns: int
) -> None:
    """At its most on every rank but the last, which is asked at its first loss."""
    stages = pipeline * chunks
    cuts = sorted(data.draw(st.lists(st.integers(0, 32), min_size=stages - 1, max_size=stages - 1)))
    layers = tuple(b - a for a, b in zip([0, *cuts], [*cuts, 32], strict=True))
    layout = Layout(pipeline=pipeline, virtual_pipeline=chunks, layers_by_stage=layers)
    for rank, alive in enumerate(estimated(layout, pipeline * turns)):
        own = layers[rank::pipeline]
        most = most_layers_alive(list(own), pipeline, rank, pipeline * turns, group=pipeline)
        assert alive == most if rank < pipeline - 1 else sum(own) <= alive <= most


@examples(20, 2000)
@given(data=st.data(), pipeline=st.sampled_from([2, 4]), chunks=st.sampled_from([2, 4]), turns=st.integers(1, 4))
def test_of_chunks_of_different_kinds_it_keeps_the_most_bytes(
    data: st.DataObject, pipeline: int, chunks: int, turns: int
) -> None:
    """A layer of a mixture keeps several times what a dense one does."""
    pattern = tuple(data.draw(st.lists(st.integers(0, 1), min_size=16, max_size=16)))
    shape = ModelShape("mixed", 16, 2048, 2048, 16, 16, 128, 1024, 4096, moe=MoeShape(8, 2, 8192, 0, pattern))
    job = Job(shape, Workload(4096, pipeline * turns), MEGATRON)
    rows = all_ranks(job, LayoutColumns.of([Layout(pipeline=pipeline, virtual_pipeline=chunks)]))
    alive, weights = bytes_alive(job, rows), layer_weights(job, rows)
    size = 16 // (pipeline * chunks)
    for rank in range(pipeline - 1):
        own = [sum(weights[stage * size : stage * size + size]) for stage in range(rank, pipeline * chunks, pipeline)]
        most = most_layers_alive(own, pipeline, rank, pipeline * turns, group=pipeline)
        assert alive[rank] == pytest.approx(most)


def test_dense_layers_of_a_first_chunk_are_kept_longer_than_the_mixtures_behind_them() -> None:
    """DeepSeek-V3 on 16 ranks of two chunks: traced, the first rank keeps 31 dense layers and 32 of mixtures."""
    layout = Layout(pipeline=16, data=2, virtual_pipeline=2, layers_by_stage=(1, *(2,) * 30, 0))
    job = Job(load_preset("deepseek-v3"), Workload(4096, 512), MEGATRON)
    dense, mixture = in_flight(job, all_ranks(job, LayoutColumns.of([layout]))).alive
    assert (dense[0], mixture[0]) == (31, 32)


@pytest.mark.parametrize("layers", [(5, 3, 7, 1, 6, 4, 2, 4), (1, 9, 1, 5, 8, 2, 4, 2), (8, 0, 0, 8, 8, 0, 0, 8)])
@pytest.mark.parametrize(("pipeline", "turns"), [(2, 1), (2, 3), (4, 1), (4, 2), (4, 5)])
def test_uneven_stages_of_these_sizes_keep_what_the_schedule_keeps(
    layers: tuple[int, ...], pipeline: int, turns: int
) -> None:
    layout = Layout(pipeline=pipeline, virtual_pipeline=8 // pipeline, layers_by_stage=layers)
    for rank, alive in enumerate(estimated(layout, pipeline * turns)[:-1]):
        own = list(layers[rank::pipeline])
        assert alive == most_layers_alive(own, pipeline, rank, pipeline * turns, group=pipeline)


@pytest.mark.parametrize("pattern", [(0, 0, 0, 0, 1, 1, 1, 1) * 2, (1, 1, 0, 0, 0, 0, 0, 0) * 2, (0, 1, 1, 1) * 4])
@pytest.mark.parametrize("heavy", [True, False])
def test_chunks_of_these_kinds_keep_the_most_bytes_whichever_is_heavier(pattern: tuple[int, ...], heavy: bool) -> None:
    """Of layouts priced together, each as if it were alone."""
    width = 8192 if heavy else 64
    moe = MoeShape(8, 2, width, 0, pattern)
    shape = ModelShape("mixed", 16, 2048, 8192, 16, 16, 128, 1024, 4096, moe=moe)
    layouts = [
        Layout(pipeline=p, virtual_pipeline=v, data=64 // p) for p, v in ((2, 2), (2, 4), (4, 2), (4, 4), (2, 8))
    ]
    job = Job(shape, Workload(4096, 512), MEGATRON)
    rows = all_ranks(job, LayoutColumns.of(layouts))
    alive, weights = bytes_alive(job, rows), layer_weights(job, rows)
    for row, (index, rank) in enumerate(zip(rows.layout_index, rows.rank, strict=True)):
        layout = layouts[index]
        if rank == layout.pipeline - 1:
            continue
        stages = layout.pipeline * layout.virtual_pipeline
        size = 16 // stages
        own = [sum(weights[s * size : s * size + size]) for s in range(rank, stages, layout.pipeline)]
        group, microbatches = layout.pipeline, int(rows.microbatches[row])
        most = most_layers_alive(own, layout.pipeline, int(rank), microbatches, group)
        assert alive[row] == pytest.approx(most)


@pytest.mark.parametrize("switch", ["overlap_expert_communication", "delay_weight_gradients"])
def test_where_tokens_of_two_micro_batches_travel_the_second_takes_the_place_of_the_first(switch: str) -> None:
    """The forward pass of one runs beside the backward pass of another, layer by layer: a longer warm-up takes the
    place of the forward pass that a steady schedule makes first."""
    for layout, alive in (
        (Layout(), [1]),
        (Layout(pipeline=4, virtual_pipeline=2), [5.5, 4.5, 3.5, 2.5]),
    ):
        for techniques in (Techniques(), Techniques(**{switch: True})):
            job = Job(LLAMA3_8B, Workload(4096, 16), MEGATRON, techniques=techniques)
            rows = all_ranks(job, LayoutColumns.of([layout]))
            assert in_flight(job, rows).depth.tolist() == alive
