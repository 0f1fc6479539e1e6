"""What DeepEP and HybridEP keep outside torch, against sums by hand; plain exchanges have no buffers of their own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import shapes

from llmlaunch.frameworks.megatron.facts import MegatronOptions, megatron_facts
from llmlaunch.layout import Layout, LayoutColumns
from llmlaunch.memory.estimator import RankEstimate, worst_ranks
from llmlaunch.memory.job import all_ranks
from llmlaunch.memory.peak import outside_bytes
from llmlaunch.memory.workspace import mixture_forward
from llmlaunch.models.shape import ModelShape, MoeShape
from llmlaunch.techniques import Techniques

MIB = 2**20
# 64 experts; 4096 tokens of 4096 elements in a micro-batch
MIXTURE = ModelShape(
    "experts", 4, 4096, 14336, 32, 8, 128, 32000, 8192, moe=MoeShape(64, 4, 2048, 0, (1,) * 4, grouped_gemm=True)
)
TOKEN = 2 * 4096 + 8 + 128 * 8 + 128 * 4 + 128 * 4  # what waits, its source, choices, weights, scales


def rank(library: str | None, layout: Layout, domain: int = 8, shape: ModelShape = MIXTURE) -> RankEstimate:
    flex = Techniques(token_dispatcher="flex", flex_backend=library) if library else Techniques()
    facts = megatron_facts(MegatronOptions(nvlink_domain_devices=domain))
    return shapes.ranks(shape, layout, facts, flex)[0]


def buffers(library: str, ranks: int, domain: int = 8, **layout: int) -> int:
    return rank(library, Layout(data=ranks, expert=ranks, **layout), domain).terms["exchange_buffers"]


@pytest.mark.parametrize(
    ("ranks", "near_tokens", "heap"),
    [(2, 256, 0), (8, 256, 0), (16, 288, 512 * MIB), (64, 288, 512 * MIB)],
)
def test_deepep_keeps_what_may_wait_in_its_channels(ranks: int, near_tokens: int, heap: int) -> None:
    near = 10 * min(ranks, 8) * near_tokens * TOKEN
    assert buffers("deepep", ranks) == near + heap + 32 * MIB
    assert buffers("deepep", ranks, micro_batch_size=2) == buffers("deepep", ranks)


@pytest.mark.parametrize(("hidden", "granules"), [(10944, 1), (10952, 2), (16384, 2)])
def test_what_waits_over_the_network_is_taken_in_granules(hidden: int, granules: int) -> None:
    token = 2 * hidden + 8 + 128 * 16
    far = 2 * 10 * 8 * 140 * (token + 16)
    assert (granules - 1) * 512 * MIB < far < granules * 512 * MIB
    terms = rank("deepep", Layout(data=64, expert=64), shape=replace(MIXTURE, hidden_size=hidden)).terms
    assert terms["exchange_buffers"] == 10 * 8 * 288 * token + granules * 512 * MIB + 32 * MIB


def test_more_ranks_than_deepep_knows_are_priced_as_its_most() -> None:
    far = 2 * 10 * 32 * 132 * (TOKEN + 16)
    assert 512 * MIB < far < 1024 * MIB
    assert buffers("deepep", 256) == 10 * 8 * 720 * TOKEN + 1024 * MIB + 32 * MIB


def test_hybridep_has_room_for_all_tokens_of_a_domain() -> None:
    scales, probabilities = 4 * 4096 // 128, 4 * 64
    assert buffers("hybridep", 8) == 4096 * 8 * (2 * 4096 + probabilities + scales)
    assert buffers("hybridep", 8, micro_batch_size=2) == 2 * buffers("hybridep", 8)
    shared = rank("hybridep", Layout(tensor=2, data=4, expert=8, sequence_parallel=1))
    assert shared.terms["exchange_buffers"] == buffers("hybridep", 8) // 2


@pytest.mark.parametrize("library", ["deepep", None])
def test_what_is_outside_torch_is_the_sum_of_its_terms(library: str | None) -> None:
    layout = Layout(data=16, expert=16)
    flex = Techniques(token_dispatcher="flex", flex_backend=library) if library else Techniques()
    job = shapes.job_of(MIXTURE, layout, megatron_facts(MegatronOptions(nvlink_domain_devices=8)), flex)
    (outside,) = outside_bytes(job, all_ranks(job, LayoutColumns.of([layout])))
    terms = rank(library, layout).terms
    assert outside == sum(terms.get(name, 0) for name in ("context", "communicators", "exchange_buffers"))
    assert library is None or terms["exchange_buffers"] > 0


def test_hybridep_has_buffers_between_domains_beside() -> None:
    hidden, scales = 2 * 4096, 4 * 4096 // 128
    inside = 4096 * 16 * (hidden + 4 * 64 + scales)
    assert buffers("hybridep", 16, domain=72) == inside
    whole = 4096 * 16 * (hidden + 4 * 32 + scales)  # probabilities of half the experts
    sent = 4096 * (hidden + 4 * 64 + scales)
    come = 4096 * 1 * (3 * (hidden + 4 * 32) + scales)  # dispatched, and sums on both sides
    assert buffers("hybridep", 16) == whole + sent + come


def test_buffers_are_the_devices_and_not_torchs_and_replace_connections() -> None:
    layout = Layout(data=8, expert=8)
    plain, flex = rank(None, layout), rank("deepep", layout)
    assert "exchange_buffers" not in plain.terms
    assert flex.device_bytes - flex.reserved_bytes == sum(
        flex.terms[name] for name in ("context", "communicators", "exchange_buffers")
    )
    assert (
        plain.terms["communicators"] - flex.terms["communicators"] == 7 * megatron_facts().exchange.exchange_peer_bytes
    )
    assert rank("deepep", Layout(data=8)).terms["exchange_buffers"] == 0


@pytest.mark.parametrize(("library", "copies"), [("deepep", 4), ("hybridep", 2)])
def test_routed_copies_wait_where_the_library_makes_them(library: str, copies: int) -> None:
    flex = Techniques(token_dispatcher="flex", flex_backend=library)
    layout = Layout(tensor=2, data=4, expert=4, expert_tensor=2, sequence_parallel=1)
    job = shapes.job_of(MIXTURE, layout, megatron_facts(), flex)
    routed = 2048 * 4 * job.facts.mixture.expert_imbalance * 2  # of both tensor ranks
    waiting = mixture_forward(job, all_ranks(job, LayoutColumns.of([layout])))
    assert np.asarray(waiting) == pytest.approx(copies * routed * 4096 * 2)


@pytest.mark.parametrize("library", ["deepep", "hybridep"])
def test_a_search_prices_them_as_the_estimate_of_one_layout(library: str) -> None:
    flex = Techniques(token_dispatcher="flex", flex_backend=library)
    layout = Layout(data=16, expert=16)
    job = shapes.job_of(MIXTURE, layout, megatron_facts(), flex)
    assert worst_ranks(job, LayoutColumns.of([layout])).device_bytes[0] == rank(library, layout).device_bytes
