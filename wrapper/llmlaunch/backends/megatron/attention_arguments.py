"""Attention and positions of a model in Megatron-LM's words (core 0.19)."""

from __future__ import annotations

from llmlaunch.backends.argument import Argument, argument, number
from llmlaunch.models.shape import MlaShape, ModelShape, RopeScaling

__all__ = ["attention_arguments", "windowed"]

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
        kept = argument("--rope-scaling-factor", number(scaling.factor), of=f"{SCALING}.factor")
        return [argument("--use-rope-scaling", of=f"{SCALING}.kind"), kept]
    before = f"{SCALING}.original_max_position_embeddings"
    made = _yarn(scaling)
    if scaling.original_max_position_embeddings is not None:
        flag = "--yarn-original-max-position-embeddings"
        made += [argument(flag, scaling.original_max_position_embeddings, of=before)]
    made += [argument("--yarn-beta-fast", number(scaling.beta_fast), of=f"{SCALING}.beta_fast")]
    made += [argument("--yarn-beta-slow", number(scaling.beta_slow), of=f"{SCALING}.beta_slow")]
    if not scaling.truncate:
        made += [argument("--no-yarn-correction-range-round-to-int", of=f"{SCALING}.truncate")]
    return made


def _yarn(scaling: RopeScaling) -> list[Argument]:
    """Where both weights are left out, Megatron's defaults (1 and 0) scale as transformers does: 0.1 ln(factor) + 1."""
    made = [argument("--rotary-scaling-factor", number(scaling.factor), of=f"{SCALING}.factor")]
    if scaling.mscale is not None and scaling.mscale_all_dim is not None:
        made += [argument("--mscale", number(scaling.mscale), of=f"{SCALING}.mscale")]
        made += [argument("--mscale-all-dim", number(scaling.mscale_all_dim), of=f"{SCALING}.mscale_all_dim")]
    return made


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
    made = [argument("--multi-latent-attention", of="model.mla")]
    if mla.q_lora_rank is not None:
        made += [argument("--q-lora-rank", mla.q_lora_rank, of="model.mla.q_lora_rank")]
    return [
        *made,
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
    made = [argument("--window-size", f"{window.tokens - 1},0", of="model.sliding_window.tokens")]
    if window.full_every:
        made += [argument("--window-attn-skip-freq", window.full_every, of="model.sliding_window.full_every")]
    return made
