"""Megatron-LM arguments for the model (core 0.19): sizes, norms, attention, rotary scaling, mixture of experts.

Every setting of a published configuration has its argument here. What the command line cannot express is refused
(model_rules.py), because a model that silently trains as another one is worse than none.
"""

from __future__ import annotations

from llmlaunch.frameworks.argument import Argument, argument, number, optional
from llmlaunch.frameworks.megatron.facts import FP32_ROUTER_EXPERTS
from llmlaunch.frameworks.megatron.fixed_rows import fixed_row_arguments
from llmlaunch.frameworks.megatron.hybrid import mixer_arguments
from llmlaunch.models.shape import CLAMP, CLAMPED, SQUARED, Indexer, MlaShape, ModelShape, MoeShape, RopeScaling
from llmlaunch.recipe.types import Recipe
from llmlaunch.techniques import Techniques

__all__ = ["attention_arguments", "mixture_arguments", "model_arguments", "windowed"]


MEGATRON_NORM_EPSILON = 1e-5  # --norm-epsilon's default


def model_arguments(recipe: Recipe) -> tuple[Argument, ...]:
    """Return the arguments that describe the model, whatever the layout."""
    shape = recipe.model
    return (
        *_sizes(shape, recipe.workload.sequence_length),
        *attention_arguments(shape, recipe.workload.sequence_length),
        *_prediction(shape),
        *_switches(shape),
        *_activation(shape),
        *mixer_arguments(shape),
        *mixture_arguments(shape, recipe.techniques),
    )


def _sizes(shape: ModelShape, sequence_length: int) -> list[Argument]:
    longest = max(shape.max_position_embeddings, sequence_length)
    lengths = ("model.max_position_embeddings", "training.sequence_length")
    epsilon = repr(shape.norm_epsilon) if shape.norm_epsilon != MEGATRON_NORM_EPSILON else None
    return [
        argument("--num-layers", shape.num_layers, of="model.num_layers"),
        argument("--hidden-size", shape.hidden_size, of="model.hidden_size"),
        argument("--ffn-hidden-size", shape.ffn_hidden_size, of="model.ffn_hidden_size"),
        argument("--num-attention-heads", shape.num_attention_heads, of="model.num_attention_heads"),
        *optional("--kv-channels", shape.head_dim if shape.mla is None else None, of="model.head_dim"),
        argument("--seq-length", sequence_length, of="training.sequence_length"),
        argument("--max-position-embeddings", longest, of=lengths, why="the longer of the two"),
        argument("--normalization", shape.normalization, of="model.normalization"),
        *optional("--norm-epsilon", epsilon, of="model.norm_epsilon"),
        argument("--attention-dropout", number(shape.attention_dropout), of="model.attention_dropout"),
        argument("--hidden-dropout", number(shape.hidden_dropout), of="model.hidden_dropout"),
    ]


def _prediction(shape: ModelShape) -> list[Argument]:
    """Multi-token prediction; its loss counts a tenth, --mtp-loss-scaling-factor's default, as in the second part of
    DeepSeek-V3's training."""
    return [
        *optional("--mtp-num-layers", shape.mtp_num_layers or None, of="model.mtp_num_layers"),
        *optional("--mtp-use-repeated-layer", shape.mtp_repeated, of="model.mtp_repeated"),
    ]


def _switches(shape: ModelShape) -> list[Argument]:
    return [
        *optional("--disable-bias-linear", not shape.linear_bias, of="model.linear_bias"),
        *optional("--add-qkv-bias", shape.qkv_bias and not shape.linear_bias, of="model.qkv_bias"),
        *optional("--untie-embeddings-and-output-weights", not shape.tied_embeddings, of="model.tied_embeddings"),
        *optional("--qk-layernorm", shape.qk_layernorm and shape.mla is None, of="model.qk_layernorm"),
        *optional("--qk-l2-norm", shape.qk_l2_norm, of="model.qk_l2_norm"),
        *optional("--no-rope-freq", shape.no_rope_every or None, of="model.no_rope_every"),
        *optional("--apply-layernorm-1p", shape.zero_centered_norm, of="model.zero_centered_norm"),
        *([] if shape.mla is None else [_latent_norms(shape.mla)]),
    ]


def _activation(shape: ModelShape) -> list[Argument]:
    """GPT-OSS' activation is Megatron's quick GEGLU with an offset and a clamp."""
    of, unbiased_gelu = "model.activation", not shape.gated_mlp and not shape.linear_bias
    if shape.activation == CLAMPED:
        return [
            argument("--quick-geglu", of=of),
            argument("--glu-linear-offset", "1.0", of=of),
            argument("--activation-func-clamp-value", number(CLAMP), of=of),
        ]
    return [
        *optional("--swiglu", shape.gated_mlp, of="model.gated_mlp"),
        *optional("--squared-relu", shape.activation == SQUARED, of=of),
        *optional("--no-bias-gelu-fusion", unbiased_gelu, of="model.linear_bias", why="the fused kernel adds a bias"),
    ]


def _latent_norms(mla: MlaShape) -> Argument:
    """DeepSeek's latents have norms, always. Core 0.19 gives queries that have no latent one too, after that of the
    layer (megatron/core/transformer/mla_qk_norm_config.py): hidden_size parameters a layer more."""
    more = "; core 0.19 norms the queries' input once more, as they have no latent" if mla.q_lora_rank is None else ""
    return argument("--qk-layernorm", of="model.mla", why=f"the latents' norms{more}")


SCALING = "model.rope_scaling"


def attention_arguments(shape: ModelShape, sequence_length: int) -> tuple[Argument, ...]:
    """Heads, latents, positions and windows."""
    heads = _grouped(shape) if shape.mla is None else _latent(shape.mla)
    sinks = [argument("--softmax-type", "learnable", of="model.attention_sinks")] if shape.attention_sinks else []
    indexer = [] if shape.indexer is None else _indexer(shape, shape.indexer)
    gate = optional("--attention-output-gate", shape.attention_gate, of="model.attention_gate")
    linear = [*gate, *_delta_nets(shape)]
    return (*_positions(shape), *heads, *indexer, *_window(shape, sequence_length), *sinks, *linear)


LINEAR = "model.linear_attention"


def _delta_nets(shape: ModelShape) -> list[Argument]:
    """Which layers have a gated delta net, and its heads. A number N means that every N-th layer has attention."""
    linear = shape.linear_attention
    if linear is None:
        return []
    mixed = 0 < linear.full_every <= shape.num_layers
    every = linear.full_every if mixed else f"[{','.join(map(str, shape.linear_pattern))}]"
    return [
        argument("--experimental-attention-variant", "gated_delta_net", of=LINEAR),
        argument("--linear-attention-freq", every, of=f"{LINEAR}.full_every"),
        argument("--linear-num-key-heads", linear.num_key_heads, of=f"{LINEAR}.num_key_heads"),
        argument("--linear-num-value-heads", linear.num_value_heads, of=f"{LINEAR}.num_value_heads"),
        argument("--linear-key-head-dim", linear.key_head_dim, of=f"{LINEAR}.key_head_dim"),
        argument("--linear-value-head-dim", linear.value_head_dim, of=f"{LINEAR}.value_head_dim"),
        argument("--linear-conv-kernel-dim", linear.conv_kernel, of=f"{LINEAR}.conv_kernel"),
    ]


def windowed(shape: ModelShape, sequence_length: int) -> bool:
    """Some layers see less than the whole sequence."""
    return shape.sliding_window is not None and shape.sliding_window.tokens < sequence_length


def _positions(shape: ModelShape) -> list[Argument]:
    kind, scaling = shape.position_embedding, shape.rope_scaling
    if kind != "rope":
        return [argument("--position-embedding-type", kind, of="model.position_embedding")]
    if shape.mla is None and scaling is not None and scaling.kind == "yarn":
        named = argument("--position-embedding-type", "yarn", of=SCALING)
    else:
        named = argument("--position-embedding-type", kind, of="model.position_embedding")
    base = argument("--rotary-base", number(shape.rotary_base), of="model.rotary_base")
    if shape.mla is not None:
        return [named, base, *_latent_rotation(scaling)]
    share = number(shape.rotary_percent) if shape.rotary_percent != 1.0 else None
    return [named, base, *optional("--rotary-percent", share, of="model.rotary_percent"), *_scaled(scaling)]


def _scaled(scaling: RopeScaling | None) -> list[Argument]:
    if scaling is None:
        return []
    if scaling.kind == "linear":
        return [argument("--rotary-seq-len-interpolation-factor", number(scaling.factor), of=f"{SCALING}.factor")]
    if scaling.kind == "llama3":
        # the model is built with its default, 8, whatever the factor says; others are refused (model_rules.py)
        factor = argument("--rope-scaling-factor", number(scaling.factor), of=f"{SCALING}.factor")
        return [argument("--use-rope-scaling", of=f"{SCALING}.kind"), factor]
    before, flag = "original_max_position_embeddings", "--yarn-original-max-position-embeddings"
    return [
        *_yarn(scaling),
        *optional(flag, scaling.original_max_position_embeddings, of=f"{SCALING}.{before}"),
        argument("--yarn-beta-fast", number(scaling.beta_fast), of=f"{SCALING}.beta_fast"),
        argument("--yarn-beta-slow", number(scaling.beta_slow), of=f"{SCALING}.beta_slow"),
        *optional("--no-yarn-correction-range-round-to-int", not scaling.truncate, of=f"{SCALING}.truncate"),
    ]


def _yarn(scaling: RopeScaling) -> list[Argument]:
    """Where both weights are left out, Megatron's defaults (1 and 0) scale as transformers does: 0.1 ln(factor) + 1."""
    arguments = [argument("--rotary-scaling-factor", number(scaling.factor), of=f"{SCALING}.factor")]
    if scaling.mscale is not None and scaling.mscale_all_dim is not None:
        arguments += [argument("--mscale", number(scaling.mscale), of=f"{SCALING}.mscale")]
        arguments += [argument("--mscale-all-dim", number(scaling.mscale_all_dim), of=f"{SCALING}.mscale_all_dim")]
    return arguments


def _latent_rotation(scaling: RopeScaling | None) -> list[Argument]:
    if scaling is None:
        plain = "latent attention's default is yarn"
        fused = "its fused kernel is for yarn alone"
        return [argument("--rope-type", "rope", why=plain), argument("--no-rope-fusion", why=fused)]
    return [argument("--rope-type", "yarn", of=f"{SCALING}.kind"), *_yarn(scaling)]


def _grouped(shape: ModelShape) -> list[Argument]:
    if shape.num_query_groups == shape.num_attention_heads:
        return []
    return [
        argument("--group-query-attention", of="model.num_query_groups"),
        argument("--num-query-groups", shape.num_query_groups, of="model.num_query_groups"),
    ]


def _latent(mla: MlaShape) -> list[Argument]:
    return [
        argument("--multi-latent-attention", of="model.mla"),
        *optional("--q-lora-rank", mla.q_lora_rank, of="model.mla.q_lora_rank"),
        argument("--kv-lora-rank", mla.kv_lora_rank, of="model.mla.kv_lora_rank"),
        argument("--qk-head-dim", mla.qk_head_dim, of="model.mla.qk_head_dim"),
        argument("--qk-pos-emb-head-dim", mla.qk_pos_emb_head_dim, of="model.mla.qk_pos_emb_head_dim"),
        argument("--v-head-dim", mla.v_head_dim, of="model.mla.v_head_dim"),
    ]


def _indexer(shape: ModelShape, indexer: Indexer) -> list[Argument]:
    """DeepSeek's sparse attention, with NVIDIA's kernels: without any, core 0.19 keeps scores of all keys."""
    of, plainly = "model.indexer", "no fused rotation goes before sparse attention"
    orthogonal = "it is orthogonal and changes no score, and would want a package of its own"
    return [
        argument("--experimental-attention-variant", "dsa", of=of),
        argument("--dsa-indexer-n-heads", indexer.heads, of=f"{of}.heads"),
        argument("--dsa-indexer-head-dim", indexer.head_dim, of=f"{of}.head_dim"),
        argument("--dsa-indexer-topk", indexer.topk, of=f"{of}.topk"),
        *optional("--dsa-indexer-rope-interleaved", indexer.interleaved, of=f"{of}.interleaved"),
        argument("--dsa-indexer-k-norm-epsilon", "1e-06", why="its norm has an epsilon of its own"),
        argument("--no-dsa-indexer-rotate-activation", why=orthogonal),
        argument("--dsa-indexer-loss-coeff", number(indexer.loss_coeff), of=f"{of}.loss_coeff"),
        argument("--dsa-indexer-use-sparse-loss", why="over the chosen keys, as attention is"),
        argument("--dsa-kernel-backend", "cudnn", why="the kernels of FlashMLA and cuDNN"),
        *optional("--no-rope-fusion", shape.rope_scaling is not None, of=of, why=plainly),
    ]


def _window(shape: ModelShape, sequence_length: int) -> list[Argument]:
    """A token sees itself and `tokens` - 1 before it; Megatron counts those before and after it."""
    window = shape.sliding_window
    if window is None or not windowed(shape, sequence_length):
        return []
    return [
        argument("--window-size", f"{window.tokens - 1},0", of="model.sliding_window.tokens"),
        *optional("--window-attn-skip-freq", window.full_every or None, of="model.sliding_window.full_every"),
    ]


ROUTER = "model.moe.router"


def mixture_arguments(shape: ModelShape, techniques: Techniques) -> tuple[Argument, ...]:
    """Empty for a dense model."""
    if shape.moe is None:
        return ()
    moe = shape.moe
    return (
        argument("--num-experts", moe.num_experts, of="model.moe.num_experts"),
        argument("--moe-router-topk", moe.topk, of="model.moe.topk"),
        argument("--moe-ffn-hidden-size", moe.ffn_hidden_size, of="model.moe.ffn_hidden_size"),
        *_dispatcher(moe, techniques),
        *_router(moe),
        *_balancing(moe),
        *_shared(moe, techniques),
        *_some(moe, alone=shape.mamba is not None),
        *optional("--moe-latent-size", moe.latent_size, of="model.moe.latent_size"),
        *optional("--use-fused-weighted-squared-relu", shape.activation == SQUARED, of="model.activation", why=WEIGHED),
        *optional("--no-bias-dropout-fusion", _biased_in_one_kernel(shape), of="model.linear_bias", why=BIASED),
    )


WEIGHED = "one kernel squares and weighs what experts put out"
BIASED = "experts in one kernel add their biases themselves"


def _biased_in_one_kernel(shape: ModelShape) -> bool:
    return shape.linear_bias and shape.moe is not None and shape.moe.grouped_gemm is not False


def _dispatcher(moe: MoeShape, techniques: Techniques) -> list[Argument]:
    kind = techniques.token_dispatcher or "alltoall"
    flex_backend = techniques.flex_backend or "deepep" if kind == "flex" else None
    who = "the flex dispatcher sends" if kind == "flex" else f"{FP32_ROUTER_EXPERTS} experts and more want"
    scores = "fp32" if kind == "flex" or moe.num_experts >= FP32_ROUTER_EXPERTS else None
    return [
        argument("--moe-token-dispatcher-type", kind, of="layout.token_dispatcher"),
        *optional("--moe-flex-dispatcher-backend", flex_backend, of="layout.flex_backend"),
        *optional("--moe-router-dtype", scores, why=f"{who} fp32 scores"),
        *optional("--moe-grouped-gemm", moe.grouped_gemm is not False, why="all experts of a rank in one kernel"),
        *fixed_row_arguments(techniques),
    ]


def _router(moe: MoeShape) -> list[Argument]:
    """Softmax over the chosen experts' logits is softmax over all, made to sum to 1 again: Megatron's default. Sigmoid
    scores always are. Groups are chosen by the sum of their best topk / group_topk scores
    (megatron/core/transformer/moe/moe_utils.py group_limited_topk, core 0.19)."""
    router, arguments = moe.router, []
    if router.score_function != "softmax":
        arguments += [argument("--moe-router-score-function", router.score_function, of=f"{ROUTER}.score_function")]
    elif not router.normalize_topk:
        arguments += [argument("--moe-router-pre-softmax", of=f"{ROUTER}.normalize_topk")]
    elif moe.topk == 1:
        alone = "one score that sums to 1 would teach the router nothing; Megatron refuses it"
        arguments += [argument("--moe-router-pre-softmax", of="model.moe.topk", why=alone)]
    scaling = number(router.scaling_factor) if router.scaling_factor != 1.0 else None
    return [
        *arguments,
        *optional("--moe-router-num-groups", router.groups, of=f"{ROUTER}.groups"),
        *optional("--moe-router-group-topk", router.group_topk, of=f"{ROUTER}.group_topk"),
        *optional("--moe-router-topk-scaling-factor", scaling, of=f"{ROUTER}.scaling_factor"),
        *optional("--moe-apply-probs-on-input", router.weighted_inputs, of=f"{ROUTER}.weighted_inputs"),
        *optional("--moe-router-enable-expert-bias", router.expert_bias, of=f"{ROUTER}.expert_bias"),
    ]


def _balancing(moe: MoeShape) -> list[Argument]:
    coefficient = None if moe.router.balancing == "none" else number(moe.router.aux_loss_coeff)
    return [
        argument("--moe-router-load-balancing-type", moe.router.balancing, of=f"{ROUTER}.balancing"),
        *optional("--moe-aux-loss-coeff", coefficient, of=f"{ROUTER}.aux_loss_coeff"),
    ]


def _shared(moe: MoeShape, techniques: Techniques) -> list[Argument]:
    width = moe.shared_expert_ffn_hidden_size
    if not width:
        return []
    key = "model.moe.shared_expert_ffn_hidden_size"
    return [
        argument("--moe-shared-expert-intermediate-size", width, of=key),
        *optional("--moe-shared-expert-gate", moe.shared_expert_gate, of="model.moe.shared_expert_gate"),
        *optional("--moe-shared-expert-overlap", techniques.overlap_shared_expert, of="layout.overlap_shared_expert"),
    ]


def _some(moe: MoeShape, alone: bool) -> list[Argument]:
    """Which layers are mixtures, and how many tokens an expert takes. Where a mixture is `alone` in its layer, the
    pattern of all layers says it."""
    some = len(set(moe.layer_pattern)) > 1 and not alone
    pattern = f"[{','.join(map(str, moe.layer_pattern))}]" if some else None
    capacity = None if moe.capacity_factor is None else number(moe.capacity_factor)
    return [
        *optional("--moe-layer-freq", pattern, of="model.moe.layer_pattern"),
        *optional("--moe-expert-capacity-factor", capacity, of="model.moe.capacity_factor"),
    ]
