"""Megatron-DeepSpeed as BLOOM was trained with it, term by term on a rank whose sizes can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmlaunch.backends.deepspeed.megatron_deepspeed_facts import DROPOUT, megatron_deepspeed_facts
from llmlaunch.layout import RECOMPUTE_FULL, Layout
from llmlaunch.memory.estimator import RankEstimate, estimate
from llmlaunch.memory.facts import constant
from llmlaunch.memory.job import Job
from llmlaunch.models.shape import ModelShape
from llmlaunch.tracing.caching_allocator import CachingAllocator
from llmlaunch.workload import Workload

HIDDEN, SEQUENCE, VOCABULARY = 14336, 2048, 250880
BLOOM = ModelShape(
    "bloom-181b",
    num_layers=72,
    hidden_size=HIDDEN,
    ffn_hidden_size=4 * HIDDEN,
    num_attention_heads=64,
    num_query_groups=64,
    head_dim=HIDDEN // 64,
    vocab_size=VOCABULARY,
    max_position_embeddings=SEQUENCE,
    tied_embeddings=True,
    gated_mlp=False,
    linear_bias=True,
    normalization="LayerNorm",
    position_embedding="alibi",
    attention_dropout=DROPOUT,
    hidden_dropout=DROPOUT,
)
LAYOUT = Layout(tensor=8, pipeline=12, data=4, zero_stage=1, recompute=RECOMPUTE_FULL)
STAGE_PARAMETERS = 6 * 12 * HIDDEN**2 / 8 + VOCABULARY / 8 * HIDDEN  # norms and biases left out: 0.01 %


def ranks(layout: Layout = LAYOUT, precision: str = "fp16", gradients: str = "fp16") -> tuple[RankEstimate, ...]:
    job = Job(BLOOM, Workload(SEQUENCE, 2048, precision), megatron_deepspeed_facts(precision, gradients))
    return estimate(job, layout).ranks


def test_zero_1_keeps_whole_16_bit_gradients_and_shards_the_states() -> None:
    terms = ranks()[0].terms
    assert terms["parameters"] == terms["gradients"] == pytest.approx(2 * STAGE_PARAMETERS, rel=3e-4)
    assert terms["optimizer_states"] == pytest.approx(12 * STAGE_PARAMETERS / 4, rel=3e-4)


def test_the_embeddings_norm_and_dropout_lie_outside_the_checkpoints() -> None:
    """Per token in flight: norm input 2 h, dropout mask h, ids, labels, positions, loss mask 32 bytes."""
    assert ranks()[0].terms["embedding"] == 12 * SEQUENCE * (3 * HIDDEN + 32)
    assert ranks()[1].terms["embedding"] == 0


def test_a_stage_keeps_its_share_of_what_it_sent() -> None:
    inputs = 12 * 6 * SEQUENCE * HIDDEN * 2
    assert ranks()[0].terms["activations"] == inputs + 12 * SEQUENCE * HIDDEN * 2 / 8


def test_the_steps_flat_tensors_lie_beside_the_backward_pass() -> None:
    """The norm's doubles of the embedding (3.35 GiB), and in their place 2 bytes flattened and 4 in fp32 of a quarter
    of the parameters (3.26 GiB)."""
    doubles, step = 8 * VOCABULARY / 8 * HIDDEN, 6 * STAGE_PARAMETERS / 4
    assert step < doubles < 1.1 * step
    assert ranks()[0].terms["allocator_cache"] == pytest.approx(doubles, rel=3e-4)


def test_the_step_takes_the_place_of_the_norms_doubles() -> None:
    """Replayed allocation by allocation, without the blocks of a backward pass."""
    allocator, share = CachingAllocator(), STAGE_PARAMETERS / 4
    for _ in range(3):
        allocator.free(allocator.allocate(int(8 * VOCABULARY / 8 * HIDDEN)))
        flat, wide = allocator.allocate(int(2 * share)), allocator.allocate(int(4 * share))
        allocator.free(flat)
        allocator.free(wide)
    assert ranks()[0].terms["allocator_cache"] == pytest.approx(allocator.reserved_bytes, rel=1e-3)


def test_the_norms_doubles_reuse_a_segment_that_is_large_enough() -> None:
    alone = replace(LAYOUT, data=1)
    assert ranks(alone)[0].terms["gradient_norm"] == 0
    assert ranks(alone)[0].reserved_bytes < 22.5 * STAGE_PARAMETERS + 12 * 9 * SEQUENCE * HIDDEN * 2


def test_a_rank_communicates_in_megatrons_groups_and_in_deepspeeds_own() -> None:
    each, staged = constant("communicator_bytes"), ranks()
    # the ends tie embeddings, the others have a second neighbour
    assert [staged[rank].terms["communicators"] / each for rank in (0, 5, 11)] == [10, 10, 10]
    alone = ranks(Layout(tensor=8, zero_stage=1, recompute=RECOMPUTE_FULL))[0]
    assert alone.terms["communicators"] / each == 3  # world, tensor, model


def test_bf16_with_fp32_accumulation_keeps_whole_fp32_gradients() -> None:
    terms = ranks(precision="bf16", gradients="fp32")[0].terms
    assert terms["gradients"] == 2 * terms["parameters"]
    assert terms["gradient_buffers"] == terms["parameters"]
    assert terms["optimizer_step"] == 0


def test_without_zero_the_step_copies_every_gradient_to_fp32_twice() -> None:
    worst = ranks(replace(LAYOUT, zero_stage=0))[0]
    assert worst.terms["optimizer_step"] == pytest.approx(8 * STAGE_PARAMETERS, rel=3e-4)
    assert worst.terms["optimizer_states"] == pytest.approx(12 * STAGE_PARAMETERS, rel=3e-4)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4, 8])
def test_terms_sum_to_the_device(micro_batch_size: int) -> None:
    for rank in ranks(replace(LAYOUT, micro_batch_size=micro_batch_size)):
        assert sum(rank.terms.values()) == rank.device_bytes
        assert min(rank.terms.values()) >= 0
