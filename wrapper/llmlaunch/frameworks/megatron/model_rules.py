"""Which models the command line of Megatron-LM (core 0.19) can describe, as data.

Whatever it cannot describe is refused by name. If it were left out, a different model would be trained.
"""

from __future__ import annotations

import numpy as np

from llmlaunch.columns import BoolColumn
from llmlaunch.frameworks.base import Requirement, implies
from llmlaunch.layout import Rule, Situation
from llmlaunch.models.shape import CLAMPED, SQUARED, ModelShape, natural_activation
from llmlaunch.recipe.types import Recipe

CONFIG = "megatron/core/transformer/transformer_config.py, core 0.19"
BUILDER = "megatron/training/argument_utils.py core_transformer_config_from_args, core 0.19"
PARSER = "megatron/training/arguments.py, core 0.19"
LATENT = "megatron/core/transformer/transformer_config.py MLATransformerConfig, core 0.19"
RING = "transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py attn_forward_func_with_cp, 2.20"
ELSEWHERE = "backend: deepspeed trains it"

SPARSE = "megatron/core/transformer/experimental_attention_variant/dsa_cudnn_kernels.py, core 0.19"
SPARSE_LATENT, SPARSE_HEADS, HOPPER = 512, 128, 9.0

LLAMA3_SCALING = (8.0, 8192, 1.0, 4.0)  # factor, positions before, low and high frequency factor
LATENT_SCALING = (4096, 32.0, 1.0, True)  # positions before, beta_fast, beta_slow, truncate


def scaling_of(shape: ModelShape, kind: str) -> bool:
    return shape.rope_scaling is not None and shape.rope_scaling.kind == kind


def other_llama3_scaling(shape: ModelShape) -> bool:
    at = shape.rope_scaling
    if at is None or at.kind != "llama3":
        return False
    before = at.original_max_position_embeddings
    return (at.factor, before, at.low_frequency_factor, at.high_frequency_factor) != LLAMA3_SCALING


def other_latent_scaling(recipe: Recipe) -> bool:
    """Whether the positions of latent attention are scaled in a way that no argument can express: the flags of that
    name belong to ordinary attention. Megatron-Bridge fills MLATransformerConfig itself, which has everything but
    `truncate`."""
    at = recipe.model.rope_scaling
    if at is None or recipe.model.mla is None:
        return False
    if at.kind != "yarn" or recipe.backend.name == "megatron-bridge":
        return at.kind in ("linear", "llama3") or not at.truncate
    before = at.original_max_position_embeddings
    return (before, at.beta_fast, at.beta_slow, at.truncate) != LATENT_SCALING


def broken_factor(shape: ModelShape) -> bool:
    at = shape.rope_scaling
    return at is not None and at.kind == "linear" and not float(at.factor).is_integer()


def half_a_weight(shape: ModelShape) -> bool:
    at = shape.rope_scaling
    return at is not None and at.kind == "yarn" and ((at.mscale is None) != (at.mscale_all_dim is None))


def before_hopper(recipe: Recipe) -> bool:
    capability = recipe.cluster.accelerator.compute_capability
    return capability is not None and float(capability) < HOPPER


def windowed(shape: ModelShape, sequence_length: int) -> bool:
    """Return whether some layers see less than the whole sequence."""
    return shape.sliding_window is not None and shape.sliding_window.tokens < sequence_length


def asks_for_mixture(recipe: Recipe) -> bool:
    """Return whether the model has mixture layers, or the recipe asks for a technique for them."""
    asked = recipe.techniques
    named = (asked.token_dispatcher, asked.flex_backend, asked.expert_rank_capacity_factor, asked.paged_stash)
    return recipe.model.moe is not None or asked.overlap_shared_expert or any(value is not None for value in named)


def _other_activation(shape: ModelShape) -> str:
    return CLAMPED if shape.gated_mlp else SQUARED


MODEL_REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        "activation",
        "model.activation",
        "an MLP is SwiGLU (gated), GELU or squared ReLU (not gated) here: no argument makes a gated GELU, as Gemma's; "
        + ELSEWHERE,
        BUILDER,
        lambda r: r.model.activation not in (natural_activation(r.model.gated_mlp), _other_activation(r.model)),
    ),
    Requirement(
        "clamped-experts",
        "model.activation",
        "clamped_swiglu is fused into experts with biases alone: every layer must be a mixture without shared expert, "
        "and linear_bias true",
        "megatron/core/transformer/mlp.py MLP.forward, core 0.19",
        lambda r: (
            r.model.activation == CLAMPED
            and (
                r.model.moe is None
                or not r.model.linear_bias
                or not all(r.model.moe.layer_pattern)
                or r.model.moe.shared_expert_ffn_hidden_size > 0
            )
        ),
    ),
    Requirement(
        "no-post-norms",
        "model.post_norms",
        "a layer has two norms here, not four as Gemma 2; " + ELSEWHERE,
        "megatron/core/models/gpt/gpt_layer_specs.py, core 0.19",
        lambda r: r.model.post_norms,
    ),
    Requirement(
        "norms-before",
        "model.norms_after_alone",
        "a layer's norms stand before attention and MLP here, not behind them as OLMo's; " + ELSEWHERE,
        "megatron/core/models/gpt/gpt_layer_specs.py, core 0.19",
        lambda r: r.model.norms_after_alone,
        priced=True,
    ),
    Requirement(
        "no-short-convolution",
        "model.short_convolution",
        "no layer here is a gated short convolution, as LFM2's; " + ELSEWHERE,
        "megatron/core/ssm and megatron/core/models/hybrid, core 0.19",
        lambda r: r.model.short_convolution is not None,
    ),
    Requirement(
        "no-multipliers",
        "model.multipliers",
        "no argument multiplies what blocks read and add, keys, gates or parts of a mixer by constants, as Granite and "
        "Falcon-H1 do (--use-mup: embedding and logits alone); " + ELSEWHERE,
        "megatron/core/transformer/transformer_config.py use_mup, core 0.19",
        lambda r: r.model.multipliers is not None,
    ),
    Requirement(
        "no-scaled-embedding",
        "model.scaled_embedding",
        "no argument multiplies the embedding by sqrt(hidden_size), as Gemma's; " + ELSEWHERE,
        "megatron/core/models/common/embeddings/language_model_embedding.py, core 0.19",
        lambda r: r.model.scaled_embedding,
    ),
    Requirement(
        "no-attention-scale",
        "model.attention_scale",
        "softmax_scale of the configuration has no argument; " + ELSEWHERE,
        PARSER,
        lambda r: r.model.attention_scale is not None,
    ),
    Requirement(
        "no-softcap",
        "model.attention_softcap",
        "scores and logits are not capped here; " + ELSEWHERE,
        CONFIG,
        lambda r: r.model.attention_softcap is not None or r.model.logit_softcap is not None,
    ),
    Requirement(
        "yarn-turns-whole-heads",
        "model.rotary_percent",
        "positions scaled by yarn turn the whole head here, whatever --rotary-percent says; " + ELSEWHERE,
        "megatron/core/models/common/embeddings/yarn_rotary_pos_embedding.py, core 0.19",
        lambda r: (
            r.model.rotary_percent != 1.0 and scaling_of(r.model, "yarn") and r.model.compressed_attention is None
        ),
        priced=True,
    ),
    Requirement(
        "norms-of-each-head",
        "model.qk_norm_of_all_heads",
        "--qk-layernorm norms each head by itself; " + ELSEWHERE,
        "megatron/core/transformer/attention.py SelfAttention, core 0.19",
        lambda r: r.model.qk_norm_of_all_heads,
        priced=True,
    ),
    Requirement(
        "no-alibi",
        "model.position_embedding",
        "alibi is none of --position-embedding-type; write rope, learned_absolute or none",
        PARSER,
        lambda r: r.model.position_embedding == "alibi",
    ),
    Requirement(
        "window-without-latents",
        "model.sliding_window",
        "latent attention sees the whole sequence; remove sliding_window or mla",
        "megatron/core/transformer/attention.py, core 0.19",
        lambda r: r.model.mla is not None and windowed(r.model, r.workload.sequence_length),
    ),
    Requirement(
        "one-rotary-base",
        "model.sliding_window.rotary_base",
        "all layers share --rotary-base; " + ELSEWHERE,
        "megatron/core/models/gpt/gpt_model.py, core 0.19",
        lambda r: r.model.sliding_window is not None and r.model.sliding_window.rotary_base is not None,
    ),
    Requirement(
        "llama3-scaling",
        "model.rope_scaling",
        "pretrain_gpt.py passes --use-rope-scaling on and forgets --rope-scaling-factor: the model is built with "
        "factor 8, 8192 positions before, frequency factors 1 and 4, those of Llama 3.1; others train as those; "
        + ELSEWHERE,
        "megatron/training/argument_utils.py gpt_config_from_args, core 0.19; gpt_builders.py of the checkout",
        lambda r: other_llama3_scaling(r.model),
        priced=True,  # angles are all that differs
    ),
    Requirement(
        "linear-scaling-is-whole",
        "model.rope_scaling.factor",
        "--rotary-seq-len-interpolation-factor takes a whole number; " + ELSEWHERE,
        PARSER,
        lambda r: broken_factor(r.model),
    ),
    Requirement(
        "latent-scaling",
        "model.rope_scaling",
        "latent attention is scaled by yarn, from 4096 positions with beta_fast 32 and beta_slow 1: those have no "
        "arguments; backend: megatron-bridge sets them all, but for truncate: false, and backend: deepspeed trains the "
        "others",
        LATENT,
        other_latent_scaling,
        priced=True,  # angles are all that differs
    ),
    Requirement(
        "yarn-weights",
        "model.rope_scaling",
        "yarn's scores are scaled by mscale and mscale_all_dim together, or by neither; give both or none, and no "
        "attention_factor",
        "megatron/core/models/common/embeddings/yarn_rotary_pos_embedding.py, core 0.19",
        lambda r: (
            half_a_weight(r.model)
            or (r.model.rope_scaling is not None and r.model.rope_scaling.attention_factor is not None)
        ),
    ),
    Requirement(
        "prediction-without-yarn",
        "model.mtp_num_layers",
        "multi-token prediction needs --position-embedding-type rope or none; remove mtp_num_layers or rope_scaling",
        "megatron/training/arguments.py validate_args, core 0.19",
        lambda r: (
            bool(r.model.mtp_num_layers)
            and (
                r.model.position_embedding not in ("rope", "none")
                or (r.model.mla is None and r.model.compressed_attention is None and scaling_of(r.model, "yarn"))
            )
        ),
    ),
    Requirement(
        "sparse-attention-device",
        "model.indexer",
        "the kernels of sparse attention are for bf16, and for compute capability 9.0 (Hopper) or more",
        SPARSE,
        lambda r: r.model.indexer is not None and (r.workload.precision != "bf16" or before_hopper(r)),
    ),
    Requirement(
        "sparse-attention-latents",
        "model.mla.kv_lora_rank",
        f"the kernels of sparse attention take latents {SPARSE_LATENT} wide; others leave scores of all keys in memory",
        SPARSE,
        lambda r: r.model.indexer is not None and r.model.mla is not None and r.model.mla.kv_lora_rank != SPARSE_LATENT,
    ),
    Requirement(
        "sparse-attention-dropout",
        "model.attention_dropout",
        "sparse attention drops nothing out; set attention_dropout to 0",
        "megatron/core/transformer/experimental_attention_variant/dsa.py DSAttention, core 0.19",
        lambda r: r.model.indexer is not None and r.model.attention_dropout > 0,
    ),
    Requirement(
        "sparse-attention-prediction",
        "model.mtp_num_layers",
        "multi-token prediction has no layer with sparse attention; remove mtp_num_layers or indexer",
        "megatron/core/models/gpt/gpt_layer_specs.py get_gpt_decoder_layer_specs, core 0.19",
        lambda r: r.model.indexer is not None and bool(r.model.mtp_num_layers),
    ),
    Requirement(
        "sparse-attention-weights",
        "training.fp8_parameters",
        "sparse attention multiplies with its up-projections as they lie in memory, in 16 bits, and makes none again "
        "in narrower formats; remove fp8_parameters, and mla_up_proj from recompute_modules beside fp8 or fp4",
        "megatron/core/transformer/experimental_attention_variant/absorbed_mla.py AbsorbedMLASelfAttention, core 0.19",
        lambda r: (
            r.model.indexer is not None
            and r.training.numbers.narrow is not None
            and (r.training.numbers.narrow_parameters or "mla_up_proj" in r.techniques.recompute_modules)
        ),
    ),
    Requirement(
        "attention-in-one-piece",
        "model.sliding_window.chunked",
        "no argument cuts attention into pieces, as Llama 4's; sequences no longer than a piece need none",
        CONFIG,
        lambda r: (
            windowed(r.model, r.workload.sequence_length)
            and r.model.sliding_window is not None
            and r.model.sliding_window.chunked
        ),
        priced=True,
    ),
    Requirement(
        "norms-of-turned-heads",
        "model.no_rope_every",
        "--qk-l2-norm norms queries and keys of layers without rotary positions, too; write 0, or qk_l2_norm: false",
        "megatron/core/transformer/attention.py SelfAttention, core 0.19",
        lambda r: r.model.qk_l2_norm and r.model.no_rope_every > 0,
        priced=True,
    ),
    Requirement(
        "positions-left-out-evenly",
        "model.no_rope_every",
        "--no-rope-freq must divide the layers; write a divisor of num_layers, or 0",
        CONFIG,
        lambda r: r.model.no_rope_every > 0 and r.model.num_layers % r.model.no_rope_every > 0,
        priced=True,
    ),
    Requirement(
        "even-temperature",
        "model.temperature_tuning",
        "no argument makes queries grow with their position; it changes nothing before position 8191: take shorter "
        "sequences, and false",
        CONFIG,
        lambda r: r.model.temperature_tuning,
        priced=True,
    ),
    Requirement(
        "prediction-beside-delta-nets",
        "model.mtp_num_layers",
        "no specification of the layers for multi-token prediction is made where others have gated delta nets; remove "
        "mtp_num_layers",
        "megatron/core/models/gpt/gpt_layer_specs.py get_gpt_decoder_layer_specs, core 0.19",
        lambda r: bool(r.model.mtp_num_layers) and r.model.linear_attention is not None,
        priced=True,
    ),
)


def heads_fill_kernels(s: Situation) -> BoolColumn:
    heads = np.maximum(s.shape.num_attention_heads // s.layouts.tensor, 1)
    return implies(s.shape.indexer is not None, (SPARSE_HEADS % heads == 0) | (heads % SPARSE_HEADS == 0))


def delta_heads_divide(s: Situation) -> BoolColumn:
    linear, ranks = s.shape.linear_attention, s.layouts.tensor * s.layouts.context
    return implies(linear is not None, np.equal((1 if linear is None else linear.num_key_heads) % ranks, 0))


MODEL_RULES: tuple[Rule, ...] = (
    Rule(
        "delta-heads",
        "num_key_heads of linear_attention must be a multiple of tensor x context parallel size",
        CONFIG,
        delta_heads_divide,
    ),
    Rule(
        "window-without-context",
        "a sliding window needs --context-parallel-size 1: rings of keys and values pass no windows",
        RING,
        lambda s: implies(windowed(s.shape, s.workload.sequence_length), np.equal(s.layouts.context, 1)),
    ),
    Rule(
        "sinks-without-context",
        "attention sinks need --context-parallel-size 1 or context_comm: a2a",
        "transformer_engine/pytorch/attention/dot_product_attention/utils.py get_attention_backend, 2.20",
        lambda s: implies(
            s.shape.attention_sinks and s.techniques.context_comm != "a2a", np.equal(s.layouts.context, 1)
        ),
        of_techniques=True,
    ),
    Rule(
        "sparse-attention-heads",
        f"attention heads / tensor parallel size must divide {SPARSE_HEADS}, or be a multiple of it: the kernels of "
        "sparse attention take no others",
        SPARSE,
        heads_fill_kernels,
    ),
    Rule(
        "sparse-attention-without-context",
        "sparse attention needs --context-parallel-size 1: its fused kernels leave sequences of several ranks to one "
        "that keeps scores of all keys",
        SPARSE,
        lambda s: implies(s.shape.indexer is not None, np.equal(s.layouts.context, 1)),
    ),
)
