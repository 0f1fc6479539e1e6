"""Terms of the estimate against sums done by hand, each with the reason it exists; those of mixtures and of multi-token
prediction were found by tracing them. The gradient of the embedding table comes last of a micro-batch: beside a large
table and few layers it is a peak."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import shapes
from shapes import LLAMA3_8B, MIXTRAL

from llmlaunch.frameworks.megatron.facts import MegatronOptions, megatron_facts
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_SELECTIVE, Layout
from llmlaunch.memory.estimator import RankEstimate
from llmlaunch.models.shape import MlaShape, ModelShape, MoeShape
from llmlaunch.techniques import NO_TECHNIQUES, Techniques
from support.changed_facts import changed

TENSOR = Layout(tensor=4, data=2, sequence_parallel=1, zero_stage=1)
PIPELINE = Layout(tensor=4, pipeline=4, data=2, sequence_parallel=1, zero_stage=1)
ZERO_BUBBLE = Techniques(zero_bubble=True)
LINEAR = (
    32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) // 4
)  # weights of Llama 3 8B's blocks, a tensor rank
EXPERTS = ModelShape(
    "experts", 8, 4096, 14336, 32, 8, 128, 128256, 8192, moe=MoeShape(16, 4, 2048, 2048, (1,) * 8, grouped_gemm=True)
)


def ranks(
    shape: ModelShape,
    layout: Layout,
    options: MegatronOptions | None = None,
    techniques: Techniques = NO_TECHNIQUES,
) -> tuple[RankEstimate, ...]:
    return shapes.ranks(shape, layout, megatron_facts(options or MegatronOptions()), techniques)


@pytest.mark.parametrize(("shape", "sequences"), [(LLAMA3_8B, 1), (MIXTRAL, 32)])
def test_torch_that_recorded_streams_could_not_reuse_what_a_forward_pass_gathered(
    shape: ModelShape, sequences: int
) -> None:
    gathered = 2 * 32 * 2 * 4096 * 4096 * sequences  # twice a layer, in bf16
    split = replace(TENSOR, micro_batch_size=sequences)
    recorded, plain = (ranks(shape, split, MegatronOptions(streams_recorded=on))[0] for on in (True, False))
    assert recorded.allocated_bytes == plain.allocated_bytes
    assert recorded.reserved_bytes - plain.reserved_bytes == gathered
    alone = replace(split, tensor=1, sequence_parallel=0)
    recorded, plain = (ranks(shape, alone, MegatronOptions(streams_recorded=on))[0] for on in (True, False))
    assert recorded == plain, "without sequence parallelism nothing is gathered"


@pytest.mark.parametrize("option", ["gradient_accumulation_fusion", "transformer_engine"])
def test_without_fusion_or_without_transformer_engine_there_are_no_stubs(option: str) -> None:
    for rank in ranks(LLAMA3_8B, PIPELINE, MegatronOptions(**{option: False})):
        assert rank.terms["weight_gradient_stubs"] == 0


def test_the_native_loss_works_in_place_only_where_it_is_not_compiled() -> None:
    eager = ranks(LLAMA3_8B, PIPELINE, MegatronOptions(loss="native", compiled=False))[-1]
    assert eager.allocated_bytes == ranks(LLAMA3_8B, PIPELINE)[-1].allocated_bytes


@pytest.mark.parametrize(
    ("recipe", "capability", "copies"),
    [
        ("tensorwise", 9.0, 2.0),  # Hopper multiplies with the second operand transposed
        ("tensorwise", 10.0, 1.0),
        ("delayed", 9.0, 2.0),
        ("mxfp8", 10.0, 2.0 + 2 / 32),  # one scale byte for 32 elements, along either dimension
        ("nvfp4", 10.0, 1.0 + 2 / 16),
    ],
)
def test_narrow_formats_keep_narrow_weights(recipe: str, capability: float, copies: float) -> None:
    options = MegatronOptions(fp8_recipe=recipe, compute_capability=capability)
    [wide], [narrow] = ranks(LLAMA3_8B, TENSOR), ranks(LLAMA3_8B, TENSOR, options)
    assert narrow.terms["weight_copies"] == round(copies * LINEAR)
    assert narrow.terms["parameters"] == wide.terms["parameters"]
    assert narrow.terms["activations"] < wide.terms["activations"]


def test_narrow_parameters_stand_in_place_of_the_wide_ones() -> None:
    options = MegatronOptions(fp8_recipe="mxfp8", compute_capability=10.0)
    [beside] = ranks(LLAMA3_8B, TENSOR, options)
    [instead] = ranks(LLAMA3_8B, TENSOR, replace(options, fp8_parameters=True))
    assert beside.terms["parameters"] - instead.terms["parameters"] == 2 * LINEAR
    assert beside.terms["weight_copies"] == instead.terms["weight_copies"]


def test_one_checkpoint_for_two_layers_keeps_half_the_inputs_and_makes_two_layers_again() -> None:
    full = replace(PIPELINE, recompute=RECOMPUTE_FULL)
    single, *_ = ranks(LLAMA3_8B, full)
    pair, *_ = ranks(LLAMA3_8B, replace(full, recompute_layers=2))
    assert single.terms["activations"] == 2 * pair.terms["activations"]
    assert pair.terms["recomputed_layer"] == 2 * single.terms["recomputed_layer"] > 0


def test_optimizer_instances_shard_their_states_each_for_itself() -> None:
    layout = replace(TENSOR, data=8)
    [whole] = ranks(LLAMA3_8B, layout)
    [halves] = ranks(LLAMA3_8B, layout, MegatronOptions(optimizer_instances=2))
    assert halves.terms["optimizer_states"] == pytest.approx(2 * whole.terms["optimizer_states"], abs=1)
    assert halves.terms["parameters"] == whole.terms["parameters"]


def test_states_a_version_shards_over_data_alone_do_not_fall_with_context() -> None:
    layout = replace(TENSOR, context=4)
    [core] = ranks(LLAMA3_8B, layout)
    [fork] = ranks(LLAMA3_8B, layout, MegatronOptions(optimizer_bytes_over_data=4.0))
    more = fork.terms["optimizer_states"] - core.terms["optimizer_states"]
    parameters = core.terms["parameters"] / 2
    assert more == pytest.approx(4 * parameters * (1 / 2 - 1 / 8), rel=1e-9)


def test_gathering_instead_of_exchanging_tokens_holds_those_of_all_expert_ranks() -> None:
    layout = Layout(data=8, expert=8, zero_stage=1)
    [exchange], [gathered] = (
        ranks(EXPERTS, layout, techniques=Techniques(token_dispatcher=kind)) for kind in ("alltoall", "allgather")
    )
    assert exchange.terms["sequence_gather"] == 0
    assert gathered.terms["sequence_gather"] == 8 * 4096 * 4096 * 2


def test_only_dropless_routing_is_unbalanced() -> None:
    capped = replace(MIXTRAL, moe=replace(MIXTRAL.moe, capacity_factor=1.0))
    layout = Layout(tensor=2, data=8, expert=8, sequence_parallel=1, zero_stage=1)
    [dropless], [balanced] = ranks(MIXTRAL, layout), ranks(capped, layout)
    tokens, h, f = 4096 * 2 // 2, 4096, 14336
    routed = 32 * tokens * 2 * (h + 3 * f)
    assert dropless.terms["activations"] - balanced.terms["activations"] == pytest.approx(0.1 * routed, abs=2)


LENGTH, WIDTH, LAYERS, VOCABULARY = 4096, 2048, 4, 102400
PLAIN = ModelShape("plain", LAYERS, WIDTH, 8192, 16, 16, 128, VOCABULARY, 8192)
MIXED = replace(PLAIN, moe=MoeShape(64, 6, 1408, 0, (1,) * LAYERS))
PLAIN_LATENT = replace(PLAIN, mla=MlaShape(None, 512, 128, 64, 128), qk_layernorm=True)
TWO_RANKS = Layout(pipeline=2, data=4, zero_stage=1)


def traced(
    shape: ModelShape, layout: Layout, techniques: Techniques = NO_TECHNIQUES, version: str = "0.19"
) -> tuple[RankEstimate, ...]:
    facts = changed(megatron_facts(MegatronOptions(version=version)), expert_imbalance=1.0)
    return shapes.ranks(shape, layout, facts, techniques, LENGTH, microbatches=4)


def test_queries_without_a_latent_are_normed_once_more_since_0_19() -> None:
    layout = Layout(data=1)
    new, old = (traced(PLAIN_LATENT, layout, version=version)[0].terms for version in ("0.19", "0.16"))
    assert new["parameters"] - old["parameters"] == 2 * WIDTH * LAYERS
    assert new["activations"] - old["activations"] == (2 * WIDTH + 4) * LENGTH * LAYERS


@pytest.mark.parametrize(
    ("experts", "split", "bytes_of_routed"),
    [
        (64, {"expert": 8}, 2 * 4),  # permuted, exchanged, put out, sorted
        (64, {}, 2 * 3),  # nothing is exchanged
        (8, {"expert": 8}, 2 * 3),  # one expert a rank: nothing to sort
        # gathered, and summed in fp32
        (64, {"tensor": 2, "expert": 4, "expert_tensor": 2}, 2 * (2 + 2 * 2) + 4 * (2 + 1)),
    ],
)
def test_what_tokens_pass_through_on_their_way_lives_until_the_mixture_has_run(
    experts: int, split: dict[str, int], bytes_of_routed: int
) -> None:
    """On the first of two ranks, where layers are the peak; of experts so narrow that the one thing beside it is the
    backward pass of an exchange, which holds three of them and the residual stream twice."""
    narrow = replace(PLAIN, moe=MoeShape(experts, 6, 64, 0, (1,) * LAYERS))
    layout = Layout(**{"pipeline": 2, "data": 8, "sequence_parallel": int("tensor" in split), **split})
    routed = LENGTH * 6 / layout.tensor
    forward, backward = bytes_of_routed * routed * WIDTH, (3 * 2 * routed + 2 * 2 * LENGTH / layout.tensor) * WIDTH
    assert traced(narrow, layout)[0].terms["layer_backward"] == max(forward, backward)


def test_of_the_last_micro_batch_alone_a_dispatcher_has_the_probabilities() -> None:
    layout = Layout(pipeline=2, data=2)
    fewer, more = (replace(MIXED, moe=replace(MIXED.moe or MoeShape(1, 1, 1, 0, ()), num_experts=n)) for n in (64, 128))
    less, whole = (traced(shape, layout)[0].terms["activations"] for shape in (fewer, more))
    assert whole - less == (2 * 12 + 5) * 64 * LENGTH * (LAYERS / 2)


def test_experts_activations_that_are_made_again_outlive_the_second_linear() -> None:
    wide = replace(PLAIN, moe=MoeShape(8, 2, 8192, 0, (1,) * LAYERS))
    recomputed = replace(TWO_RANKS, recompute=RECOMPUTE_SELECTIVE)
    again, stored = (
        traced(wide, recomputed, Techniques((name,)))[0].terms["layer_backward"] for name in ("moe_act", "core_attn")
    )
    assert again - stored == 2 * (LENGTH * 2) * 8192


FOUR_LAYERS = ModelShape("four-layers", 4, 4096, 14336, 32, 8, 128, 128256, 8192)
TABLE = 2 * 128256 * 4096  # its gradient in bf16


def first_rank(layout: Layout, microbatches: int, shape: ModelShape = FOUR_LAYERS, **job: Any) -> RankEstimate:
    return shapes.ranks(shape, layout, microbatches=microbatches, **job)[0]


def beside(rank: RankEstimate) -> int:
    return rank.terms["activations"] + rank.terms["layer_backward"]


@pytest.mark.parametrize("fused", [True, False])
def test_a_tied_head_on_the_same_rank_doubles_it(fused: bool) -> None:
    """What the head gives waits; where that is a stub, which others use as well, their sum is a tensor of its own."""
    tied = replace(FOUR_LAYERS, num_layers=2, tied_embeddings=True)
    facts = megatron_facts(MegatronOptions(gradient_accumulation_fusion=fused))
    layout = Layout(data=2, zero_stage=1, recompute=RECOMPUTE_FULL)
    rank = first_rank(layout, 1, shape=tied, facts=facts, length=64)
    assert beside(rank) + rank.terms["recomputed_layer"] == pytest.approx(2 * TABLE + 2 * 64 * 4096)


def test_fp32_and_cards_before_ampere_keep_the_scores_of_attention() -> None:
    """Neither flash nor fused attention takes fp32, or runs on a V100."""
    layout = Layout(tensor=2, data=4, sequence_parallel=1, zero_stage=1)
    scores = 4 * 16 * 4096 * 4096
    fp32 = first_rank(layout, 1, facts=megatron_facts(MegatronOptions("fp32"))).terms["activations"]
    bf16 = first_rank(layout, 1).terms["activations"]
    assert fp32 - 2 * bf16 == pytest.approx(4 * scores, rel=0.01)  # statistics are fp32 in both
    volta = first_rank(layout, 1, facts=megatron_facts(MegatronOptions(compute_capability=7.0))).terms["activations"]
    assert volta - bf16 == pytest.approx(2 * scores, rel=0.01)


def test_waiting_weight_gradients_of_a_mixture_keep_what_all_its_linears_read() -> None:
    layout = Layout(pipeline=2, data=4, expert=4, zero_stage=1)
    balanced = changed(megatron_facts(), expert_imbalance=1.0)
    waiting = shapes.ranks(EXPERTS, layout, balanced, ZERO_BUBBLE)[1].terms["waiting_weight_passes"]
    n, h, ffn = 4096, 4096, 2048
    attention = 2 * n * (h + (4096 + 2 * 1024) + 4096 + h)
    mlp = 2 * n * (h + 2 * ffn + ffn + h)
    assert waiting == 4 * (attention + 4 * mlp + mlp)  # four routed copies of every token, and the shared expert
