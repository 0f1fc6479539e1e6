"""Megatron jobs trained on the CPU: which model, split how. Data for test_megatron_trains.py and the table of flags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cpu_training import MEGATRON_CPU, CpuJob, cpu_job

from llmlaunch.assets import asset
from llmlaunch.layout import RECOMPUTE_FULL, RECOMPUTE_SELECTIVE, Layout
from llmlaunch.models.shape import MlaShape, ModelShape, MoeShape
from llmlaunch.recipe.load import load_recipe
from llmlaunch.recipe.types import Recipe

OWN_TRAINER = MEGATRON_CPU / "own_trainer.py"
EVALUATION = "training.evaluation={interval: 2, iterations: 2}"
STEPS = 3
LLAMA = (
    "model={num_layers: 4, hidden_size: 64, ffn_hidden_size: 160, num_attention_heads: 4, num_query_groups: 2, "
    "vocab_size: 250}",
)
GPT = (
    "model={num_layers: 4, hidden_size: 64, ffn_hidden_size: 256, num_attention_heads: 4, vocab_size: 250, "
    "gated_mlp: false, linear_bias: true, normalization: LayerNorm, position_embedding: learned_absolute, "
    "tied_embeddings: true}",
)
QWEN = (
    *LLAMA,
    "model.qkv_bias=true",
    "model.qk_layernorm=true",
    "model.tied_embeddings=true",
    "model.norm_epsilon=1.0e-6",
    "model.rope_scaling={kind: llama3, factor: 8, original_max_position_embeddings: 8192}",
)
MIXTURE = (
    *LLAMA,
    "model.moe={num_experts: 4, topk: 2, ffn_hidden_size: 96}",
    "model.rope_scaling={kind: yarn, factor: 4, original_max_position_embeddings: 32, truncate: false}",
)
GPT_OSS = (  # what it and GLM have beside a mixture
    "model.attention_sinks=true",
    "model.rope_scaling=null",
    "model.rotary_percent=0.5",
    "model.linear_bias=true",
    "model.activation=clamped_swiglu",
    "model.sliding_window={tokens: 16, full_every: 2}",
)
DEEPSEEK = (
    "model={num_layers: 4, hidden_size: 64, ffn_hidden_size: 160, num_attention_heads: 4, vocab_size: 250, "
    "qk_layernorm: true, mtp_num_layers: 1}",
    "model.mla={q_lora_rank: 32, kv_lora_rank: 16, qk_head_dim: 16, qk_pos_emb_head_dim: 8, v_head_dim: 16}",
    "model.moe={num_experts: 8, topk: 2, ffn_hidden_size: 48, shared_expert_ffn_hidden_size: 48, "
    "layer_pattern: [0, 1, 1, 1]}",
    "model.moe.router={score_function: sigmoid, groups: 4, group_topk: 2, scaling_factor: 2.5, expert_bias: true, "
    "balancing: seq_aux_loss, aux_loss_coeff: 0.001}",
    "model.rope_scaling={kind: yarn, factor: 4, original_max_position_embeddings: 4096, mscale: 1.0, "
    "mscale_all_dim: 1.0}",
)
MODELS = {"llama": LLAMA, "gpt": GPT, "qwen": QWEN, "mixture": MIXTURE, "deepseek": DEEPSEEK}
USUAL = (
    "training.sequence_length=64",
    "training.global_batch_size=4",
    f"training.steps={STEPS}",
    "training.learning_rate=0.005",
    "training.minimum_learning_rate=0.0005",
    "training.adam_betas=[0.8, 0.95]",
    "training.precision=fp32",
    "training.log_interval=1",
    "nodes=1",
)
ALONE, PAIR, SHARED = Layout(), Layout(data=2), Layout(data=2, zero_stage=1)
SOME = Layout(recompute=RECOMPUTE_SELECTIVE)


@dataclass(frozen=True)
class TrainedCase:
    """One split of one of MODELS. Its losses are to be those of one process, relatively within `tolerance`.

    Only what is `fresh` begins with random weights of its own, which a split by data alone makes as one process does;
    the others begin with the weights that one process saved. `tolerance` None: it computes something else than the
    model's reference, and the loss has to fall. What is `chosen` trains in each `make test`.
    """

    model: str
    layout: Layout
    overrides: tuple[str, ...] = ()
    tolerance: float | None = 1e-5
    fresh: bool = False
    chosen: bool = False

    @property
    def name(self) -> str:
        return " ".join((self.model, self.layout.describe(), *self.overrides))


def recipe_for(model: str, overrides: tuple[str, ...] = ()) -> Recipe:
    return load_recipe(asset("recipes", "llama3-8b.yaml"), (*MODELS[model], *USUAL, *overrides))


def own_job(folder: Path) -> Recipe:
    """A trainer of a person's own, with its own data and an evaluation."""
    backend = f"backend={{name: megatron-lm, script: {OWN_TRAINER}, script_args: [--scaled-weights, '0.5']}}"
    data = f"data={{path: {folder / 'training'}, validation: {folder / 'validation'}, cache_path: {folder / 'cache'}}}"
    return recipe_for(
        "llama",
        (backend, data, EVALUATION, "model.vocab_size=1000", "training.steps=4", "training.global_batch_size=8"),
    )


def saving(folder: Path, interval: int, steps: int) -> tuple[str, ...]:
    place = f"training.checkpoint_path={folder}"
    return (f"training.save_interval={interval}", place, f"training.steps={steps}")


def _jobs_alone(model: str, folder: Path) -> list[CpuJob]:
    """One process: a step with a learning rate of nothing, which saves the first weights, and the reference."""
    still = ("training.learning_rate=1.0e-30", "training.minimum_learning_rate=0.0")
    first = recipe_for(model, (*saving(folder / model, 1, 1), *still))
    begun = recipe_for(model, (f"training.start_from={folder / model}",))
    return [cpu_job(f"{model} start", first, ALONE), cpu_job(f"{model} alone", begun, ALONE)]


def _job(case: TrainedCase, folder: Path) -> CpuJob:
    begin = () if case.fresh else (f"training.start_from={folder / case.model}",)
    return cpu_job(case.name, recipe_for(case.model, (*begin, *case.overrides)), case.layout)


DATASET = "tokens"
INDEXED = "llama of an indexed dataset"


def _job_of_data(folder: Path) -> CpuJob:
    """On the dataset of the fixture `dataset`, whose tokens are below 1000."""
    data = f"data={{path: {folder / DATASET}, cache_path: {folder / 'cache'}}}"
    return cpu_job(INDEXED, recipe_for("llama", (data, "model.vocab_size=1000")), ALONE)


UNDISTURBED = "llama undisturbed"
LONG = 16  # steps


def long_job(name: str, place: Path, layout: Layout = SHARED) -> CpuJob:
    """Long enough to be interrupted; it saves in `place` at its end, or when it is told to end, and after each fifth
    step a checkpoint of which the newest alone stays."""
    often = "training.non_persistent_save_interval=5"
    return cpu_job(name, recipe_for("llama", (*saving(place, 1000, LONG), often, "on_oom.layouts=1")), layout)


def jobs(folder: Path, cases: Sequence[TrainedCase]) -> list[CpuJob]:
    """The jobs of cases, in an order in which each finds what it begins with. Checkpoints and data lie in `folder`."""
    alone = [job for model in models_of(cases) for job in _jobs_alone(model, folder)]
    return [
        *alone,
        _job_of_data(folder),
        long_job(UNDISTURBED, folder / "undisturbed"),
        *(_job(case, folder) for case in cases),
    ]


def models_of(cases: Sequence[TrainedCase]) -> list[str]:
    return [model for model in MODELS if any(case.model == model for case in cases)]


CASES = (
    TrainedCase("llama", PAIR, fresh=True),
    TrainedCase("llama", SHARED),
    TrainedCase("llama", SHARED, ("training.precision=bf16", "training.gradient_dtype=bf16"), 5e-3),
    TrainedCase("llama", Layout(data=2, zero_stage=2), ("layout.zero_stage=2",), fresh=True),
    TrainedCase("llama", Layout(data=2, zero_stage=3), ("layout.zero_stage=3",), fresh=True, chosen=True),
    TrainedCase("llama", Layout(tensor=2, sequence_parallel=1)),
    # The fused loss gives its gradient in bf16, whatever the model computes in (fusions/fused_cross_entropy.py, 0.19).
    TrainedCase("llama", Layout(tensor=2), ("layout.loss=native",), 2e-3),
    TrainedCase(
        "llama",
        Layout(pipeline=2, recompute=RECOMPUTE_FULL, recompute_layers=1),
        ("layout={recompute: full, recompute_method: block}",),
    ),
    TrainedCase("llama", Layout(pipeline=2, virtual_pipeline=2), ("layout.mlp_chunks=2",)),
    TrainedCase("llama", Layout(pipeline=2, layers_by_stage=(1, 3))),
    TrainedCase("llama", Layout(pipeline=2, virtual_pipeline=2, layers_by_stage=(0, 1, 1, 2)), chosen=True),
    TrainedCase("llama", Layout(pipeline=3, layers_by_stage=(1, 1, 2))),
    TrainedCase(
        "llama",
        Layout(pipeline=2, virtual_pipeline=2, layers_by_stage=(1, 2, 2, 1)),
        ("model.num_layers=6",),
        None,
        fresh=True,
    ),
    TrainedCase("llama", Layout(tensor=2, pipeline=2, recompute=RECOMPUTE_FULL, recompute_layers=1)),
    TrainedCase(
        "llama",
        ALONE,
        ("model.rope_scaling={kind: linear, factor: 2}", "model.sliding_window={tokens: 16, full_every: 2}"),
        None,
        fresh=True,
    ),
    TrainedCase(
        "llama", ALONE, ("model.gated_mlp=false", "model.activation=gelu", "model.no_rope_every=2"), None, fresh=True
    ),
    # Its loss scale begins at 2**32: steps are skipped until it is halved often enough.
    TrainedCase(
        "llama",
        ALONE,
        ("training.precision=fp16", "training.gradient_dtype=fp32", "training.steps=24"),
        None,
        fresh=True,
    ),
    TrainedCase("llama", SOME, ("layout={recompute: selective, recompute_modules: [mlp, layernorm]}",)),
    TrainedCase("gpt", Layout(tensor=2, data=2, zero_stage=1)),
    TrainedCase("gpt", Layout(pipeline=2, micro_batch_size=2)),
    TrainedCase("qwen", Layout(tensor=2, recompute=RECOMPUTE_SELECTIVE)),
    TrainedCase("mixture", Layout(data=2, expert=2), ("layout.token_dispatcher=allgather",)),
    TrainedCase("mixture", Layout(data=2, expert=2, zero_stage=1), chosen=True),
    TrainedCase("mixture", Layout(tensor=2, data=2, expert=2, sequence_parallel=1, zero_stage=1)),
    TrainedCase(
        "mixture",
        Layout(data=2, expert=2),
        (
            "layout.overlap_shared_expert=true",
            "model.moe.shared_expert_ffn_hidden_size=32",
            "model.moe.shared_expert_gate=true",
            "model.moe.capacity_factor=1.5",
            "model.moe.router.normalize_topk=false",
            "model.qk_l2_norm=true",
        ),
        None,
        fresh=True,
    ),
    TrainedCase("mixture", Layout(data=2, expert=2), GPT_OSS, None, fresh=True),
    TrainedCase("mixture", ALONE, ("model.moe.topk=1", "model.moe.router.weighted_inputs=true"), None, fresh=True),
    TrainedCase("deepseek", Layout(pipeline=3, layers_by_stage=(2, 2, 0)), ("layout.mtp_stage=before-last",)),
    TrainedCase("deepseek", Layout(data=2, expert=2, zero_stage=1)),
    TrainedCase("deepseek", Layout(pipeline=2, layers_by_stage=(2, 2))),
    TrainedCase("deepseek", ALONE, ("model.rope_scaling=null",), None, fresh=True),
    TrainedCase(
        "deepseek", SOME, ("layout={recompute: selective, recompute_modules: [mla_up_proj, mlp, moe, shared_experts]}",)
    ),
)


GALLERY_STEPS = 2
LAYERS = 4
TRAINING = (
    "layout=auto",
    "training.sequence_length=64",
    "training.global_batch_size=4",
    f"training.steps={GALLERY_STEPS}",
    "training.learning_rate=0.005",
    "training.log_interval=1",
)
TENSOR = Layout(tensor=2, sequence_parallel=1, zero_stage=1)
STAGES = Layout(pipeline=2, zero_stage=1)
BOTH = Layout(tensor=2, pipeline=2, sequence_parallel=1, zero_stage=1)
EXPERTS = Layout(data=2, expert=2, zero_stage=1)

# Split in the ways their plans are split, each by two where it is split at all. Context parallelism needs Transformer
# Engine's attention.
GALLERY_LAYOUTS = {
    "deepseek-v3": Layout(pipeline=2, data=2, expert=2, zero_stage=1),
    "glm-4.5-air": EXPERTS,
    "gpt-oss-20b": EXPERTS,
    "gpt3-175b": Layout(tensor=2, pipeline=2, virtual_pipeline=2, sequence_parallel=1, zero_stage=1),
    "llama3-405b": Layout(tensor=2, pipeline=2, virtual_pipeline=2, sequence_parallel=1, zero_stage=1),
    "llama3-405b-b200": BOTH,
    "llama3-70b": BOTH,
    "llama3-8b": SHARED,
    "llama3.1-70b-h200": Layout(tensor=2, sequence_parallel=1, zero_stage=1, recompute=RECOMPUTE_SELECTIVE),
    "llama3.1-8b-128k": Layout(tensor=2, sequence_parallel=1, recompute=RECOMPUTE_FULL, recompute_layers=1),
    "llama3.1-8b-a100-40gb": STAGES,
    "mixtral-8x22b": Layout(tensor=2, data=2, expert=2, sequence_parallel=1, zero_stage=1),
    "mixtral-8x7b": EXPERTS,
    "qwen2.5-72b": TENSOR,
    "qwen3-235b-a22b": Layout(pipeline=2, data=2, expert=2, zero_stage=1),
    "qwen3-30b-a3b": EXPERTS,
    "qwen3-32b": TENSOR,
    "qwen3-8b": SHARED,
}

GALLERY_OBSTACLES = {
    "deepseek-v2-lite": "the local layers refuse norms of a latent without a latent of the queries: `q_layernorm` is "
    "'non-trivial, but `q_lora_rank is None`' (multi_latent_attention.py, core 0.19.2); Transformer Engine fuses them",
    "nemotron-3-nano": "the kernels of mamba-ssm run on GPUs alone (megatron/core/ssm/mamba_mixer.py, core 0.19.2)",
    "qwen3-next-80b-a3b": "those of flash-linear-attention, too (megatron/core/ssm/gated_delta_net, core 0.19.2)",
}


def _model(shape: ModelShape) -> dict[str, object]:
    """The sizes of the shape, made small; what kind of model it is stays as it is."""
    groups = 4 if shape.num_query_groups == shape.num_attention_heads else 2
    small: dict[str, object] = {
        "num_layers": LAYERS,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "num_query_groups": groups,
        "vocab_size": 250,
        "head_dim": 16,
    }
    if shape.sliding_window is not None:
        small["sliding_window.tokens"] = 16
        small["sliding_window.full_every"] = 2 if shape.sliding_window.full_every else 0
    return small | _latent(shape.mla) | _mixture(shape.moe)


def _latent(mla: MlaShape | None) -> dict[str, object]:
    if mla is None:
        return {}
    small: dict[str, object] = {"kv_lora_rank": 16, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16}
    if mla.q_lora_rank:
        small["q_lora_rank"] = 32
    return {f"mla.{name}": size for name, size in small.items()}


def _mixture(moe: MoeShape | None) -> dict[str, object]:
    if moe is None:
        return {}
    dense_first = 0 in moe.layer_pattern
    small: dict[str, object] = {
        "num_experts": 8,
        "topk": 2,
        "ffn_hidden_size": 48,
        "layer_pattern": [0 if dense_first else 1, *[1] * (LAYERS - 1)],
    }
    if moe.shared_expert_ffn_hidden_size:
        small["shared_expert_ffn_hidden_size"] = 48
    if moe.router.groups:
        small |= {"router.groups": 4, "router.group_topk": 2}
    return {f"moe.{name}": size for name, size in small.items()}


def gallery_jobs(recipes: list[Path]) -> list[CpuJob]:
    """Those that have no obstacle."""
    jobs = []
    for path in recipes:
        if path.stem in GALLERY_OBSTACLES:
            continue
        sizes = _model(load_recipe(path).model)
        model = tuple(f"model.{name}={value}" for name, value in sizes.items())
        recipe = load_recipe(path, (*model, *TRAINING))
        jobs.append(cpu_job(path.stem, recipe, GALLERY_LAYOUTS[path.stem]))
    return jobs
