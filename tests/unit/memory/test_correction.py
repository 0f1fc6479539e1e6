"""What measured runs add: the same laws hold, and every term adds up as without."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shapes import CORRECTIONS, LLAMA3_8B, MIXTRAL, SHAPES, any_layouts
from test_grouped_pricing import FEWER, PAIRS

from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.estimator import estimate
from llmlaunch.memory.host import HostNode
from llmlaunch.memory.job import NO_CORRECTION, Correction, Job, all_ranks
from llmlaunch.memory.peak import OUTSIDE_TORCH, RESIDUAL, rank_terms
from llmlaunch.models.shape import ModelShape
from llmlaunch.units import GIB
from llmlaunch.workload import Workload
from support.soak import examples

CORRECTED = ("context", "communicators")  # of what is outside torch


def job_of(shape: ModelShape, backend: str = "megatron") -> Job:
    return Job(shape, Workload(4096, 1024), PAIRS[backend][0])


@pytest.mark.parametrize("backend", ["megatron", "deepspeed", "torchtitan", "megatron-fsdp"])
@FEWER
@given(shape=SHAPES, data=st.data(), correction=CORRECTIONS)
def test_terms_add_up_as_the_correction_says(
    backend: str, shape: ModelShape, data: st.DataObject, correction: Correction
) -> None:
    layout, job = data.draw(any_layouts(shape)), job_of(shape, backend)
    plain = estimate(job, layout).ranks
    for before, rank in zip(plain, estimate(replace(job, correction=correction), layout).ranks, strict=True):
        assert sum(rank.terms.values()) == rank.device_bytes
        assert 0 <= rank.allocated_bytes <= rank.reserved_bytes <= rank.device_bytes
        assert min(bytes_ for name, bytes_ in rank.terms.items() if name != RESIDUAL) >= 0
        factor = 1.0 + correction.torch_share
        outside = before.device_bytes - before.reserved_bytes + round(correction.outside_bytes)
        assert rank.allocated_bytes == np.rint(before.allocated_bytes * factor)
        assert rank.reserved_bytes == np.rint(before.reserved_bytes * factor)
        assert rank.device_bytes == rank.reserved_bytes + max(outside, 0)
        known = set(before.terms) - {"allocator_cache", *OUTSIDE_TORCH}
        assert {name: rank.terms[name] for name in known} == {name: before.terms[name] for name in known}


@examples(8, 2000)
@given(shape=SHAPES, data=st.data())
def test_no_correction_changes_nothing_and_adds_no_term(shape: ModelShape, data: st.DataObject) -> None:
    layout, job = data.draw(any_layouts(shape)), job_of(shape)
    named = replace(job, correction=Correction(calibration_id="of no effect"))
    assert estimate(named, layout) == estimate(job, layout)
    assert RESIDUAL not in estimate(job, layout).worst.terms
    assert job.correction is NO_CORRECTION


@examples(8, 2000)
@given(shape=st.sampled_from([LLAMA3_8B, MIXTRAL]), data=st.data(), correction=CORRECTIONS)
def test_more_layers_never_need_less(shape: ModelShape, data: st.DataObject, correction: Correction) -> None:
    """What a rank holds grows with its layers, whatever measured runs say of the bytes."""
    layout = Layout(data.draw(st.sampled_from([1, 2, 8])), 2, data=8, zero_stage=data.draw(st.integers(0, 1)))
    job = replace(job_of(shape), correction=correction)
    cuts = [replace(layout, layers_by_stage=(n, shape.num_layers - n)) for n in range(1, shape.num_layers)]
    first = rank_terms(job, all_ranks(job, LayoutColumns.of(cuts))).device[::2]
    assert np.all(np.diff(first) >= 0)


def test_the_context_gives_way_first_then_the_communicators_and_nothing_below_nothing() -> None:
    layout, job = Layout(2, 2, data=4, sequence_parallel=1, zero_stage=1), job_of(LLAMA3_8B)
    rank = estimate(job, layout).worst
    context, communicators = (rank.terms[name] for name in CORRECTED)
    assert context > 0
    assert communicators > 0
    for outside, expected in {
        1.5 * GIB: (context + 1.5 * GIB, communicators),
        -0.25 * context: (round(0.75 * context), communicators),
        -context - 0.5 * communicators: (0, round(0.5 * communicators)),
        -1000.0 * GIB: (0, 0),
    }.items():
        terms = estimate(replace(job, correction=Correction(outside_bytes=outside)), layout).worst.terms
        assert tuple(terms[name] for name in CORRECTED) == pytest.approx(expected, abs=1)


def test_the_host_is_not_corrected_but_where_it_is_the_device() -> None:
    layout, job = Layout(data=8, zero_stage=1), job_of(LLAMA3_8B)
    more = replace(job, correction=Correction(torch_share=0.1, outside_bytes=GIB))
    card, cpu = HostNode(processes=8), HostNode(processes=8, resident=True)
    assert estimate(more, layout, node=card).host_bytes_per_node == estimate(job, layout, node=card).host_bytes_per_node
    before, after = (estimate(each, layout, node=cpu) for each in (job, more))
    grown = after.worst.device_bytes - before.worst.device_bytes
    assert grown > GIB
    assert (after.host_bytes_per_node or 0) - (before.host_bytes_per_node or 0) == 8 * grown


@pytest.mark.parametrize("share", [-1.0, -2.0, float("nan")])
def test_a_correction_that_leaves_nothing_is_none(share: float) -> None:
    with pytest.raises(ValueError, match="torch_share"):
        Correction(torch_share=share)
