"""Prediction heads on the stage before that of the loss, which receives all their outputs: against sums by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import shapes
from shapes import LLAMA3_8B

from llmlaunch.columns import FloatColumn
from llmlaunch.effects.paged_stash import equal_share, stash_pages
from llmlaunch.layers.parameters import count_parameters
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.host import HostNode, host_terms
from llmlaunch.memory.job import Job, RankColumns, all_ranks
from llmlaunch.memory.loss import embedded_again, final_norm, saved_by_heads
from llmlaunch.memory.schedule import in_flight
from llmlaunch.memory.weights import largest_parameter
from llmlaunch.models.shape import ModelShape, MoeShape
from llmlaunch.techniques import Techniques
from llmlaunch.techniques.requests import PagedStash

LENGTH, HIDDEN = 4096, 4096
TWO_HEADS = replace(LLAMA3_8B, name="two-heads", num_layers=4, mtp_num_layers=2)
TIED = replace(TWO_HEADS, tied_embeddings=True)
MIXTURE = replace(TWO_HEADS, moe=MoeShape(8, 2, 2048, 0, (1,) * 4))
BESIDE = Layout(pipeline=2, data=2, layers_by_stage=(2, 2))
BEFORE = Layout(pipeline=3, data=2, layers_by_stage=(2, 2, 0))
ALONE = Layout(pipeline=3, data=2, layers_by_stage=(3, 1, 0, 0, 0, 0), virtual_pipeline=2)
BEFORE_LAST = Techniques(mtp_stage="before-last")
STREAM = 2 * LENGTH * HIDDEN  # bf16

Term = Callable[[Job, RankColumns], FloatColumn]


def of_ranks(term: Term, layout: Layout, shape: ModelShape = TWO_HEADS, more: Techniques | None = None) -> list[float]:
    """What each rank has, in a step of six micro-batches."""
    before = BEFORE_LAST if more is None else replace(more, mtp_stage="before-last")
    techniques = (more or Techniques()) if layout is BESIDE else before
    job = shapes.job_of(shape, layout, techniques=techniques, microbatches=6)
    return [float(each) for each in term(job, all_ranks(job, LayoutColumns.of([layout])))]


@pytest.mark.parametrize("shape", [TWO_HEADS, TIED])
def test_the_heads_and_the_last_norm_lie_before_the_last_stage_with_a_table_of_their_own(shape: ModelShape) -> None:
    count = count_parameters(shape)
    layer, table = count.layers[0].total, count.embedding
    ranks = shapes.ranks(shape, BEFORE, techniques=BEFORE_LAST)
    parameters = [rank.terms["parameters"] // 2 for rank in ranks]
    assert parameters == [table + 2 * layer, 2 * layer + count.final_norm + count.mtp + table, table]
    assert of_ranks(largest_parameter, BEFORE, shape) == [table] * 3


def test_two_micro_batches_have_passed_the_heads_before_the_first_comes_back() -> None:
    beside = of_ranks(saved_by_heads, BESIDE)[1]
    norm = STREAM + 4 * LENGTH
    # the outputs of both heads are not kept twice, but all three wait to be sent
    assert of_ranks(saved_by_heads, BEFORE) == pytest.approx([0, 2 * (beside - 2 * STREAM + norm) + 3 * STREAM, 0])
    assert of_ranks(embedded_again, BEFORE) == [0, 2 * 2 * STREAM, 0]
    assert of_ranks(embedded_again, BESIDE) == [0, 2 * STREAM]


def test_three_micro_batches_have_where_ranks_have_chunks() -> None:
    assert of_ranks(lambda job, rows: in_flight(job, rows).heads, ALONE)[1] == 3
    beside, norm = of_ranks(saved_by_heads, BESIDE)[1], STREAM + 4 * LENGTH
    # the norm is on the second rank, too: its layer is the last
    assert of_ranks(saved_by_heads, ALONE)[1] == pytest.approx(3 * (beside - 2 * STREAM + norm) + 3 * STREAM)


def test_the_loss_copies_what_it_receives_and_still_has_what_came_before() -> None:
    assert of_ranks(final_norm, BEFORE) == [0, 0, 3 * 3 * STREAM]


def test_what_travels_to_the_loss_is_as_many_times_as_wide() -> None:
    ranks = shapes.ranks(TWO_HEADS, BEFORE, techniques=BEFORE_LAST)
    assert [rank.terms["pipeline_buffers"] for rank in ranks] == [STREAM, 3 * STREAM, 3 * STREAM]


def test_pages_hold_the_experts_of_all_heads_in_flight() -> None:
    stash = Techniques(
        token_dispatcher="flex",
        flex_backend="hybridep",
        expert_rank_capacity_factor=1.3,
        paged_stash=PagedStash(64, 1.0, 0.0),
    )
    layout = replace(BEFORE, layers_by_stage=(3, 1, 0))
    pages = of_ranks(stash_pages, layout, MIXTURE, stash)
    one = of_ranks(lambda job, rows: equal_share(job, rows)[0], layout, MIXTURE, stash)
    # three layers of three micro-batches; one layer and two heads of two; none
    assert [page / each for page, each in zip(pages, one, strict=True)] == pytest.approx([9, 6, 0], rel=0.01)


def test_the_rank_of_the_heads_reads_tokens_too() -> None:
    layout = replace(BEFORE, pipeline=4, layers_by_stage=(1, 1, 2, 0))
    loading = of_ranks(lambda job, rows: host_terms(job, rows, HostNode(8))["data_loader"], layout)
    assert [bool(each) for each in loading] == [True, False, True, True]
