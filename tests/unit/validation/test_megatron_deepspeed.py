"""Megatron-DeepSpeed as BLOOM was trained with it, term by term on a rank whose sizes can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmlaunch.layout import RECOMPUTE_FULL, Layout
from llmlaunch.memory.constants import constant
from llmlaunch.memory.estimator import RankEstimate, estimate
from llmlaunch.memory.job import Job
from llmlaunch.models.shape import ModelShape
from llmlaunch.tracing.caching_allocator import CachingAllocator
from llmlaunch.workload import Workload
from validation.megatron_deepspeed import DROPOUT, ForkOptions, megatron_deepspeed_facts

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


# MiB allocated and reserved at the most by pipeline rank, after the first step of a 52B GPT on 64 V100s without ZeRO
# (bigscience-workshop/bigscience, experiments/gpt2-meg-ds-3d/meg_ds_3d_gpt2_perf_n16-ds-on.out, 2021-06)
LOGGED = {0: (19961, 23288), 1: (17462, 20018), 4: (16646, 19218), 8: (15558, 18654), 12: (15447, 17710)}
LOGGED_DEVICE = {4: 26, 6: 29, 8: 32}  # GB rounded up, by micro-batch size (experiments/gpt2.md)
GPT_52B = replace(
    BLOOM,
    name="gpt-52b",
    num_layers=64,
    hidden_size=8192,
    ffn_hidden_size=4 * 8192,
    num_attention_heads=32,
    num_query_groups=32,
    head_dim=256,
    vocab_size=50688,
    max_position_embeddings=1024,
    position_embedding="learned_absolute",
)


def logged_ranks(micro_batch_size: int) -> tuple[RankEstimate, ...]:
    """The run as its log tells it: Apex's Adam was not fused for DeepSpeed 0.4, and the embedding had no norm."""
    facts = megatron_deepspeed_facts("fp16", "fp16", ForkOptions(False, False, 7.0))
    job = Job(GPT_52B, Workload(1024, 256 * micro_batch_size, "fp16"), facts)
    layout = Layout(tensor=4, pipeline=16, micro_batch_size=micro_batch_size, recompute=RECOMPUTE_FULL)
    return estimate(job, layout).ranks


def test_every_rank_of_a_logged_run_on_v100s_allocates_and_reserves_what_is_priced() -> None:
    priced = logged_ranks(4)
    for rank, (allocated, reserved) in LOGGED.items():
        assert priced[rank].allocated_bytes / 2**20 == pytest.approx(allocated, rel=0.01)
        assert priced[rank].reserved_bytes / 2**20 == pytest.approx(reserved, rel=0.04)


@pytest.mark.parametrize("micro_batch_size", LOGGED_DEVICE)
def test_the_fullest_v100_shows_what_is_priced(micro_batch_size: int) -> None:
    fullest = max(rank.device_bytes for rank in logged_ranks(micro_batch_size)) / 2**30
    assert fullest == pytest.approx(LOGGED_DEVICE[micro_batch_size], abs=1.0)


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
