"""Terms of the estimate against sums done by hand, each with the reason it exists."""

from __future__ import annotations

from dataclasses import replace

import pytest
import shapes
from shapes import LLAMA3_8B, LLAMA3_70B, MIXTRAL

from llmlaunch.backends.megatron.facts import MegatronOptions, megatron_facts
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_NONE, RECOMPUTE_SELECTIVE, Layout
from llmlaunch.memory.estimator import RankEstimate
from llmlaunch.models.shape import MlaShape, ModelShape, MoeShape
from llmlaunch.techniques import NO_TECHNIQUES, Techniques

TENSOR = Layout(tensor=4, data=2, sequence_parallel=1, zero_stage=1)
PIPELINE = Layout(tensor=4, pipeline=4, data=2, sequence_parallel=1, zero_stage=1)
LATENT = replace(LLAMA3_8B, num_query_groups=32, mla=MlaShape(1536, 512, 128, 64, 128))
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


def test_one_gradient_stub_for_every_shape_of_weight_and_one_for_the_head() -> None:
    first, *_, last = ranks(LLAMA3_70B, replace(PIPELINE, tensor=1, sequence_parallel=0, pipeline=2))
    h, f, kv, vocabulary = 8192, 28672, 1024, 128256
    layer = 2 * (h * (h + 2 * kv) + h * h + h * 2 * f + f * h)
    assert first.terms["weight_gradient_stubs"] == layer
    assert last.terms["weight_gradient_stubs"] == layer + 2 * vocabulary * h


@pytest.mark.parametrize("option", ["gradient_accumulation_fusion", "transformer_engine"])
def test_without_fusion_or_without_transformer_engine_there_are_no_stubs(option: str) -> None:
    for rank in ranks(LLAMA3_8B, PIPELINE, MegatronOptions(**{option: False})):
        assert rank.terms["weight_gradient_stubs"] == 0


@pytest.mark.parametrize(("loss", "per_logit"), [("none", 6), ("native", 10)])
def test_the_loss_keeps_its_copies_of_the_logits_on_the_last_rank_alone(loss: str, per_logit: int) -> None:
    *others, last = ranks(LLAMA3_8B, PIPELINE, MegatronOptions(loss=loss))
    norm = 4096 * (4 * 4096 + 4) // 4
    assert last.terms["logits_and_loss"] == norm + per_logit * 4096 * 128512 // 4
    assert all(rank.terms["logits_and_loss"] == 0 for rank in others)


def test_the_native_loss_works_in_place_only_where_it_is_not_compiled() -> None:
    eager = ranks(LLAMA3_8B, PIPELINE, MegatronOptions(loss="native", compiled=False))[-1]
    assert eager.allocated_bytes == ranks(LLAMA3_8B, PIPELINE)[-1].allocated_bytes


def test_a_loss_in_place_leaves_the_peak_to_the_heads_backward() -> None:
    last = ranks(LLAMA3_8B, PIPELINE, MegatronOptions(loss="te"))[-1]
    assert last.terms["head_backward"] >= 2 * 4096 * 128512 // 4
    assert last.allocated_bytes < ranks(LLAMA3_8B, PIPELINE)[-1].allocated_bytes


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


def kept_bytes(shape: ModelShape, modules: tuple[str, ...], layout: Layout = TENSOR) -> int:
    selective = replace(layout, recompute=RECOMPUTE_SELECTIVE if modules else RECOMPUTE_NONE)
    return ranks(shape, selective, techniques=Techniques(recompute_modules=modules))[0].terms["activations"]


def test_recomputing_a_dense_mlp_keeps_its_input_alone() -> None:
    """The output of the norm before it, which is fused into its first linear, goes too."""
    tokens, h, f = 4096, 4096, 14336
    assert kept_bytes(LLAMA3_8B, ()) - kept_bytes(LLAMA3_8B, ("mlp",)) == 32 * tokens * (6 * f + 2 * h) // 4


def test_recomputing_norms_helps_only_where_they_are_not_part_of_a_linear() -> None:
    tokens, h = 4096, 4096
    assert kept_bytes(LLAMA3_8B, ("layernorm",)) == kept_bytes(LLAMA3_8B, ())
    assert kept_bytes(LATENT, ()) - kept_bytes(LATENT, ("layernorm",)) == 32 * tokens * 2 * h // 4
    assert kept_bytes(EXPERTS, ()) - kept_bytes(EXPERTS, ("layernorm",)) == 8 * tokens * 2 * h // 4


@pytest.mark.parametrize("module", ["moe_act", "moe", "shared_experts"])
def test_recomputing_a_part_of_a_mixture_keeps_less(module: str) -> None:
    assert kept_bytes(EXPERTS, (module,)) < kept_bytes(EXPERTS, ())


def test_recomputing_flash_attention_keeps_more_because_the_mixed_projection_stays() -> None:
    tokens, query, key = 4096, 4096, 1024
    assert kept_bytes(LLAMA3_8B, ("core_attn",)) - kept_bytes(LLAMA3_8B, ()) == 32 * tokens * 2 * (query + key) // 4


def test_block_recompute_lies_between_none_and_full_and_more_of_it_keeps_less() -> None:
    def activations(layers: int) -> int:
        layout = replace(full, recompute_layers=layers)
        return ranks(LLAMA3_8B, layout, techniques=Techniques(recompute_method="block"))[0].terms["activations"]

    full = replace(PIPELINE, recompute=RECOMPUTE_FULL)
    amounts = [ranks(LLAMA3_8B, PIPELINE)[0].terms["activations"], *(activations(layers) for layers in range(1, 9))]
    assert amounts[8] == activations(0) == ranks(LLAMA3_8B, full)[0].terms["activations"]
    assert amounts == sorted(amounts, reverse=True)


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


def test_all_to_all_over_context_ranks_keeps_the_attentions_output_twice() -> None:
    layout = replace(TENSOR, context=2)
    [ring] = ranks(LLAMA3_8B, layout)
    [exchange] = ranks(LLAMA3_8B, layout, MegatronOptions(context_all_to_all=True))
    assert exchange.terms["activations"] - ring.terms["activations"] == 32 * (4096 // 2) * 2 * 4096 // 4


def test_gathering_instead_of_exchanging_tokens_holds_those_of_all_expert_ranks() -> None:
    gathering = replace(EXPERTS, moe=replace(EXPERTS.moe, token_dispatcher="allgather"))
    layout = Layout(data=8, expert=8, zero_stage=1)
    [exchange], [gathered] = ranks(EXPERTS, layout), ranks(gathering, layout)
    assert exchange.terms["sequence_gather"] == 0
    assert gathered.terms["sequence_gather"] == 8 * 4096 * 4096 * 2


def test_only_dropless_routing_is_unbalanced() -> None:
    capped = replace(MIXTRAL, moe=replace(MIXTRAL.moe, capacity_factor=1.0))
    layout = Layout(tensor=2, data=8, expert=8, sequence_parallel=1, zero_stage=1)
    [dropless], [balanced] = ranks(MIXTRAL, layout), ranks(capped, layout)
    tokens, h, f = 4096 * 2 // 2, 4096, 14336
    routed = 32 * tokens * 2 * (h + 3 * f)
    assert dropless.terms["activations"] - balanced.terms["activations"] == pytest.approx(0.1 * routed, abs=2)


def test_muon_keeps_one_state_less_for_matrices_of_the_blocks() -> None:
    [adam], [muon] = ranks(LLAMA3_8B, TENSOR), ranks(LLAMA3_8B, TENSOR, MegatronOptions(muon=True))
    assert adam.terms["optimizer_states"] - muon.terms["optimizer_states"] == 4 * LINEAR // 2
