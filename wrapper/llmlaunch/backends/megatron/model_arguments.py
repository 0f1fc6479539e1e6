"""The model in Megatron-LM's words (core 0.19): sizes and norms; attention and mixture have modules of their own.

Whatever a published configuration says is said here, and what the command line cannot say is refused by name
(model_rules.py): a model that trains as another one than was asked for is worse than none.
"""

from __future__ import annotations

from llmlaunch.backends.argument import Argument, argument, number
from llmlaunch.backends.megatron.attention_arguments import attention_arguments
from llmlaunch.backends.megatron.mixture_arguments import mixture_arguments
from llmlaunch.models.shape import MlaShape, ModelShape
from llmlaunch.recipe.types import Recipe

__all__ = ["model_arguments"]

MEGATRON_NORM_EPSILON = 1e-5  # --norm-epsilon's default


def model_arguments(recipe: Recipe) -> tuple[Argument, ...]:
    """All that describes the model itself, whatever the split."""
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
    made = [
        argument("--num-layers", shape.num_layers, of="model.num_layers"),
        argument("--hidden-size", shape.hidden_size, of="model.hidden_size"),
        argument("--ffn-hidden-size", shape.ffn_hidden_size, of="model.ffn_hidden_size"),
        argument("--num-attention-heads", shape.num_attention_heads, of="model.num_attention_heads"),
    ]
    if shape.mla is None:
        made += [argument("--kv-channels", shape.head_dim, of="model.head_dim")]
    made += [
        argument("--seq-length", sequence_length, of="training.sequence_length"),
        argument("--max-position-embeddings", longest, of=lengths, why="the longer of the two"),
        argument("--normalization", shape.normalization, of="model.normalization"),
    ]
    if shape.norm_epsilon != MEGATRON_NORM_EPSILON:
        made += [argument("--norm-epsilon", repr(shape.norm_epsilon), of="model.norm_epsilon")]
    return [
        *made,
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
    made = [argument(flag, of=key) for flag, (on, key) in switches.items() if on]
    if shape.mla is not None:
        made += [_latent_norms(shape.mla)]
    if not shape.gated_mlp and not shape.linear_bias:
        made += [argument("--no-bias-gelu-fusion", of="model.linear_bias", why="the fused kernel adds a bias")]
    return made


def _latent_norms(mla: MlaShape) -> Argument:
    """DeepSeek's latents have norms, always. Core 0.19 gives queries that have no latent one too, after that of the
    layer (megatron/core/transformer/mla_qk_norm_config.py): hidden_size parameters a layer more."""
    more = "; core 0.19 norms the queries' input once more, as they have no latent" if mla.q_lora_rank is None else ""
    return argument("--qk-layernorm", of="model.mla", why=f"the latents' norms{more}")
