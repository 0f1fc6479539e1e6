"""The model in Megatron-LM's words: sizes, attention, norms, mixture of experts (core 0.19)."""

from __future__ import annotations

from llmlaunch.backends.argument import Argument, argument, number
from llmlaunch.models.shape import ModelShape

__all__ = ["model_arguments"]


def model_arguments(shape: ModelShape, sequence_length: int) -> tuple[Argument, ...]:
    """All that describes the model itself, whatever the split."""
    return (*_sizes(shape, sequence_length), *_attention(shape), *_switches(shape), *_mixture(shape))


def _sizes(shape: ModelShape, sequence_length: int) -> list[Argument]:
    longest = max(shape.max_position_embeddings, sequence_length)
    lengths = ("model.max_position_embeddings", "training.sequence_length")
    return [
        argument("--num-layers", shape.num_layers, of="model.num_layers"),
        argument("--hidden-size", shape.hidden_size, of="model.hidden_size"),
        argument("--ffn-hidden-size", shape.ffn_hidden_size, of="model.ffn_hidden_size"),
        argument("--num-attention-heads", shape.num_attention_heads, of="model.num_attention_heads"),
        argument("--kv-channels", shape.head_dim, of="model.head_dim"),
        argument("--seq-length", sequence_length, of="training.sequence_length"),
        argument("--max-position-embeddings", longest, of=lengths, why="the longer of the two"),
        argument("--normalization", shape.normalization, of="model.normalization"),
        argument("--attention-dropout", number(shape.attention_dropout), of="model.attention_dropout"),
        argument("--hidden-dropout", number(shape.hidden_dropout), of="model.hidden_dropout"),
    ]


def _attention(shape: ModelShape) -> list[Argument]:
    made = [argument("--position-embedding-type", shape.position_embedding, of="model.position_embedding")]
    if shape.position_embedding == "rope":
        made += [argument("--rotary-base", number(shape.rotary_base), of="model.rotary_base")]
    if shape.num_query_groups != shape.num_attention_heads:
        made += [argument("--group-query-attention", of="model.num_query_groups")]
        made += [argument("--num-query-groups", shape.num_query_groups, of="model.num_query_groups")]
    if shape.mtp_num_layers:
        made += [argument("--mtp-num-layers", shape.mtp_num_layers, of="model.mtp_num_layers")]
    return made


def _switches(shape: ModelShape) -> list[Argument]:
    switches = {
        "--swiglu": (shape.gated_mlp, "model.gated_mlp"),
        "--disable-bias-linear": (not shape.linear_bias, "model.linear_bias"),
        "--add-qkv-bias": (shape.qkv_bias and not shape.linear_bias, "model.qkv_bias"),
        "--untie-embeddings-and-output-weights": (not shape.tied_embeddings, "model.tied_embeddings"),
        "--qk-layernorm": (shape.qk_layernorm, "model.qk_layernorm"),
    }
    return [argument(flag, of=key) for flag, (on, key) in switches.items() if on]


def _mixture(shape: ModelShape) -> list[Argument]:
    if shape.moe is None:
        return []
    moe = shape.moe
    balance = "the routers of Mixtral were trained with it"
    made = [
        argument("--num-experts", moe.num_experts, of="model.moe.num_experts"),
        argument("--moe-router-topk", moe.topk, of="model.moe.topk"),
        argument("--moe-ffn-hidden-size", moe.ffn_hidden_size, of="model.moe.ffn_hidden_size"),
        argument("--moe-token-dispatcher-type", moe.token_dispatcher or "alltoall", of="layout.token_dispatcher"),
        argument("--moe-router-load-balancing-type", "aux_loss", why=balance),
        argument("--moe-aux-loss-coeff", "0.01", why=balance),
        argument("--moe-grouped-gemm", why="all experts of a rank in one kernel"),
    ]
    if len(set(moe.layer_pattern)) > 1:
        pattern = ",".join(str(flag) for flag in moe.layer_pattern)
        made += [argument("--moe-layer-freq", f"[{pattern}]", of="model.moe.layer_pattern")]
    if moe.shared_expert_ffn_hidden_size:
        key = "model.moe.shared_expert_ffn_hidden_size"
        made += [argument("--moe-shared-expert-intermediate-size", moe.shared_expert_ffn_hidden_size, of=key)]
    if moe.capacity_factor is not None:
        capacity = number(moe.capacity_factor)
        made += [argument("--moe-expert-capacity-factor", capacity, of="model.moe.capacity_factor")]
    return made
