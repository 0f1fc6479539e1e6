"""Bytes of mixtures and of multi-token prediction that were found by tracing them, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import shapes

from llmlaunch.backends.megatron.facts import MegatronOptions, megatron_facts
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_SELECTIVE, Layout
from llmlaunch.memory.estimator import RankEstimate
from llmlaunch.models.shape import MlaShape, ModelShape, MoeShape, Router
from llmlaunch.techniques import NO_TECHNIQUES, Techniques

LENGTH, WIDTH, LAYERS, VOCABULARY = 4096, 2048, 4, 102400
PLAIN = ModelShape("plain", LAYERS, WIDTH, 8192, 16, 16, 128, VOCABULARY, 8192)
MIXED = replace(PLAIN, moe=MoeShape(64, 6, 1408, 0, (1,) * LAYERS))
LATENT = replace(PLAIN, mla=MlaShape(None, 512, 128, 64, 128), qk_layernorm=True)
FOUR = Layout(pipeline=2, data=4, zero_stage=1)


def ranks(
    shape: ModelShape, layout: Layout, techniques: Techniques = NO_TECHNIQUES, version: str = "0.19"
) -> tuple[RankEstimate, ...]:
    facts = replace(megatron_facts(MegatronOptions(version=version)), expert_imbalance=1.0)
    return shapes.ranks(shape, layout, facts, techniques, LENGTH, microbatches=4)


def test_a_router_that_scores_all_experts_keeps_their_scores() -> None:
    assert MIXED.moe is not None
    before = replace(MIXED, moe=replace(MIXED.moe, router=Router(normalize_topk=False)))
    layout = Layout(data=4, zero_stage=1)
    all_scores, chosen = (ranks(shape, layout)[0].terms["activations"] for shape in (before, MIXED))
    assert all_scores - chosen == 4 * 64 * LENGTH * LAYERS


def test_queries_without_a_latent_are_normed_once_more_since_0_19() -> None:
    layout = Layout(data=1)
    new, old = (ranks(LATENT, layout, version=version)[0].terms for version in ("0.19", "0.16"))
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
    assert ranks(narrow, layout)[0].terms["layer_backward"] == max(forward, backward)


def test_of_the_last_micro_batch_alone_a_dispatcher_has_the_probabilities() -> None:
    layout = Layout(pipeline=2, data=2)
    fewer, more = (replace(MIXED, moe=replace(MIXED.moe or MoeShape(1, 1, 1, 0, ()), num_experts=n)) for n in (64, 128))
    less, whole = (ranks(shape, layout)[0].terms["activations"] for shape in (fewer, more))
    assert whole - less == (2 * 12 + 5) * 64 * LENGTH * (LAYERS / 2)


def test_recomputed_latent_projections_let_go_of_their_norms() -> None:
    recomputed = Layout(data=4, recompute=RECOMPUTE_SELECTIVE)
    whole, less = (
        ranks(LATENT, recomputed, Techniques((name,)))[0].terms["activations"] for name in ("core_attn", "mla_up_proj")
    )
    normed, projected = 2 * (512 + WIDTH) + 4, 2 * 16 * (2 * (128 + 64) + 128)
    assert whole - less == (normed + projected) * LENGTH * LAYERS


def test_experts_activations_that_are_made_again_outlive_the_second_linear() -> None:
    wide = replace(PLAIN, moe=MoeShape(8, 2, 8192, 0, (1,) * LAYERS))
    recomputed = replace(FOUR, recompute=RECOMPUTE_SELECTIVE)
    again, stored = (
        ranks(wide, recomputed, Techniques((name,)))[0].terms["layer_backward"] for name in ("moe_act", "core_attn")
    )
    assert again - stored == 2 * (LENGTH * 2) * 8192


def test_a_prediction_head_keeps_a_layer_and_what_surrounds_it() -> None:
    """On the last of two ranks, where the loss is the peak: the embedded tokens, them beside the hidden states, the
    input of the norm behind the layer; with the outputs of all heads, which the decoder's is one of, once more that and
    its own; and fp32 logits until the decoder's own head has run backward."""
    layer = ranks(PLAIN, FOUR)[-1].terms["activations"] / (LAYERS / 2)
    hidden = 2 * LENGTH * WIDTH
    before, after = (ranks(replace(PLAIN, mtp_num_layers=heads), FOUR)[-1].terms for heads in (1, 2))
    assert after["activations"] - before["activations"] == layer + 5 * hidden
    assert after["embedding"] - before["embedding"] == hidden
    assert after["logits_and_loss"] - before["logits_and_loss"] == 4 * LENGTH * VOCABULARY
    assert after["weight_gradient_stubs"] == before["weight_gradient_stubs"]


def test_full_recompute_makes_a_prediction_heads_layer_again() -> None:
    recomputed = replace(FOUR, recompute=RECOMPUTE_FULL)
    before, after = (ranks(replace(PLAIN, mtp_num_layers=heads), recomputed)[-1].terms for heads in (1, 2))
    assert after["activations"] - before["activations"] == 2 * 2 * LENGTH * WIDTH


@pytest.mark.parametrize(("tied", "tables"), [(False, 1), (True, 0)])
def test_prediction_of_more_tokens_embeds_them_on_the_last_stage(tied: bool, tables: int) -> None:
    """A head that shares its table with the embedding has one already."""
    shape = replace(PLAIN, tied_embeddings=tied)
    more = replace(shape, mtp_num_layers=1)
    alone = [ranks(s, Layout(data=4, zero_stage=1))[0].terms["parameters"] for s in (shape, more)]
    piped = [ranks(s, FOUR)[-1].terms["parameters"] for s in (shape, more)]
    assert piped[1] - piped[0] == alone[1] - alone[0] + tables * 2 * VOCABULARY * WIDTH
