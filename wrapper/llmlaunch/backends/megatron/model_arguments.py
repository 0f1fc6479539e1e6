"""Megatron-LM arguments for the model (core 0.19): sizes, norms, attention, rotary scaling, mixture of experts.

Every setting of a published configuration has its argument here. What the command line cannot express is refused
(model_rules.py), because a model that silently trains as another one is worse than none.
"""

from __future__ import annotations

from llmlaunch.backends.argument import Argument, argument, number
from llmlaunch.backends.megatron.facts import FP32_ROUTER_EXPERTS
from llmlaunch.models.shape import MlaShape, ModelShape, MoeShape, RopeScaling
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
        *mixture_arguments(shape, recipe.techniques),
    )


def _sizes(shape: ModelShape, sequence_length: int) -> list[Argument]:
    longest = max(shape.max_position_embeddings, sequence_length)
    lengths = ("model.max_position_embeddings", "training.sequence_length")
    arguments = [
        argument("--num-layers", shape.num_layers, of="model.num_layers"),
        argument("--hidden-size", shape.hidden_size, of="model.hidden_size"),
        argument("--ffn-hidden-size", shape.ffn_hidden_size, of="model.ffn_hidden_size"),
        argument("--num-attention-heads", shape.num_attention_heads, of="model.num_attention_heads"),
    ]
    if shape.mla is None:
        arguments += [argument("--kv-channels", shape.head_dim, of="model.head_dim")]
    arguments += [
        argument("--seq-length", sequence_length, of="training.sequence_length"),
        argument("--max-position-embeddings", longest, of=lengths, why="the longer of the two"),
        argument("--normalization", shape.normalization, of="model.normalization"),
    ]
    if shape.norm_epsilon != MEGATRON_NORM_EPSILON:
        arguments += [argument("--norm-epsilon", repr(shape.norm_epsilon), of="model.norm_epsilon")]
    return [
        *arguments,
        argument("--attention-dropout", number(shape.attention_dropout), of="model.attention_dropout"),
        argument("--hidden-dropout", number(shape.hidden_dropout), of="model.hidden_dropout"),
    ]


def _prediction(shape: ModelShape) -> list[Argument]:
    """Multi-token prediction; its loss counts a tenth, --mtp-loss-scaling-factor's default, as in the second part of
    DeepSeek-V3's training."""
    if not shape.mtp_num_layers:
        return []
    return [argument("--mtp-num-layers", shape.mtp_num_layers, of="model.mtp_num_layers")]


def _switches(shape: ModelShape) -> list[Argument]:
    switches = {
        "--swiglu": (shape.gated_mlp, "model.gated_mlp"),
        "--disable-bias-linear": (not shape.linear_bias, "model.linear_bias"),
        "--add-qkv-bias": (shape.qkv_bias and not shape.linear_bias, "model.qkv_bias"),
        "--untie-embeddings-and-output-weights": (not shape.tied_embeddings, "model.tied_embeddings"),
        "--qk-layernorm": (shape.qk_layernorm and shape.mla is None, "model.qk_layernorm"),
        "--apply-layernorm-1p": (shape.zero_centered_norm, "model.zero_centered_norm"),
    }
    arguments = [argument(flag, of=key) for flag, (on, key) in switches.items() if on]
    if shape.mla is not None:
        arguments += [_latent_norms(shape.mla)]
    if not shape.gated_mlp and not shape.linear_bias:
        arguments += [argument("--no-bias-gelu-fusion", of="model.linear_bias", why="the fused kernel adds a bias")]
    return arguments


def _latent_norms(mla: MlaShape) -> Argument:
    """DeepSeek's latents have norms, always. Core 0.19 gives queries that have no latent one too, after that of the
    layer (megatron/core/transformer/mla_qk_norm_config.py): hidden_size parameters a layer more."""
    more = "; core 0.19 norms the queries' input once more, as they have no latent" if mla.q_lora_rank is None else ""
    return argument("--qk-layernorm", of="model.mla", why=f"the latents' norms{more}")


SCALING = "model.rope_scaling"


def attention_arguments(shape: ModelShape, sequence_length: int) -> tuple[Argument, ...]:
    """Heads, latents, positions and windows."""
    heads = _grouped(shape) if shape.mla is None else _latent(shape.mla)
    return (*_positions(shape), *heads, *_window(shape, sequence_length))


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
    return [named, base, *_scaled(scaling)]


def _scaled(scaling: RopeScaling | None) -> list[Argument]:
    if scaling is None:
        return []
    if scaling.kind == "linear":
        return [argument("--rotary-seq-len-interpolation-factor", number(scaling.factor), of=f"{SCALING}.factor")]
    if scaling.kind == "llama3":
        # the model is built with its default, 8, whatever the factor says; others are refused (model_rules.py)
        factor = argument("--rope-scaling-factor", number(scaling.factor), of=f"{SCALING}.factor")
        return [argument("--use-rope-scaling", of=f"{SCALING}.kind"), factor]
    before = f"{SCALING}.original_max_position_embeddings"
    arguments = _yarn(scaling)
    if scaling.original_max_position_embeddings is not None:
        flag = "--yarn-original-max-position-embeddings"
        arguments += [argument(flag, scaling.original_max_position_embeddings, of=before)]
    arguments += [argument("--yarn-beta-fast", number(scaling.beta_fast), of=f"{SCALING}.beta_fast")]
    arguments += [argument("--yarn-beta-slow", number(scaling.beta_slow), of=f"{SCALING}.beta_slow")]
    if not scaling.truncate:
        arguments += [argument("--no-yarn-correction-range-round-to-int", of=f"{SCALING}.truncate")]
    return arguments


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
    arguments = [argument("--multi-latent-attention", of="model.mla")]
    if mla.q_lora_rank is not None:
        arguments += [argument("--q-lora-rank", mla.q_lora_rank, of="model.mla.q_lora_rank")]
    return [
        *arguments,
        argument("--kv-lora-rank", mla.kv_lora_rank, of="model.mla.kv_lora_rank"),
        argument("--qk-head-dim", mla.qk_head_dim, of="model.mla.qk_head_dim"),
        argument("--qk-pos-emb-head-dim", mla.qk_pos_emb_head_dim, of="model.mla.qk_pos_emb_head_dim"),
        argument("--v-head-dim", mla.v_head_dim, of="model.mla.v_head_dim"),
    ]


def _window(shape: ModelShape, sequence_length: int) -> list[Argument]:
    """A token sees itself and `tokens` - 1 before it; Megatron counts those before and after it."""
    window = shape.sliding_window
    if window is None or not windowed(shape, sequence_length):
        return []
    arguments = [argument("--window-size", f"{window.tokens - 1},0", of="model.sliding_window.tokens")]
    if window.full_every:
        arguments += [argument("--window-attn-skip-freq", window.full_every, of="model.sliding_window.full_every")]
    return arguments


ROUTER = "model.moe.router"


def mixture_arguments(shape: ModelShape, techniques: Techniques) -> tuple[Argument, ...]:
    """Empty for a dense model."""
    if shape.moe is None:
        return ()
    moe = shape.moe
    return (
        *_experts(moe),
        *_dispatcher(moe, techniques),
        *_router(moe),
        *_balancing(moe),
        *_shared(moe, techniques),
        *_some(moe),
    )


def _experts(moe: MoeShape) -> list[Argument]:
    return [
        argument("--num-experts", moe.num_experts, of="model.moe.num_experts"),
        argument("--moe-router-topk", moe.topk, of="model.moe.topk"),
        argument("--moe-ffn-hidden-size", moe.ffn_hidden_size, of="model.moe.ffn_hidden_size"),
    ]


def _dispatcher(moe: MoeShape, techniques: Techniques) -> list[Argument]:
    kind = moe.token_dispatcher or "alltoall"
    arguments = [argument("--moe-token-dispatcher-type", kind, of="layout.token_dispatcher")]
    if kind == "flex":
        backend = techniques.flex_backend or "deepep"
        arguments += [argument("--moe-flex-dispatcher-backend", backend, of="layout.flex_backend")]
    if kind == "flex" or moe.num_experts >= FP32_ROUTER_EXPERTS:
        who = "the flex dispatcher sends" if kind == "flex" else f"{FP32_ROUTER_EXPERTS} experts and more want"
        arguments += [argument("--moe-router-dtype", "fp32", why=f"{who} fp32 scores")]
    if moe.grouped_gemm is not False:
        arguments += [argument("--moe-grouped-gemm", why="all experts of a rank in one kernel")]
    return arguments


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
    if router.groups is not None and router.group_topk is not None:
        arguments += [argument("--moe-router-num-groups", router.groups, of=f"{ROUTER}.groups")]
        arguments += [argument("--moe-router-group-topk", router.group_topk, of=f"{ROUTER}.group_topk")]
    if router.scaling_factor != 1.0:
        factor = number(router.scaling_factor)
        arguments += [argument("--moe-router-topk-scaling-factor", factor, of=f"{ROUTER}.scaling_factor")]
    if router.expert_bias:
        arguments += [argument("--moe-router-enable-expert-bias", of=f"{ROUTER}.expert_bias")]
    return arguments


def _balancing(moe: MoeShape) -> list[Argument]:
    kind, key = moe.router.balancing, f"{ROUTER}.balancing"
    arguments = [argument("--moe-router-load-balancing-type", kind, of=key)]
    if kind == "none":
        return arguments
    return [
        *arguments,
        argument("--moe-aux-loss-coeff", number(moe.router.aux_loss_coeff), of=f"{ROUTER}.aux_loss_coeff"),
    ]


def _shared(moe: MoeShape, techniques: Techniques) -> list[Argument]:
    width = moe.shared_expert_ffn_hidden_size
    if not width:
        return []
    key = "model.moe.shared_expert_ffn_hidden_size"
    arguments = [argument("--moe-shared-expert-intermediate-size", width, of=key)]
    if moe.shared_expert_gate:
        arguments += [argument("--moe-shared-expert-gate", of="model.moe.shared_expert_gate")]
    if techniques.overlap_shared_expert:
        arguments += [argument("--moe-shared-expert-overlap", of="layout.overlap_shared_expert")]
    return arguments


def _some(moe: MoeShape) -> list[Argument]:
    """Which layers are mixtures, and how many tokens an expert takes."""
    arguments = []
    if len(set(moe.layer_pattern)) > 1:
        pattern = ",".join(str(flag) for flag in moe.layer_pattern)
        arguments += [argument("--moe-layer-freq", f"[{pattern}]", of="model.moe.layer_pattern")]
    if moe.capacity_factor is not None:
        capacity = number(moe.capacity_factor)
        arguments += [argument("--moe-expert-capacity-factor", capacity, of="model.moe.capacity_factor")]
    return arguments
