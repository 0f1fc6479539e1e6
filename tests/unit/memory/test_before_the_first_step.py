"""The distributed optimizer makes its buffers beside the parameters that move there, which may be the peak."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmlaunch.backends.megatron.facts import megatron_facts
from llmlaunch.layout import RECOMPUTE_FULL, Layout
from llmlaunch.memory.estimator import RankEstimate, estimate
from llmlaunch.memory.job import Job
from llmlaunch.models.shape import ModelShape, MoeShape
from llmlaunch.workload import Workload

SHAPE = ModelShape("plain", 16, 4096, 14336, 32, 8, 128, 1024, 8192)
WIDE = Layout(data=256, zero_stage=1, recompute=RECOMPUTE_FULL)


def only_rank(shape: ModelShape, layout: Layout, length: int = 128) -> RankEstimate:
    return estimate(Job(shape, Workload(length, layout.data * layout.pipeline), megatron_facts()), layout).ranks[0]


def test_parameters_lie_there_twice_beside_their_gradients() -> None:
    rank = only_rank(SHAPE, WIDE)
    parameters = rank.terms["parameters"]
    assert rank.allocated_bytes == parameters + rank.terms["gradients"] + parameters
    assert rank.terms["whole_model"] > 0


def test_of_a_mixture_the_experts_are_moved_last() -> None:
    mixture = replace(SHAPE, moe=MoeShape(8, 2, 14336, 0, (1,) * 16))
    rank = only_rank(mixture, replace(WIDE, expert=8))
    experts = 2 * 16 * 3 * 4096 * 14336
    assert rank.allocated_bytes == rank.terms["parameters"] + rank.terms["gradients"] + experts


def test_chunks_are_moved_one_after_the_other() -> None:
    layout = replace(WIDE, pipeline=2, virtual_pipeline=4, data=128)
    rank = only_rank(SHAPE, layout)
    assert rank.allocated_bytes == pytest.approx(1.25 * rank.terms["parameters"] + rank.terms["gradients"])


def test_without_a_distributed_optimizer_parameters_stay_where_they_are() -> None:
    assert not only_rank(SHAPE, replace(WIDE, zero_stage=0)).terms.get("whole_model")


def test_larger_batches_need_more_than_that() -> None:
    assert not only_rank(SHAPE, replace(WIDE, recompute=0), length=8192).terms["whole_model"]
