"""The model: sizes, norms, activation, attention, positions, prediction heads and Mamba-2 mixers."""

from __future__ import annotations

from llmlaunch.frameworks.argument import number
from llmlaunch.frameworks.megatron.flags.row import (
    PARSED,
    PATTERN,
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
from llmlaunch.frameworks.megatron.hybrid import SPECIFICATION, hybrid_pattern
from llmlaunch.models.shape import CLAMP, CLAMPED, SQUARED
from llmlaunch.rundir.foreign_values import whole_number_in


def _latent(space: Space) -> bool:
    return bool(space.get("multi_latent_attention"))


SIZES = ("--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-attention-heads")
"""The sizes without which no trainer starts."""


def _head_dim(space: Space) -> object:
    width, heads = space.get("kv_channels"), space["num_attention_heads"]
    return width if not _latent(space) and width and width * heads != space["hidden_size"] else None


def _longest(space: Space) -> object:
    longest = space.get("max_position_embeddings")
    return longest if longest and longest != space.get("seq_length") else None


def _normalization(space: Space) -> object:
    kind = space.get("normalization") or "LayerNorm"
    return kind if kind != "RMSNorm" else None


SIZE_FLAGS: tuple[Flag, ...] = (
    *(flag(name, f"model.{name[2:].replace('-', '_')}") for name in SIZES),
    flag("--kv-channels", "model.head_dim", when=lambda job: job.shape.mla is None, read=_head_dim),
    flag(
        "--seq-length",
        "training.sequence_length",
        (("model.seq_length", PARSED), ("dataset.seq_length", PARSED)),
        write=lambda job: job.recipe.workload.sequence_length,
        read=lambda space: space.get("seq_length") or None,
    ),
    flag(
        "--max-position-embeddings",
        ("model.max_position_embeddings", "training.sequence_length"),
        (),
        write=lambda job: max(job.shape.max_position_embeddings, job.recipe.workload.sequence_length),
        read=_longest,
        why="the longer of the two",
    ),
    flag("--normalization", "model.normalization", read=_normalization),
    flag(
        "--norm-epsilon",
        "model.norm_epsilon",
        form=repr,
        when=lambda job: job.shape.norm_epsilon != MEGATRON_NORM_EPSILON,
        read=lambda space: _epsilon(space),
    ),
    flag("--attention-dropout", "model.attention_dropout"),
    flag("--hidden-dropout", "model.hidden_dropout"),
    alias("--encoder-num-layers", "model.num_layers", subject="another model than a decoder"),
    alias("--encoder-seq-length", "training.sequence_length", subject="another model than a decoder"),
)

MEGATRON_NORM_EPSILON = 1e-5  # --norm-epsilon's default


def _epsilon(space: Space) -> object:
    epsilon = space.get("layernorm_epsilon", space.get("norm_epsilon"))
    return epsilon if epsilon not in (None, MEGATRON_NORM_EPSILON) else None


# Their loss counts a tenth, --mtp-loss-scaling-factor's default, as in the second part of DeepSeek-V3's training.
PREDICTION_FLAGS: tuple[Flag, ...] = (
    flag("--mtp-num-layers", "model.mtp_num_layers", form=lambda layers: layers or None),
    *within(
        lambda space: bool(space.get("mtp_num_layers")),
        flag(
            "--mtp-use-repeated-layer",
            "model.mtp_repeated",
            since=SinceThen(
                "repeated-prediction-since-0.19",
                lambda recipe: recipe.model.mtp_repeated,
                "--mtp-use-repeated-layer came after core 0.16; write false, or name a newer backend.version",
                where="megatron/core/transformer/multi_token_prediction.py, core 0.16",
            ),
        ),
    ),
)


def _biased(space: Space) -> bool:
    return space.get("add_bias_linear") is not False


def _clamped(space: Space) -> bool:
    return bool(space.get("quick_geglu")) and space.get("activation_func_clamp_value") == CLAMP


def _query_norm(job: PlannedJob) -> object:
    """DeepSeek's latents have norms, always. Core 0.19 gives queries that have no latent one too, after that of the
    layer (megatron/core/transformer/mla_qk_norm_config.py): hidden_size parameters a layer more."""
    if job.shape.mla is None:
        return False
    more = "; core 0.19 norms the queries' input once more, as they have no latent"
    return Explained(True, why=f"the latents' norms{more if job.shape.mla.q_lora_rank is None else ''}")


SWITCH_FLAGS: tuple[Flag, ...] = (
    flag(
        "--disable-bias-linear",
        "model.linear_bias",
        form=lambda biased: not biased,
        read=lambda space: _biased(space) or None,
    ),
    flag(
        "--add-qkv-bias",
        "model.qkv_bias",
        when=lambda job: not job.shape.linear_bias,
        read=lambda space: True if space.get("add_qkv_bias") and not _biased(space) else None,
    ),
    flag(
        "--untie-embeddings-and-output-weights",
        "model.tied_embeddings",
        (("model.share_embeddings_and_output_weights", False),),
        form=lambda tied: not tied,
        read=lambda space: None if space.get("untie_embeddings_and_output_weights") else True,
    ),
    flag(
        "--qk-layernorm",
        "model.qk_layernorm",
        when=lambda job: job.shape.mla is None,
        read=lambda space: True if space.get("qk_layernorm") and not _latent(space) else None,
        added="latents have norms, always",
    ),
    flag("--qk-l2-norm", "model.qk_l2_norm"),
    flag(
        "--no-rope-freq",
        "model.no_rope_every",
        form=lambda every: every or None,
        read=lambda space: whole_number_in(str(space.get("no_rope_freq"))) or None,  # a list of layers has no key
    ),
    flag("--apply-layernorm-1p", "model.zero_centered_norm"),
    chosen("--qk-layernorm", _query_norm, keys="model.mla", why="the latents' norms"),
)


def _activation(space: Space) -> object:
    return CLAMPED if _clamped(space) else SQUARED if space.get("squared_relu") else None


def _is_clamped(job: PlannedJob) -> bool:
    return job.shape.activation == CLAMPED


# GPT-OSS' activation is Megatron's quick GEGLU with an offset and a clamp.
ACTIVATION_FLAGS: tuple[Flag, ...] = (
    flag(
        "--quick-geglu",
        "model.activation",
        (("model.activation_func", "quick_gelu"), ("model.gated_linear_unit", True)),
        write=_is_clamped,
        read=_activation,
    ),
    chosen("--glu-linear-offset", "1.0", keys="model.activation", when=_is_clamped),
    chosen("--activation-func-clamp-value", number(CLAMP), keys="model.activation", when=_is_clamped),
    flag(
        "--swiglu",
        "model.gated_mlp",
        (("model.activation_func", "silu"), ("model.gated_linear_unit", True)),
        when=lambda job: not _is_clamped(job),
        read=lambda space: None if _clamped(space) or space.get("swiglu") else False,
    ),
    flag(
        "--squared-relu",
        "model.activation",
        (("model.activation_func", "squared_relu"), ("model.gated_linear_unit", False)),
        write=lambda job: job.shape.activation == SQUARED,
        reads={},
    ),
    chosen(
        "--no-bias-gelu-fusion",
        bridge=(("model.bias_activation_fusion", False),),
        keys="model.linear_bias",
        why="the fused kernel adds a bias",
        when=lambda job: not (_is_clamped(job) or job.shape.gated_mlp or job.shape.linear_bias),
        added=True,
        subject="fusions and kernels",
    ),
)

MIXER_FLAGS: tuple[Flag, ...] = within(
    lambda space: bool(space.get(PATTERN)),
    chosen("--spec", SPECIFICATION, (), keys="model.mamba", when=lambda job: job.shape.mamba is not None),
    flag("--mamba-num-heads", "model.mamba.num_heads", keeps_default=True),
    flag("--mamba-head-dim", "model.mamba.head_dim", keeps_default=True),
    flag("--mamba-state-dim", "model.mamba.state_size", keeps_default=True),
    flag("--mamba-num-groups", "model.mamba.groups", keeps_default=True),
)


def _pattern(job: PlannedJob) -> object:
    mamba = job.shape.mamba
    return None if mamba is None else hybrid_pattern(mamba, job.layout, job.shape.mtp_num_layers)


def _prediction_pattern(space: Space) -> object:
    modules = str(space[PATTERN]).split("/")[1:]
    return modules[0] if modules else None


PATTERN_FLAGS: tuple[Flag, ...] = (
    *within(
        lambda space: bool(space.get(PATTERN)),
        flag(
            "--hybrid-layer-pattern",
            ("model.mamba.pattern", "layout.pipeline", "layout.virtual_pipeline"),
            write=_pattern,
            reads={
                "model.mamba.pattern": lambda space: str(space[PATTERN]).split("/")[0],
                "model.mamba.mtp_pattern": _prediction_pattern,
            },
            decides="model.mamba",
            since=SinceThen(
                "hybrid-since-0.19",
                lambda recipe: recipe.model.mamba is not None,
                "layers of one part each are another class in core 0.16, and written otherwise; name a newer "
                "backend.version",
                "model.mamba",
                "megatron/core/models/mamba/mamba_model.py, core 0.16",
            ),
        ),
    ),
    alias("--hybrid-override-pattern", "model.mamba", decides="model.mamba"),
    alias("--mtp-hybrid-override-pattern", "model.mamba", decides="model.mamba"),
)
