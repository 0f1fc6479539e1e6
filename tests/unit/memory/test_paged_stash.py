"""A fixed number of rows for experts, and pages for what they save, against sums by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import shapes
from test_exchange import MIXTURE

from llmlaunch.effects.paged_stash import equal_share, running_experts
from llmlaunch.frameworks.megatron.facts import MegatronOptions, megatron_facts
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.estimator import RankEstimate
from llmlaunch.memory.host import HostNode, host_terms
from llmlaunch.memory.job import all_ranks
from llmlaunch.models.shape import ModelShape
from llmlaunch.techniques import Techniques
from llmlaunch.techniques.requests import PagedStash

FACTS = megatron_facts(MegatronOptions(fp8_recipe="mxfp8", compute_capability=10.0))
LAYOUT = Layout(data=8, expert=8)
EQUAL = 4096 * 4  # tokens of a micro-batch, to four experts each
ROWS = 84 * 256  # 1.3 times as many, in whole tiles
NARROW = 1 + 1 / 32  # of an element of mxfp8, with its scale
# bytes of a row: the inputs of both linears, gate and up, the router's weight
INPUT, OUTPUT, SECOND = NARROW * 4096, 2 * 2 * 2048, NARROW * 2048
ROW = INPUT + OUTPUT + SECOND + 4
STASH = PagedStash(page_size=64, device_factor=1.1, host_factor=0.5)
FIXED = Techniques(token_dispatcher="flex", flex_backend="hybridep", expert_rank_capacity_factor=1.3)
PAGED = replace(FIXED, paged_stash=STASH)


def first_rank(techniques: Techniques, layout: Layout = LAYOUT, shape: ModelShape = MIXTURE) -> RankEstimate:
    return shapes.ranks(shape, layout, FACTS, techniques)[0]


def test_pages_hold_equal_shares_of_every_layer_and_the_layer_that_runs_has_all_its_rows() -> None:
    fixed, paged = first_rank(FIXED), first_rank(PAGED)
    assert "paged_stash" not in fixed.terms
    records, lists = 6 * ROWS / 64, 2 * (4 + 2 / 32) * (1.1 + 0.5) * EQUAL / 64
    assert paged.terms["paged_stash"] == pytest.approx(4 * (1.1 * EQUAL * ROW + 8 * (records + lists)), abs=1)
    less = fixed.terms["activations"] - paged.terms["activations"]
    assert less == pytest.approx(4 * ROWS * (ROW - 4) - ROWS * ROW, abs=2)


@pytest.mark.parametrize(
    ("shape", "layout", "layers"),
    [
        (MIXTURE, replace(LAYOUT, pipeline=2), 4),  # two layers of two micro-batches
        (replace(MIXTURE, mtp_num_layers=1), LAYOUT, 5),
        (replace(MIXTURE, mtp_num_layers=1), replace(LAYOUT, pipeline=2), 4),  # the module is on the last rank
    ],
)
def test_all_that_is_in_flight_has_pages(shape: ModelShape, layout: Layout, layers: int) -> None:
    one = first_rank(PAGED).terms["paged_stash"] / 4
    assert first_rank(PAGED, layout, shape).terms["paged_stash"] == pytest.approx(layers * one, abs=2)


def test_two_micro_batches_that_run_in_turn_have_all_their_rows() -> None:
    for techniques, layers in ((PAGED, 1), (replace(PAGED, overlap_expert_communication=True), 2)):
        job = shapes.job_of(MIXTURE, LAYOUT, FACTS, techniques)
        rows = all_ranks(job, LayoutColumns.of([LAYOUT]))
        assert running_experts(job, rows)[0] == pytest.approx(layers * ROWS * ROW)
        assert equal_share(job, rows)[0] == pytest.approx(EQUAL * ROW)


def test_what_the_device_cannot_take_has_pages_on_the_host() -> None:
    job = shapes.job_of(MIXTURE, LAYOUT, FACTS, PAGED)
    rows = all_ranks(job, LayoutColumns.of([LAYOUT]))
    buffers = (4 * 0.5 * EQUAL * each for each in (INPUT, OUTPUT, SECOND))
    pinned = sum(2.0 ** np.ceil(np.log2(each)) for each in buffers)
    assert host_terms(job, rows, HostNode(processes=8))["paged_stash"][0] == pinned
    assert PAGED.moves_to_host
    assert not replace(PAGED, paged_stash=PagedStash()).moves_to_host


def test_techniques_are_read_as_they_were_written() -> None:
    assert Techniques.from_json(PAGED.as_json()) == PAGED
