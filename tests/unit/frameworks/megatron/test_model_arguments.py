"""Models in Megatron-LM's words: each part of a shape arrives, and what the command line cannot say is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmlaunch.errors import UserError
from llmlaunch.frameworks.megatron.backend import MegatronLM
from llmlaunch.layout import RECOMPUTE_SELECTIVE, Layout
from llmlaunch.models.sections import Mamba, Vision
from llmlaunch.models.shape import (
    SQUARED,
    CompressedAttention,
    Indexer,
    LinearAttention,
    MlaShape,
    ModelShape,
    MoeShape,
    Multipliers,
    RopeScaling,
    Router,
    ShortConvolutionShape,
    SlidingWindow,
)
from llmlaunch.recipe.types import Recipe
from llmlaunch.techniques import NO_TECHNIQUES, Techniques
from support.backend_output import check_flags, check_with_parser, refused_by, words_of
from support.recipes import recipe_of

NODE = Layout(data=8, zero_stage=1)
DENSE = ModelShape("dense", 8, 4096, 14336, 32, 8, 128, 32000, 8192)
LATENT = replace(DENSE, name="latent", num_query_groups=32, mla=MlaShape(1536, 512, 128, 64, 128))
CHOSEN = replace(LATENT, name="chosen", indexer=Indexer(64, 128, 2048))
EXPERTS = MoeShape(64, 6, 1408, 2816, (0, *(1,) * 7))
ALL_ROUTED = replace(EXPERTS, shared_expert_ffn_hidden_size=0, layer_pattern=(1,) * 8)
MIXTURE = replace(DENSE, name="mixture", moe=EXPERTS)
POOLING = CompressedAttention((0, 4, 128, 4) * 2, 1024, 8, 1024, 32, 128, 512)
POOLED = replace(DENSE, name="pooled", num_query_groups=1, compressed_attention=POOLING)
DEEPSEEK_YARN = RopeScaling("yarn", 40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
DEEPSEEK_ROUTER = Router("sigmoid", 8, 4, 2.5, True, True, "seq_aux_loss", 0.0001)


def recipe_for(shape: ModelShape, *overrides: str, techniques: Techniques = NO_TECHNIQUES) -> Recipe:
    return replace(recipe_of("llama3-8b", *overrides), model=shape, techniques=techniques)


def routed(router: Router, **more: object) -> ModelShape:
    return replace(MIXTURE, moe=replace(EXPERTS, router=router, **more))


WINDOW = SlidingWindow(1024, full_every=6)
PLAIN = replace(DENSE, gated_mlp=False, activation="gelu")
GATED = replace(MIXTURE, moe=replace(EXPERTS, num_experts=8, shared_expert_gate=True))
FLEX = Techniques(token_dispatcher="flex")
USUAL = replace(MIXTURE, moe=replace(EXPERTS, num_experts=8))
UNBALANCED = Router(balancing="none")

ONE_EXPERT = replace(EXPERTS, topk=1, router=Router("sigmoid", normalize_topk=False, weighted_inputs=True))

HYBRID = replace(
    MIXTURE, gated_mlp=False, activation=SQUARED, position_embedding="none", mtp_num_layers=2, mtp_repeated=True,
    mamba=Mamba("M*E-M*EM", 64, groups=4, mtp_pattern="*E"),
    moe=replace(EXPERTS, layer_pattern=(0, 0, 1, 0, 0, 0, 1, 0), latent_size=1024),
)  # fmt: skip

# A shape, the flags it is said with, those it is said without.
SAID: dict[str, tuple[ModelShape, str, str]] = {
    "latent attention with its rotation": (
        replace(LATENT, rope_scaling=DEEPSEEK_YARN),
        "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
        "--v-head-dim 128 --qk-layernorm --position-embedding-type rope --rope-type yarn --rotary-scaling-factor 40 "
        "--mscale 1 --mscale-all-dim 1",
        "--group-query-attention --kv-channels --no-rope-fusion",
    ),
    "latent attention that is not scaled rotates plainly and, as that is refused, unfused": (
        replace(LATENT, mla=MlaShape(None, 512, 128, 64, 128)),
        "--rope-type rope --no-rope-fusion",
        "--q-lora-rank",
    ),
    "sparse attention, whose kernels go before a fused rotation": (
        replace(CHOSEN, rope_scaling=DEEPSEEK_YARN),
        "--experimental-attention-variant dsa --dsa-indexer-n-heads 64 --dsa-indexer-head-dim 128 "
        "--dsa-indexer-topk 2048 --dsa-indexer-loss-coeff 0.001 --dsa-indexer-use-sparse-loss --no-rope-fusion "
        "--no-dsa-indexer-rotate-activation --dsa-kernel-backend cudnn --rope-type yarn",
        "--dsa-indexer-rope-interleaved",
    ),
    "Llama 4, whose pieces are longer than the sequence": (
        replace(MIXTURE, qk_l2_norm=True, moe=ONE_EXPERT, sliding_window=SlidingWindow(8192, 4, chunked=True)),
        "--qk-l2-norm --moe-apply-probs-on-input --moe-router-score-function sigmoid",
        "--no-rope-freq --window-size --qk-layernorm",
    ),
    "layers without positions": (replace(DENSE, no_rope_every=4), "--no-rope-freq 4", "--qk-l2-norm"),
    "llama3 scaling": (
        replace(DENSE, rope_scaling=RopeScaling("llama3", 8.0, 8192)),
        "--use-rope-scaling --rope-scaling-factor 8",
        "",
    ),
    "linear scaling": (
        replace(DENSE, rope_scaling=RopeScaling("linear", 4.0)),
        "--rotary-seq-len-interpolation-factor 4",
        "",
    ),
    "yarn scaling": (
        replace(DENSE, rope_scaling=RopeScaling("yarn", 4.0, 32768, truncate=False)),
        "--position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 32768 "
        "--yarn-beta-fast 32 --yarn-beta-slow 1 --no-yarn-correction-range-round-to-int",
        "",
    ),
    "norms and windows, whose tokens count without the token itself": (
        replace(DENSE, zero_centered_norm=True, norm_epsilon=1e-6, sliding_window=WINDOW),
        "--apply-layernorm-1p --norm-epsilon 1e-06 --window-size 1023,0 --window-attn-skip-freq 6",
        "",
    ),
    "a window as long as the sequence hides nothing": (
        replace(DENSE, sliding_window=SlidingWindow(8192)),
        "--swiglu",
        "--window-size --norm-epsilon",
    ),
    "gelu without biases is not fused": (PLAIN, "--no-bias-gelu-fusion --disable-bias-linear", "--swiglu"),
    "gelu with biases is": (replace(PLAIN, linear_bias=True), "", "--no-bias-gelu-fusion --disable-bias-linear"),
    "a router of DeepSeek, 64 experts and the prediction of several tokens": (
        replace(routed(DEEPSEEK_ROUTER), mtp_num_layers=1),
        "--moe-router-score-function sigmoid --moe-router-num-groups 8 --moe-router-group-topk 4 "
        "--moe-router-topk-scaling-factor 2.5 --moe-router-enable-expert-bias --moe-router-dtype fp32 "
        "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.0001 "
        "--moe-shared-expert-intermediate-size 2816 --moe-layer-freq [0,1,1,1,1,1,1,1] --mtp-num-layers 1",
        "--moe-router-pre-softmax",
    ),
    "GPT-OSS: sinks, a clamped activation with an offset, and biases that experts in one kernel add themselves": (
        replace(DENSE, moe=ALL_ROUTED, attention_sinks=True, activation="clamped_swiglu", linear_bias=True),
        "--softmax-type learnable --quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7 "
        "--no-bias-dropout-fusion",
        "--swiglu --disable-bias-linear --no-bias-gelu-fusion",
    ),
    "biases of experts run one by one are added with the residual stream": (
        replace(
            routed(UNBALANCED),
            linear_bias=True,
            moe=replace(EXPERTS, grouped_gemm=False, shared_expert_ffn_hidden_size=0),
        ),
        "",
        "--no-bias-dropout-fusion --disable-bias-linear --moe-grouped-gemm",
    ),
    "gated delta nets but for every fourth layer, whose attention is gated": (
        replace(DENSE, linear_attention=LinearAttention(num_value_heads=64), attention_gate=True),
        "--experimental-attention-variant gated_delta_net --linear-attention-freq 4 --linear-num-key-heads 16 "
        "--linear-num-value-heads 64 --linear-key-head-dim 128 --linear-value-head-dim 128 --linear-conv-kernel-dim 4 "
        "--attention-output-gate",
        "",
    ),
    "gated delta nets alone": (
        replace(DENSE, linear_attention=LinearAttention(0)),
        "--linear-attention-freq [1,1,1,1,1,1,1,1]",
        "--attention-output-gate",
    ),
    "layers of one part each, as one pattern": (
        HYBRID,
        "--hybrid-layer-pattern M*E-M*EM/*E/*E --mamba-num-heads 64 --mamba-head-dim 64 --mamba-state-dim 128 "
        "--mamba-num-groups 4 --squared-relu --no-bias-gelu-fusion --use-fused-weighted-squared-relu "
        "--moe-latent-size 1024 --mtp-num-layers 2 --mtp-use-repeated-layer --position-embedding-type none "
        "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec",
        "--swiglu --moe-layer-freq --num-virtual-stages-per-pipeline-rank",
    ),
    "softmax after the choice makes the chosen sum to one": (
        routed(UNBALANCED),
        "--moe-router-load-balancing-type none",
        "--moe-router-pre-softmax --moe-aux-loss-coeff",
    ),
    "softmax before the choice where they need not": (
        routed(replace(UNBALANCED, normalize_topk=False)),
        "--moe-router-pre-softmax",
        "",
    ),
    "softmax before the choice of one expert, which Megatron refuses otherwise": (
        routed(UNBALANCED, topk=1),
        "--moe-router-pre-softmax",
        "",
    ),
    "the usual dispatcher": (
        USUAL,
        "--moe-token-dispatcher-type alltoall",
        "--moe-flex-dispatcher-backend --moe-router-dtype --moe-shared-expert-overlap",
    ),
}


@pytest.mark.parametrize(("shape", "said", "unsaid"), SAID.values(), ids=SAID)
def test_a_shape_is_said_in_flags(shape: ModelShape, said: str, unsaid: str) -> None:
    check_flags(recipe_for(shape), NODE, said, unsaid)


def test_techniques_of_dispatchers_are_said() -> None:
    hybrid = recipe_for(GATED, techniques=replace(FLEX, flex_backend="hybridep", overlap_shared_expert=True))
    check_flags(hybrid, NODE, "--moe-flex-dispatcher-backend hybridep --moe-shared-expert-overlap")
    scores = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep --moe-router-dtype fp32"
    gated = "--moe-shared-expert-gate --moe-grouped-gemm"
    check_flags(recipe_for(GATED, techniques=FLEX), NODE, f"{scores} {gated}", "--moe-shared-expert-overlap")


def test_gated_delta_nets_are_those_of_core_019_and_say_what_they_need() -> None:
    hybrid = replace(DENSE, linear_attention=LinearAttention())
    with pytest.raises(UserError, match=r"model\.linear_attention: gated delta nets of core 0\.16 keep other tensors"):
        MegatronLM().render(recipe_for(hybrid, "backend={name: megatron-lm, version: '0.16.1'}"), NODE)
    (note,) = MegatronLM().render(recipe_for(hybrid), NODE).notes
    assert "flash-linear-attention" in note
    assert MegatronLM().render(recipe_for(DENSE), NODE).notes == ()


def test_stages_of_layers_of_one_part_each_stand_in_their_pattern() -> None:
    for layout, pattern in (
        (Layout(pipeline=2, virtual_pipeline=2), "M*|E-|M*|EM/*E/*E"),
        (Layout(pipeline=2, layers_by_stage=(3, 5)), "M*E|-M*EM/*E/*E"),
    ):
        check_flags(recipe_for(HYBRID), layout, f"--hybrid-layer-pattern {pattern}", "--pipeline-model-parallel-layout")
    rendered = MegatronLM().render(recipe_for(HYBRID), NODE)
    assert words_of(recipe_for(HYBRID), NODE)[0].endswith("pretrain_hybrid.py")
    assert any("mamba-ssm" in note for note in rendered.notes)


def test_yarn_of_ordinary_attention_came_after_core_016() -> None:
    stretched = replace(DENSE, rope_scaling=RopeScaling("yarn", 4.0, 32768))
    with pytest.raises(UserError, match=r"model\.rope_scaling: core 0\.16 stretches positions by yarn with latent att"):
        MegatronLM().render(recipe_for(stretched, "backend={name: megatron-lm, version: '0.16.1'}"), NODE)


MANY = [
    replace(LATENT, rope_scaling=DEEPSEEK_YARN, mtp_num_layers=1, moe=replace(EXPERTS, router=DEEPSEEK_ROUTER)),
    replace(CHOSEN, indexer=Indexer(32, 128, 2048, interleaved=True)),
    replace(DENSE, rope_scaling=RopeScaling("yarn", 4.0, 32768, mscale=1.0, mscale_all_dim=0.5), qk_layernorm=True),
    replace(DENSE, rope_scaling=RopeScaling("linear", 2.0), sliding_window=SlidingWindow(512), zero_centered_norm=True),
    replace(MIXTURE, moe=replace(EXPERTS, shared_expert_gate=True, capacity_factor=1.5)),
    replace(MIXTURE, linear_attention=LinearAttention(), attention_gate=True),
]


@pytest.mark.parametrize("shape", MANY, ids=lambda shape: str(shape.name))
def test_every_word_is_one_the_real_parser_takes(shape: ModelShape) -> None:
    check_with_parser(MegatronLM().render(recipe_for(shape), NODE).arguments, "0.19")


WEIGHING = Router(weighted_inputs=True)
REFUSED: list[tuple[str, ModelShape]] = [
    ("model.activation", replace(DENSE, activation="gelu")),
    ("model.activation", replace(DENSE, gated_mlp=False, activation="silu")),
    ("model.post_norms", replace(DENSE, post_norms=True)),
    ("model.short_convolution", replace(DENSE, short_convolution=ShortConvolutionShape((0,)))),
    ("model.multipliers", replace(DENSE, multipliers=Multipliers(residual=0.5))),
    ("model.scaled_embedding", replace(DENSE, scaled_embedding=True)),
    ("model.attention_scale", replace(DENSE, attention_scale=256.0)),
    ("model.attention_softcap", replace(DENSE, attention_softcap=50.0)),
    ("model.attention_softcap", replace(DENSE, logit_softcap=30.0)),
    ("model.position_embedding", replace(DENSE, position_embedding="alibi")),
    ("model.sliding_window", replace(LATENT, sliding_window=SlidingWindow(128))),
    ("model.sliding_window.rotary_base", replace(DENSE, sliding_window=SlidingWindow(128, rotary_base=1e4))),
    ("model.mla.kv_lora_rank", replace(CHOSEN, mla=MlaShape(96, 64, 64, 32, 64))),
    ("model.sliding_window.chunked", replace(DENSE, sliding_window=SlidingWindow(128, 4, chunked=True))),
    ("model.no_rope_every", replace(DENSE, qk_l2_norm=True, no_rope_every=4)),
    ("model.no_rope_every", replace(DENSE, no_rope_every=3)),
    ("model.temperature_tuning", replace(DENSE, no_rope_every=4, temperature_tuning=True)),
    ("model.moe.router.weighted_inputs", replace(MIXTURE, moe=replace(ONE_EXPERT, topk=2, router=WEIGHING))),
    ("model.attention_dropout", replace(CHOSEN, attention_dropout=0.1)),
    ("model.mtp_num_layers", replace(CHOSEN, mtp_num_layers=1)),
    ("model.rope_scaling", replace(DENSE, rope_scaling=RopeScaling("llama3", 32.0, 8192))),
    ("model.rope_scaling", replace(DENSE, rope_scaling=RopeScaling("llama3", 8.0, 4096))),
    ("model.rope_scaling.factor", replace(DENSE, rope_scaling=RopeScaling("linear", 2.5))),
    ("model.rope_scaling", replace(LATENT, rope_scaling=RopeScaling("linear", 2.0))),
    ("model.rope_scaling", replace(LATENT, rope_scaling=replace(DEEPSEEK_YARN, beta_fast=16.0))),
    ("model.rope_scaling", replace(DENSE, rope_scaling=RopeScaling("yarn", 4.0, 4096, mscale=1.0))),
    ("model.rope_scaling", replace(DENSE, rope_scaling=RopeScaling("yarn", 4.0, 4096, attention_factor=1.2))),
    ("model.rotary_percent", replace(DENSE, rotary_percent=0.5, rope_scaling=RopeScaling("yarn", 4.0, 4096))),
    ("model.mtp_num_layers", replace(DENSE, mtp_num_layers=1, rope_scaling=RopeScaling("yarn", 4.0, 4096))),
    ("model.mtp_num_layers", replace(DENSE, mtp_num_layers=1, linear_attention=LinearAttention())),
    ("model.moe.router.normalize_topk", routed(Router("sigmoid", normalize_topk=False))),
    ("model.moe.router.expert_bias", routed(Router(expert_bias=True))),
    ("model.compressed_attention", POOLED),
    ("model.residual_streams", replace(DENSE, residual_streams=4)),
    ("model.activation_limit", replace(DENSE, activation_limit=10.0)),
    ("model.moe.router.hash_layers", routed(Router(hash_layers=2))),
    ("model.vision", replace(DENSE, vision=Vision(4, 256, 512, 4))),
]


@pytest.mark.parametrize(("key", "shape"), REFUSED)
def test_what_the_command_line_cannot_say_is_refused_by_name(key: str, shape: ModelShape) -> None:
    recipe = recipe_for(shape)
    with pytest.raises(UserError, match=rf" {key}: ".replace(".", r"\.")):
        MegatronLM().render(recipe, NODE)
    if sentences := MegatronLM().unrendered(recipe):  # the price is the same
        assert [sentence.partition(": ")[0] for sentence in sentences] == [key]
        assert MegatronLM().rules(recipe)
        return
    with pytest.raises(UserError, match=rf" {key}: ".replace(".", r"\.")):
        MegatronLM().rules(recipe)


def test_an_overlapped_shared_expert_excludes_other_ways() -> None:
    overlapped = Techniques(overlap_shared_expert=True)
    with pytest.raises(UserError, match="overlap_shared_expert: needs token_dispatcher: alltoall or flex"):
        MegatronLM().rules(recipe_for(MIXTURE, techniques=replace(overlapped, token_dispatcher="allgather")))
    with pytest.raises(UserError, match="overlap_shared_expert: excludes delay_weight_gradients"):
        MegatronLM().rules(recipe_for(MIXTURE, techniques=replace(overlapped, delay_weight_gradients=True)))
    again = replace(overlapped, recompute_modules=("shared_experts",))
    selective = replace(NODE, recompute=RECOMPUTE_SELECTIVE)
    assert refused_by(recipe_for(MIXTURE, techniques=again), selective) == {"overlapped-expert-kept"}


def test_what_differs_in_angles_alone_is_priced_and_not_rendered() -> None:
    """Kimi K2 is scaled with beta_fast 1, for which there is no argument."""
    recipe = recipe_of("deepseek-v3", "model=kimi-k2")
    assert MegatronLM().rules(recipe)
    (sentence,) = MegatronLM().unrendered(recipe)
    assert sentence.startswith("model.rope_scaling: latent attention is scaled by yarn")
    assert MegatronLM().unrendered(recipe_of("deepseek-v3")) == ()
    with pytest.raises(UserError, match=r"model\.rope_scaling: latent attention is scaled by yarn"):
        MegatronLM().render(recipe, Layout(data=1024, expert=8, zero_stage=1))


def test_deepseek_v4_is_priced_and_every_part_that_core_019_lacks_is_said() -> None:
    recipe = recipe_of("deepseek-v3", "model={base: deepseek-v4-flash, mtp_num_layers: 1}", "layout={}")
    missing = ("compressed_attention", "residual_streams", "moe.router.hash_layers", "activation_limit")
    sentences = MegatronLM().unrendered(recipe)
    assert [sentence.partition(": ")[0] for sentence in sentences] == [f"model.{name}" for name in missing]
    whole = Layout(data=1024, expert=64, zero_stage=1)
    assert not refused_by(recipe, whole)
    kept = replace(whole, recompute=RECOMPUTE_SELECTIVE)
    assert refused_by(recipe, kept) == {"pooled-keys-kept"}
    parts = replace(recipe, techniques=Techniques(recompute_modules=("mla_up_proj", "moe_act")))
    assert not refused_by(parts, kept)
    with pytest.raises(UserError, match=r"model\.compressed_attention: core 0\.19 has no attention to pooled keys"):
        MegatronLM().render(recipe, whole)


def test_kernels_of_attention_to_pooled_keys_want_hopper_and_16_bits() -> None:
    for overrides in (("cluster=a100-80gb-x8",), ("training.precision=fp16",)):
        with pytest.raises(UserError, match=r"model\.compressed_attention: the kernels of attention to pooled keys"):
            MegatronLM().rules(recipe_for(POOLED, *overrides))
    with pytest.raises(UserError, match=r"model\.attention_dropout: attention to pooled keys drops nothing out"):
        MegatronLM().rules(recipe_for(replace(POOLED, attention_dropout=0.1)))


def test_scores_by_the_root_of_softplus_may_be_balanced_by_a_bias() -> None:
    rooted = routed(Router("sqrtsoftplus", expert_bias=True))
    check_flags(
        recipe_for(rooted), NODE, "--moe-router-score-function sqrtsoftplus --moe-router-enable-expert-bias", ""
    )


def test_kernels_of_sparse_attention_want_hopper_and_16_bits() -> None:
    for overrides in (("cluster=a100-80gb-x8",), ("training.precision=fp16",)):
        with pytest.raises(UserError, match=r"model\.indexer: the kernels of sparse attention are for bf16"):
            MegatronLM().rules(recipe_for(CHOSEN, *overrides))
    narrow = ("training.fp8=tensorwise", "training.fp8_parameters=true")
    with pytest.raises(UserError, match=r"training\.fp8_parameters: sparse attention multiplies with its up-proj"):
        MegatronLM().rules(recipe_for(CHOSEN, *narrow))
    assert MegatronLM().rules(recipe_for(CHOSEN, "training.fp8=tensorwise"))
    few = recipe_for(replace(CHOSEN, num_attention_heads=96, num_query_groups=96))
    assert "sparse-attention-heads" in refused_by(few, NODE)
    assert "sparse-attention-heads" not in refused_by(few, replace(NODE, tensor=3))
    assert "sparse-attention-heads" not in refused_by(recipe_for(CHOSEN), NODE)


def test_the_clamped_activation_is_that_of_experts_alone() -> None:
    clamped = replace(DENSE, activation="clamped_swiglu", linear_bias=True)
    for moe in (None, replace(ALL_ROUTED, layer_pattern=(0, *(1,) * 7)), EXPERTS):
        with pytest.raises(UserError, match="clamped_swiglu is fused into experts with biases alone"):
            MegatronLM().rules(recipe_for(replace(clamped, moe=moe)))
    with pytest.raises(UserError, match="clamped_swiglu is fused into experts with biases alone"):
        MegatronLM().rules(recipe_for(replace(clamped, moe=ALL_ROUTED, linear_bias=False)))
    assert MegatronLM().rules(recipe_for(replace(clamped, moe=ALL_ROUTED)))


BIASED = replace(MIXTURE, linear_bias=True, moe=replace(EXPERTS, grouped_gemm=False, shared_expert_ffn_hidden_size=0))


def test_biased_experts_are_whole() -> None:
    split = Layout(data=4, expert=2, expert_tensor=2)
    assert "biased-experts" in refused_by(recipe_for(BIASED), split)
    assert "biased-experts" not in refused_by(recipe_for(DENSE), split)
