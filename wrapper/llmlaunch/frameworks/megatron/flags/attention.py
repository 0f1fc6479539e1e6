"""Attention: positions, heads, latents, the indexer of sparse attention, windows, sinks and gated delta nets."""

from __future__ import annotations

from typing import Any

from llmlaunch.frameworks.megatron.flags.row import (
    PARSED,
    Explained,
    Flag,
    PlannedJob,
    SinceThen,
    Space,
    alias,
    chosen,
    flag,
    within,
)
from llmlaunch.frameworks.megatron.model_rules import windowed
from llmlaunch.rundir.foreign_values import whole_number_in

SCALING = "model.rope_scaling"
DELTA_NETS, SPARSE = "gated_delta_net", "dsa"
VARIANTS = (DELTA_NETS, SPARSE)  # of --experimental-attention-variant that recipes describe
SPARSE_KERNELS = "cudnn"  # of --dsa-kernel-backend, whose memory is priced
VARIANT = "experimental_attention_variant"
LLAMA3_POSITIONS = 8192  # before they are stretched
LATENT_POSITIONS = 4096  # MLATransformerConfig's own, without a flag


def _latent(space: Space) -> bool:
    return bool(space.get("multi_latent_attention"))


def _rotary(space: Space) -> bool:
    return space.get("position_embedding_type") in ("rope", "yarn", "mrope")


def _is_latent(job: PlannedJob) -> bool:
    return job.shape.mla is not None


def _rotates(job: PlannedJob) -> bool:
    return job.shape.position_embedding == "rope"


def _scaled_by(*kinds: str) -> Any:
    """Return whether positions are stretched in one of these ways, for attention that is not latent."""

    def is_scaled(job: PlannedJob) -> bool:
        scaling = job.shape.rope_scaling
        return _rotates(job) and not _is_latent(job) and scaling is not None and scaling.kind in kinds

    return is_scaled


def _stretched(job: PlannedJob) -> bool:
    """Return whether Megatron's yarn stretches the positions: by their kind, or in any way of latent attention."""
    return _scaled_by("yarn")(job) or (_rotates(job) and _is_latent(job) and job.shape.rope_scaling is not None)


def _weighed(job: PlannedJob) -> bool:
    """Where both weights are left out, Megatron's defaults (1 and 0) scale as transformers does: 0.1 ln(factor) + 1."""
    scaling = job.shape.rope_scaling
    both = scaling is not None and scaling.mscale is not None and scaling.mscale_all_dim is not None
    return both and _stretched(job)


def _kind(job: PlannedJob) -> object:
    return Explained("yarn", (SCALING,)) if _scaled_by("yarn")(job) else job.shape.position_embedding


def _position_embedding(space: Space) -> object:
    kind = space.get("position_embedding_type")
    return None if _rotary(space) else kind if kind in ("learned_absolute", "none") else "none"


def _scaling_kind(space: Space) -> str | None:
    """Return how a namespace stretches its positions."""
    latent = _latent(space)
    if not _rotary(space) or (latent and space.get("rope_type") == "rope"):
        return None
    if latent or space.get("position_embedding_type") == "yarn":
        return "yarn"
    if space.get("use_rope_scaling"):
        return "llama3"
    return "linear" if (space.get("rotary_seq_len_interpolation_factor") or 1) > 1 else None


def _yarn(space: Space) -> bool:
    return _scaling_kind(space) == "yarn"


def _plain_yarn(space: Space) -> bool:
    return _yarn(space) and not _latent(space)


def _before(space: Space) -> object:
    if _scaling_kind(space) == "llama3":
        return LLAMA3_POSITIONS
    if not _yarn(space):
        return None
    return LATENT_POSITIONS if _latent(space) else space.get("yarn_original_max_position_embeddings") or None


def _weight(name: str) -> Any:
    def read(space: Space) -> object:
        both = space.get("mscale"), space.get("mscale_all_dim")
        return space.get(name) if _yarn(space) and both != (1.0, 0.0) else None

    return read


def _latent_type(job: PlannedJob) -> object:
    if job.shape.rope_scaling is None:
        return Explained("rope", (), "latent attention's default is yarn")
    return "yarn"


POSITION_FLAGS: tuple[Flag, ...] = (
    flag(
        "--position-embedding-type",
        "model.position_embedding",
        write=_kind,
        reads={"model.position_embedding": _position_embedding, f"{SCALING}.kind": _scaling_kind},
    ),
    flag(
        "--rotary-base",
        "model.rotary_base",
        when=_rotates,
        read=lambda space: (
            float(space["rotary_base"]) if _rotary(space) and space.get("rotary_base") not in (None, 10000) else None
        ),
    ),
    flag(
        "--rope-type",
        f"{SCALING}.kind",
        write=_latent_type,
        reads={},
        when=lambda job: _rotates(job) and _is_latent(job),
    ),
    chosen(
        "--no-rope-fusion",
        why="its fused kernel is for yarn alone",
        when=lambda job: _rotates(job) and _is_latent(job) and job.shape.rope_scaling is None,
        added="the fused kernel of latent attention is for yarn alone",
        subject="fusions and kernels",
    ),
    flag(
        "--rotary-percent",
        "model.rotary_percent",
        when=lambda job: _rotates(job) and not _is_latent(job) and job.shape.rotary_percent != 1.0,
        read=lambda space: (
            space["rotary_percent"]
            if _rotary(space) and not _latent(space) and space.get("rotary_percent") not in (None, 1.0)
            else None
        ),
    ),
    flag(
        "--rotary-seq-len-interpolation-factor",
        f"{SCALING}.factor",
        (("model.seq_len_interpolation_factor", PARSED),),
        when=_scaled_by("linear"),
        read=lambda space: (
            float(space["rotary_seq_len_interpolation_factor"]) if _scaling_kind(space) == "linear" else None
        ),
    ),
    flag(
        "--use-rope-scaling",
        f"{SCALING}.kind",
        (("model.rope_scaling", True),),
        write=lambda job: True,
        reads={},
        when=_scaled_by("llama3"),
    ),
    flag(  # the model is built with its default, 8, whatever it says; other factors are refused (model_rules.py)
        "--rope-scaling-factor",
        f"{SCALING}.factor",
        (("model.rope_scaling_factor", PARSED),),
        when=_scaled_by("llama3"),
        read=lambda space: float(space.get("rope_scaling_factor") or 8.0) if _scaling_kind(space) == "llama3" else None,
    ),
    flag(
        "--rotary-scaling-factor",
        f"{SCALING}.factor",
        when=_stretched,
        read=lambda space: float(space.get("rotary_scaling_factor") or 1.0) if _yarn(space) else None,
    ),
    flag("--mscale", f"{SCALING}.mscale", when=_weighed, read=_weight("mscale")),
    flag("--mscale-all-dim", f"{SCALING}.mscale_all_dim", when=_weighed, read=_weight("mscale_all_dim")),
    flag(
        "--yarn-original-max-position-embeddings",
        f"{SCALING}.original_max_position_embeddings",
        when=_scaled_by("yarn"),
        read=_before,
        since=SinceThen(
            "yarn-since-0.19",
            lambda recipe: (
                recipe.model.mla is None
                and recipe.model.rope_scaling is not None
                and recipe.model.rope_scaling.kind == "yarn"
            ),
            "core 0.16 stretches positions by yarn with latent attention alone; name a newer backend.version",
            SCALING,
        ),
    ),
    alias("--use-rotary-position-embeddings", "model.position_embedding"),
    *within(
        _plain_yarn,
        flag("--yarn-beta-fast", f"{SCALING}.beta_fast"),
        flag("--yarn-beta-slow", f"{SCALING}.beta_slow"),
        flag(
            "--no-yarn-correction-range-round-to-int",
            f"{SCALING}.truncate",
            form=lambda truncate: not truncate,
            read=lambda space: False if space.get("yarn_correction_range_round_to_int") is False else None,
        ),
        when=_scaled_by("yarn"),
    ),
)


def _grouped(job: PlannedJob) -> bool:
    return not _is_latent(job) and job.shape.num_query_groups != job.shape.num_attention_heads


def _groups(space: Space) -> object:
    groups = space.get("num_query_groups")
    return groups if groups not in (None, space["num_attention_heads"]) and not _latent(space) else None


HEAD_FLAGS: tuple[Flag, ...] = (
    flag("--group-query-attention", "model.num_query_groups", (), write=lambda job: True, when=_grouped, reads={}),
    flag("--num-query-groups", "model.num_query_groups", when=_grouped, read=_groups),
    flag("--multi-latent-attention", "model.mla", write=_is_latent, reads={}),
    *within(
        _latent,
        flag("--q-lora-rank", "model.mla.q_lora_rank"),
        flag("--kv-lora-rank", "model.mla.kv_lora_rank"),
        flag("--qk-head-dim", "model.mla.qk_head_dim"),
        flag("--qk-pos-emb-head-dim", "model.mla.qk_pos_emb_head_dim"),
        flag("--v-head-dim", "model.mla.v_head_dim"),
    ),
)


def _is_indexed(job: PlannedJob) -> bool:
    return job.shape.indexer is not None


INDEXER_SIZES = {
    "--dsa-indexer-n-heads": "model.indexer.heads",
    "--dsa-indexer-head-dim": "model.indexer.head_dim",
    "--dsa-indexer-topk": "model.indexer.topk",
}
"""The sizes without which no sparse attention starts, with their keys."""

# DeepSeek's sparse attention, with NVIDIA's kernels: without any, core 0.19 keeps scores of all keys.
INDEXER_FLAGS: tuple[Flag, ...] = within(
    lambda space: space.get(VARIANT) == SPARSE,
    chosen("--experimental-attention-variant", SPARSE, keys="model.indexer"),
    *(flag(name, key, keeps_default=True, bridge=None) for name, key in INDEXER_SIZES.items()),
    flag("--dsa-indexer-rope-interleaved", "model.indexer.interleaved", bridge=None),
    chosen("--dsa-indexer-k-norm-epsilon", "1e-06", why="its norm has an epsilon of its own", bridge=None),
    chosen(
        "--no-dsa-indexer-rotate-activation",
        why="it is orthogonal and changes no score, and would want a package of its own",
        bridge=None,
    ),
    flag("--dsa-indexer-loss-coeff", "model.indexer.loss_coeff", bridge=None),
    chosen("--dsa-indexer-use-sparse-loss", why="over the chosen keys, as attention is", bridge=None),
    chosen("--dsa-kernel-backend", SPARSE_KERNELS, why="the kernels of FlashMLA and cuDNN", bridge=None),
    chosen(
        "--no-rope-fusion",
        keys="model.indexer",
        why="no fused rotation goes before sparse attention",
        when=lambda job: job.shape.rope_scaling is not None,
        subject="fusions and kernels",
    ),
    when=_is_indexed,
)


def _has_window(job: PlannedJob) -> bool:
    return windowed(job.shape, job.recipe.workload.sequence_length)


def _in_window(space: Space) -> bool:
    window = space.get("window_size")
    return isinstance(window, (tuple, list)) and len(window) == 2 and window[0] >= 0


# A token sees itself and `tokens` - 1 before it; Megatron counts those before and after it.
WINDOW_FLAGS: tuple[Flag, ...] = within(
    _in_window,
    flag(
        "--window-size",
        "model.sliding_window.tokens",
        form=lambda tokens: f"{tokens - 1},0",
        read=lambda space: space["window_size"][0] + 1,
    ),
    flag(
        "--window-attn-skip-freq",
        "model.sliding_window.full_every",
        form=lambda every: every or None,
        read=lambda space: whole_number_in(str(space.get("window_attn_skip_freq"))) or None,
    ),
    when=_has_window,
)


def linear_period(space: Space) -> int | None:
    """Return N where every N-th layer has ordinary attention and all others linear, 0 where all have; None for any
    other pattern."""
    value = space.get("linear_attention_freq")
    if isinstance(value, str) and whole_number_in(value.strip()) is not None:
        value = int(value)
    if isinstance(value, int):
        return value if value > 1 else None
    from llmlaunch.frameworks.megatron.namespace import layer_pattern

    pattern = layer_pattern(value, space["num_layers"])
    if pattern is None:
        return None
    every = pattern.index(0) + 1 if 0 in pattern else 0
    expected = tuple(int(not every or (layer + 1) % every > 0) for layer in range(len(pattern)))
    return every if pattern == expected and every != 1 else None


def _is_linear(job: PlannedJob) -> bool:
    return job.shape.linear_attention is not None


def _linear_layers(job: PlannedJob) -> object:
    """Which layers have a gated delta net. A number N means that every N-th layer has attention."""
    linear = job.shape.linear_attention
    if linear is None:
        return None
    mixed = 0 < linear.full_every <= job.shape.num_layers
    return linear.full_every if mixed else f"[{','.join(map(str, job.shape.linear_pattern))}]"


DELTA_FLAGS: tuple[Flag, ...] = within(
    lambda space: space.get(VARIANT) == DELTA_NETS,
    chosen("--experimental-attention-variant", DELTA_NETS, keys="model.linear_attention", when=_is_linear),
    flag("--linear-attention-freq", "model.linear_attention.full_every", write=_linear_layers, read=linear_period),
    flag("--linear-num-key-heads", "model.linear_attention.num_key_heads", keeps_default=True),
    flag("--linear-num-value-heads", "model.linear_attention.num_value_heads", keeps_default=True),
    flag("--linear-key-head-dim", "model.linear_attention.key_head_dim", keeps_default=True),
    flag("--linear-value-head-dim", "model.linear_attention.value_head_dim", keeps_default=True),
    flag("--linear-conv-kernel-dim", "model.linear_attention.conv_kernel", keeps_default=True),
)

ATTENTION_FLAGS: tuple[Flag, ...] = (
    *POSITION_FLAGS,
    *HEAD_FLAGS,
    *INDEXER_FLAGS,
    *WINDOW_FLAGS,
    flag(
        "--softmax-type",
        "model.attention_sinks",
        write=lambda job: "learnable" if job.shape.attention_sinks else None,
        read=lambda space: True if space.get("softmax_type") == "learnable" else None,
    ),
    flag("--attention-output-gate", "model.attention_gate"),
)
