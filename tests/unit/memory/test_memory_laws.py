"""Laws no memory estimate may break, over layouts drawn at random. What a technique moves or leaves out never makes the
device hold more, what it delays never less, and each figure is the one its paper or framework gives."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shapes import LLAMA2_7B, LLAMA3_8B, MEGATRON, SHAPES, job_of, layouts, ranks

from llmlaunch.effects.loss_kernels import tiled_inputs
from llmlaunch.effects.trained_layers import trained_counts
from llmlaunch.facts import MemoryFacts
from llmlaunch.frameworks.deepspeed.facts import deepspeed_facts
from llmlaunch.layout import RECOMPUTE_FULL, Layout, LayoutColumns
from llmlaunch.memory.activations import kept_activations
from llmlaunch.memory.estimator import RankEstimate, estimate
from llmlaunch.memory.job import all_ranks
from llmlaunch.memory.loss import logits as logit_bytes
from llmlaunch.memory.peak import cache_share
from llmlaunch.models.shape import ModelShape, MoeShape
from llmlaunch.techniques import NO_TECHNIQUES, Techniques
from llmlaunch.techniques.requests import Adapters
from support.changed_facts import changed
from support.soak import examples

STATIC = ("parameters", "gradients", "optimizer_states")


def static(rank: RankEstimate) -> int:
    return sum(rank.terms[name] for name in STATIC)


@examples(8, 2000)
@given(data=st.data())
def test_a_higher_zero_stage_never_keeps_more_state(data: st.DataObject) -> None:
    layout = data.draw(layouts(LLAMA2_7B))
    # gradients differ with the moment of the peak, and buckets come with ZeRO: only what lasts is ordered
    facts = changed(deepspeed_facts(), gathering=None)
    stages = [static(ranks(LLAMA2_7B, replace(layout, zero_stage=stage), facts)[0]) for stage in range(4)]
    # stage 3 holds shards and one gathered layer, so with few devices it may hold more than stage 2
    assert stages[0] >= stages[1] >= stages[2]
    if layout.data * layout.context >= 8:
        assert stages[2] >= stages[3]


TOKENS = 4096
E = 2.0  # bytes of a bf16 element


def never_more(
    shape: ModelShape, layout: Layout, less: Techniques, more: Techniques, facts: MemoryFacts = MEGATRON
) -> None:
    """`more` of a technique needs no more than `less` of it, on every rank."""
    pairs = zip(*(ranks(shape, layout, facts, techniques) for techniques in (less, more)), strict=True)
    assert all(there.device_bytes <= here.device_bytes for here, there in pairs)


SPARING = {
    "chunks": (Techniques(mlp_chunks=2), Techniques(mlp_chunks=16)),
    "tiles": (Techniques(loss="tiled", loss_tiles=2), Techniques(loss="tiled", loss_tiles=64)),
    "fused head": (NO_TECHNIQUES, Techniques(loss="fused_linear")),
    "frozen first matrices": (Techniques(adapters=Adapters(16)), Techniques(adapters=Adapters(16, True))),
    "a lower rank": (Techniques(adapters=Adapters(64)), Techniques(adapters=Adapters(8))),
    "fewer trained layers": (Techniques(trained_layers=24), Techniques(trained_layers=3)),
    "all trained layers": (NO_TECHNIQUES, Techniques(trained_layers=32)),
    "a larger swapped share": (Techniques(swapped_share=0.2), Techniques(swapped_share=1.0)),
    "fewer sampled rows": (Techniques(sampled_share=0.9), Techniques(sampled_share=0.1)),
    "anything sampled": (NO_TECHNIQUES, Techniques(sampled_share=0.5)),
    "fewer versions": (Techniques(weight_versions=2), NO_TECHNIQUES),
}


@pytest.mark.parametrize("name", SPARING)
@examples(4, 700)  # of each technique
@given(shape=SHAPES, data=st.data())
def test_more_of_what_spares_never_needs_more(name: str, shape: ModelShape, data: st.DataObject) -> None:
    never_more(shape, data.draw(layouts(shape)), *SPARING[name])


@examples(8, 2000)
@given(shape=SHAPES, data=st.data())
def test_a_tiled_loss_needs_no_more_but_for_the_hidden_states_it_reads(shape: ModelShape, data: st.DataObject) -> None:
    """It holds those through the backward pass of the layers, which an untiled loss lets go of before (traced:
    tiled_loss.tiled_inputs)."""
    layout, tiled = data.draw(layouts(shape)), Techniques(loss="tiled")
    job = job_of(shape, layout, techniques=tiled)
    held = tiled_inputs(job, all_ranks(job, LayoutColumns.of([layout])))
    assert held[-1] == E * TOKENS / layout.context * layout.micro_batch_size * shape.hidden_size
    before, after = ranks(shape, layout), ranks(shape, layout, techniques=tiled)
    for whole, pieces, more in zip(before, after, held, strict=True):
        assert pieces.allocated_bytes <= whole.allocated_bytes + more
        assert pieces.device_bytes <= whole.device_bytes + more * (1.0 + cache_share(job)) + 1


@examples(8, 2000)
@given(shape=SHAPES, data=st.data())
def test_chunks_computed_again_never_need_more(shape: ModelShape, data: st.DataObject) -> None:
    layout = data.draw(layouts(shape))
    facts = changed(MEGATRON, mlp_chunks_recomputed=True)
    never_more(shape, layout, NO_TECHNIQUES, Techniques(mlp_chunks=4), facts)


@examples(8, 2000)
@given(shape=SHAPES, data=st.data())
def test_delayed_weight_gradients_never_lower_the_peak(shape: ModelShape, data: st.DataObject) -> None:
    never_more(shape, data.draw(layouts(shape)), Techniques(delay_weight_gradients=True), NO_TECHNIQUES)


@examples(8, 2000)
@given(shape=SHAPES, data=st.data(), last=st.integers(1, 32))
def test_trained_layers_add_up_over_the_ranks(shape: ModelShape, data: st.DataObject, last: int) -> None:
    layout = data.draw(layouts(shape))
    job = job_of(shape, layout, techniques=Techniques(trained_layers=last))
    rows = all_ranks(job, LayoutColumns.of([layout]))
    trained = trained_counts(job, rows)
    assert np.sum(trained) == min(last, shape.num_layers)
    for of_kind, held in zip(trained, rows.counts, strict=True):
        assert np.all((of_kind >= 0) & (of_kind <= held))


def kept_bytes(techniques: Techniques, recompute: int = 0, recomputes: bool = False, offload_layers: int = 0) -> float:
    """Bytes of all 32 layers of Llama 3 8B, one micro-batch of 4096 tokens."""
    layout = Layout(data=8, recompute=recompute, offload_layers=offload_layers)
    job = job_of(LLAMA3_8B, layout, techniques=techniques)
    job = replace(job, facts=changed(job.facts, mlp_chunks_recomputed=recomputes, travelling_checkpoints=3.0))
    return float(kept_activations(job, all_ranks(job, LayoutColumns.of([layout])))[0])


LAYERS, HIDDEN = 32, 4096


QWEN3_30B = replace(
    ModelShape("qwen3-30b-a3b", 48, 2048, 6144, 32, 4, 128, 151936, 40960),
    qk_layernorm=True,
    moe=MoeShape(128, 8, 768, 0, (1,) * 48),
)
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def peaks_by_share(shape: ModelShape, layout: Layout, length: int = 4096) -> list[int]:
    job = job_of(shape, layout, length=length)
    return [
        estimate(replace(job, techniques=Techniques(offload_optimizer=share)), layout).worst.device_bytes
        for share in SHARES
    ]


@pytest.mark.parametrize("layout", [Layout(tensor=4, pipeline=2, data=2, expert=4, zero_stage=1), Layout(data=16)])
def test_the_peak_falls_evenly_with_the_share_of_the_optimizer_on_the_host(layout: Layout) -> None:
    """Megatron-Bridge's card of optimizer offload (skills, 2026-08) measured 47.2, 43.4, 39.6, 35.6 and 32.0 GB for
    Qwen3 30B on H100: every quarter of the states is worth a quarter of the way, and none makes a hump."""
    measured = np.diff([47.2, 43.4, 39.6, 35.6, 32.0])
    layout = replace(layout, zero_stage=1, expert=8 if layout.tensor == 1 else 4, sequence_parallel=layout.tensor > 1)
    falls = np.diff(peaks_by_share(QWEN3_30B, layout))
    assert falls / falls.sum() == pytest.approx(measured / measured.sum(), abs=0.02)


def test_two_layers_stay_whatever_share_is_swapped_since_the_rest_is_recomputed() -> None:
    for share in (0.25, 0.5, 1.0):
        assert kept_bytes(Techniques(swapped_share=share)) == pytest.approx(2 * kept_bytes(NO_TECHNIQUES) / LAYERS)


def test_checkpoints_on_the_host_leave_those_that_travel() -> None:
    checkpoint = TOKENS * HIDDEN * E
    assert kept_bytes(NO_TECHNIQUES, RECOMPUTE_FULL) == LAYERS * checkpoint
    assert kept_bytes(Techniques(offload_checkpoints=True), RECOMPUTE_FULL) == 3 * checkpoint


def test_a_share_of_offloaded_modules_moves_that_share_of_their_bytes() -> None:
    modules = ("qkv_linear", "core_attn")
    here, away = kept_bytes(NO_TECHNIQUES), kept_bytes(Techniques(offload_modules=modules))
    one_layer = (here - away) / (LAYERS - 1)
    for share in (0.25, 0.5, 0.75):
        some = kept_bytes(Techniques(offload_modules=modules, offload_fraction=share))
        assert some == pytest.approx(here - (share * LAYERS - 1) * one_layer)


@pytest.mark.parametrize(("away", "here"), [(1, 31), (8, 24), (31, 1), (32, 1)])
def test_no_more_layers_are_here_than_are_not_offloaded_and_the_one_that_runs_always_is(away: int, here: int) -> None:
    """What Transformer Engine's schedule promises (cpu_offload.py DefaultOffloadSynchronizer, 2.20)."""
    assert kept_bytes(NO_TECHNIQUES, offload_layers=away) == pytest.approx(here * kept_bytes(NO_TECHNIQUES) / LAYERS)


def test_a_tiled_loss_has_the_logits_of_a_tile() -> None:
    def logits(techniques: Techniques) -> float:
        job = job_of(LLAMA3_8B, Layout(), techniques=techniques)
        return float(logit_bytes(job, all_ranks(job, LayoutColumns.of([Layout()])))[0])

    assert logits(Techniques(loss="tiled", loss_tiles=64)) == pytest.approx(logits(NO_TECHNIQUES) / 64)
    # Liger: 128256 / 4096 rounds to 32 pieces of 4096 tokens
    assert logits(Techniques(loss="fused_linear")) == pytest.approx(logits(NO_TECHNIQUES) / 32)
