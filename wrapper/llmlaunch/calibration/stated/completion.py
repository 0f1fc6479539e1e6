"""Measurement records with every field the estimator needs.

null means "not known, never default" in a record. To price the run all the same, what the framework does unless set
otherwise is taken from one table, by backend, with its source, and printed under `assumed`. A null is filled only where
it matters for bytes: the kind of context parallel exchange only with context parallelism, recomputed modules only under
selective recompute. Nulls that can only mean "none of it" (an optimizer not offloaded, no experts, no narrow number
format) stay as they are. Sizes that follow from others are worked out; a size that follows from nothing makes the
record unsupported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llmlaunch.calibration.cases import Unsupported
from llmlaunch.calibration.records import Record
from llmlaunch.frameworks.recorded import RECORDED_TRAINERS

PRECISION = "the precision"


def _always(_: Record) -> bool:
    return True


def in_bf16(record: Record) -> bool:
    return bool(record["precision"]["compute"] == "bf16")


def not_in_bf16(record: Record) -> bool:
    return not in_bf16(record)


def _selective(record: Record) -> bool:
    return bool(record["recompute"]["granularity"] == "selective")


def _full(record: Record) -> bool:
    return bool(record["recompute"]["granularity"] == "full")


def _uniform(record: Record) -> bool:
    return _full(record) and bool(record["recompute"].get("method") == "uniform")


def _distributed(record: Record) -> bool:
    return bool(record["optimizer"].get("distributed_optimizer"))


def _not_distributed(record: Record) -> bool:
    return not _distributed(record)


def splits_tensors(record: Record) -> bool:
    return bool((record["parallelism"]["tensor"] or 1) > 1)


def _context(record: Record) -> bool:
    return bool((record["parallelism"].get("context") or 1) > 1)


def _gated(record: Record) -> bool:
    return bool(record["model"].get("gated_mlp"))


def cites(repository: str, place: str) -> Callable[[Record], bool]:
    """Whether a published run is of `place` of a repository, whose scripts or logs say what its table does not."""

    def cited(record: Record) -> bool:
        citation = str((record.get("source") or {}).get("citation"))
        return citation.startswith(f"{repository}@") and place in citation

    return cited


_flagperf_llama2 = cites("FlagOpen/FlagPerf", "training/nvidia/llama2_7b-deepspeed/")


BENCHMARKS = (
    "NVIDIA-NeMo/Megatron-Bridge docs/performance-summary",
    "skills/nemo-mbridge-perf-",
)


def in_performance_summary(record: Record) -> bool:
    """Whether a record is a row of Megatron-Bridge's performance summary."""
    return BENCHMARKS[0] in str((record.get("source") or {}).get("citation"))


def _beyond_performance_summary(record: Record) -> bool:
    return not in_performance_summary(record)


def is_bridge_benchmark(record: Record) -> bool:
    """Whether a record's source is one of Megatron-Bridge's own benchmarks, which run its perf recipes."""
    citation = str((record.get("source") or {}).get("citation"))
    return any(benchmark in citation for benchmark in BENCHMARKS)


def brings_recipes(record: Record) -> bool:
    """Whether the record's trainer comes with performance recipes, as Megatron-Bridge does."""
    return bool(record["backend"] in BRIDGE)


def _benchmark_in_bf16(record: Record) -> bool:
    return in_bf16(record) and is_bridge_benchmark(record)


def _bf16_but_no_benchmark(record: Record) -> bool:
    return in_bf16(record) and not (brings_recipes(record) and is_bridge_benchmark(record))


@dataclass(frozen=True)
class Default:
    """The value a framework uses for `field`, "section.name" of a record; PRECISION stands for the number format of the
    computation. `source` is the file it was read in and for which versions; no row changed within them, so a version is
    not needed."""

    backends: tuple[str, ...]
    field: str
    value: Any
    source: str
    applies: Callable[[Record], bool] = _always


# Where Megatron core trains, its arguments and, for what Bridge's providers do not set, its configurations decide; else
# DeepSpeed trains a Hugging Face model.
CORE = tuple(name for name, trainer in RECORDED_TRAINERS.items() if trainer.framework.on_megatron_core)
BRIDGE = tuple(name for name in CORE if RECORDED_TRAINERS[name].brings_recipes)
LM = tuple(name for name in CORE if name not in BRIDGE)
DEEPSPEED = tuple(name for name in RECORDED_TRAINERS if name not in CORE)

CONFIG = "megatron/core/transformer/transformer_config.py, core 0.19"
PARALLEL = "megatron/core/model_parallel_config.py, core 0.19"
ARGUMENTS = "megatron/training/arguments.py, core 0.9 to 0.19"
PROVIDER = "src/megatron/bridge/models/gpt_provider.py, Megatron-Bridge 0.2 to 0.6"
PERF_RECIPES = "src/megatron/bridge/perf_recipes/_common.py, Megatron-Bridge 2026-08"
ENGINE = "deepspeed/runtime/engine.py get_data_types, DeepSpeed 0.19"
LAUNCHER = "deepspeed/launcher/launch.py, DeepSpeed 0.19"
ZERO_CONFIG = "deepspeed/runtime/zero/config.py, DeepSpeed 0.19"
FLAGPERF = "training/benchmarks/llama2_7b/deepspeed/run_pretraining.py, FlagPerf 1b5a030"
LLAMA = "transformers/models/llama/modeling_llama.py and configuration_llama.py, 5.x"

# In this order: a later row may ask for what an earlier one filled in.
DEFAULTS: tuple[Default, ...] = (
    Default(CORE, "recompute.granularity", "none", f"recompute_granularity None, {CONFIG}"),
    Default(DEEPSPEED, "recompute.granularity", "none", "gradient_checkpointing_enable is not called by itself"),
    Default(CORE, "recompute.modules", ["core_attn"], f"recompute_modules, {CONFIG}", _selective),
    Default(CORE, "recompute.method", "uniform", f"has no default: full recompute must name one, {CONFIG}", _full),
    Default(CORE, "recompute.num_layers", 1, f"has no default: full recompute must name it, {CONFIG}", _uniform),
    Default(BRIDGE, "optimizer.gradient_dtype", "bf16", f"_perf_precision, {PERF_RECIPES}", _benchmark_in_bf16),
    Default(CORE, "optimizer.gradient_dtype", "fp32", f"set with --bf16, {ARGUMENTS}", _bf16_but_no_benchmark),
    Default(CORE, "optimizer.gradient_dtype", PRECISION, f"the parameters' own, {ARGUMENTS}", not_in_bf16),
    Default(DEEPSPEED, "optimizer.gradient_dtype", PRECISION, f"grad_accum_dtype None, {ENGINE}"),
    Default(CORE, "optimizer.zero_stage", 1, f"of --use-distributed-optimizer, {ARGUMENTS}", _distributed),
    Default(CORE, "optimizer.zero_stage", 0, f"--use-distributed-optimizer is off, {ARGUMENTS}", _not_distributed),
    Default(DEEPSPEED, "optimizer.zero_stage", 0, f"stage 0, {ZERO_CONFIG}"),
    Default(CORE, "parallelism.sequence_parallel", False, f"sequence_parallel, {PARALLEL}", splits_tensors),
    Default(LM, "implementation.transformer_impl", "transformer_engine", f"transformer_impl, {CONFIG}; {ARGUMENTS}"),
    Default(BRIDGE, "implementation.transformer_impl", "transformer_engine", f"default_layer_spec, {PROVIDER}"),
    Default(CORE, "implementation.attention", "auto", f"attention_backend, {CONFIG}"),
    Default(DEEPSPEED, "implementation.attention", "auto", f"scaled_dot_product_attention chooses, {LLAMA}"),
    Default(LM, "implementation.cross_entropy_fusion", "none", f"cross_entropy_loss_fusion False, {PARALLEL}"),
    Default(BRIDGE, "implementation.cross_entropy_fusion", "native", f"cross_entropy_loss_fusion True, {PROVIDER}"),
    Default(DEEPSPEED, "implementation.cross_entropy_fusion", "none", "transformers/loss/loss_utils.py, 5.x"),
    Default(LM, "implementation.gradient_accumulation_fusion", True, f"--no-... turns it off, {ARGUMENTS}"),
    Default(BRIDGE, "implementation.gradient_accumulation_fusion", True, f"where its extension is there, {PROVIDER}"),
    Default(CORE, "implementation.defer_embedding_wgrad", False, f"defer_embedding_wgrad_compute, {PARALLEL}"),
    Default(CORE, "implementation.gated_activation_fused", True, f"bias_swiglu_fusion, {ARGUMENTS}", _gated),
    Default(LM, "implementation.expandable_segments", False, "off by torch's default, kept by megatron/training/*.py"),
    Default(
        BRIDGE,
        "implementation.expandable_segments",
        True,
        f"env_vars of {PERF_RECIPES}, llama/*/llama3.py",
        in_performance_summary,
    ),
    Default(
        BRIDGE,
        "implementation.expandable_segments",
        False,
        "off by torch's default; skills/*/card.yaml name the runs that switch it on, perf_recipes/*.py the others",
        _beyond_performance_summary,
    ),
    Default(
        DEEPSPEED, "implementation.expandable_segments", False, f"off by torch's default and not set by {LAUNCHER}"
    ),
    Default(DEEPSPEED, "implementation.gated_activation_fused", False, f"LlamaMLP, {LLAMA}", _gated),
    Default(
        DEEPSPEED,
        "implementation.memory_efficient_linear",
        False,
        f"zero.Init(mem_efficient_linear=False), {FLAGPERF}",
        _flagperf_llama2,
    ),
    Default(DEEPSPEED, "implementation.reduce_bucket_elements", 1e7, f"ds_config.json of {FLAGPERF}", _flagperf_llama2),
    Default(DEEPSPEED, "implementation.live_elements", 1e9, f"ds_config.json of {FLAGPERF}", _flagperf_llama2),
    Default(CORE, "implementation.cp_comm_type", "p2p", f"--cp-comm-type, {ARGUMENTS}", _context),
    Default(LM, "implementation.overlap_grad_reduce", False, f"--overlap-grad-reduce, {ARGUMENTS}"),
    Default(LM, "implementation.overlap_param_gather", False, f"--overlap-param-gather, {ARGUMENTS}"),
    Default(CORE, "model.tied_embeddings", True, f"--untie-embeddings-... is off, {ARGUMENTS}"),
    Default(CORE, "model.gated_mlp", False, f"--swiglu is off, {ARGUMENTS}"),
    Default(CORE, "model.linear_bias", True, f"--disable-bias-linear is off, {ARGUMENTS}"),
    Default(CORE, "model.normalization", "LayerNorm", f"normalization, {CONFIG}"),
    Default(CORE, "model.position_embedding", "learned_absolute", f"--position-embedding-type, {ARGUMENTS}"),
    Default(DEEPSPEED, "model.gated_mlp", True, f"LlamaMLP, {LLAMA}"),
    Default(DEEPSPEED, "model.normalization", "RMSNorm", f"LlamaRMSNorm, {LLAMA}"),
    Default(DEEPSPEED, "model.position_embedding", "rope", f"LlamaRotaryEmbedding, {LLAMA}"),
    Default(LM, "model.attention_dropout", 0.1, f"attention_dropout, {CONFIG}"),
    Default(LM, "model.hidden_dropout", 0.1, f"hidden_dropout, {CONFIG}"),
    Default(DEEPSPEED, "model.attention_dropout", 0.0, f"attention_dropout, {LLAMA}"),
)


def defaults_of(backend: str) -> tuple[Default, ...]:
    """Return the rows of a backend, in their order."""
    return tuple(row for row in DEFAULTS if backend in row.backends)


def with_defaults(record: Record, defaults: Sequence[Default]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the record with its nulls filled from the defaults of its trainer, and what was filled in, by field."""
    filled: dict[str, Any] = {**record}
    assumed: dict[str, Any] = {}
    for default in defaults:
        section, name = default.field.split(".")
        if filled[section].get(name) is None and default.applies(filled):
            value = record["precision"]["compute"] if default.value == PRECISION else default.value
            filled[section] = {**filled[section], name: value}
            assumed[default.field] = value
    return filled, assumed


# Nothing stands in for these: without one of them a record is not priced. "a.b" is a field of a section, and a field of
# the optional sections `moe` and `mla` is asked for only where there is one.
NEEDED = (
    "sequence_length",
    "micro_batch_size",
    "precision.compute",
    "parallelism.tensor",
    "model.num_layers",
    "model.hidden_size",
    "model.num_attention_heads",
    "model.ffn_hidden_size",
    "model.normalization",
    "model.position_embedding",
)
# Fields a record may leave out; absent is as unknown as null.
OPTIONAL = {
    "model": ("name", "tied_embeddings", "gated_mlp", "linear_bias", "normalization", "position_embedding"),
    "parallelism": ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor", "data"),
    "optimizer": ("name", "zero_stage", "gradient_dtype", "parameter_dtype"),
    "recompute": ("granularity", "method", "num_layers", "modules"),
    "precision": ("compute", "fp8_recipe", "fp8_param_gather", "fp4_param_gather"),
}
NEEDED_OF = {
    "moe": ("num_experts", "topk"),
    "mla": ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
}


def with_every_field(record: Record) -> dict[str, Any]:
    """Return the record with null for each field it leaves out."""
    return {**record, **{part: {**dict.fromkeys(names), **record[part]} for part, names in OPTIONAL.items()}}


def complete(record: Record, defaults: Sequence[Default]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the record with its trainer's defaults and with sizes worked out, and what was filled in, by field.

    Raises:
        Unsupported: a size that follows from nothing is not recorded.
    """
    filled, assumed = with_defaults(record, defaults)
    for field in NEEDED:
        if _value(filled, field) is None:
            raise Unsupported(f"{field} is not recorded, and nothing stands in for it")
    for part, names in NEEDED_OF.items():
        for name in names:
            if filled["model"].get(part) and filled["model"][part].get(name) is None:
                raise Unsupported(f"model.{part}.{name} is not recorded, and nothing stands in for it")
    for field, value in _derived_sizes(filled).items():
        section, name = field.split(".")
        if filled[section].get(name) is None:
            filled[section] = {**filled[section], name: value}
            assumed[field] = value
    return filled, assumed


def _value(record: Record, field: str) -> Any:
    value: Any = record
    for name in field.split("."):
        value = value.get(name)
    return value


def _derived_sizes(record: Record) -> dict[str, Any]:
    """Return the sizes that stand for nulls: one head of keys and values to each query head, heads that share the
    hidden size, no padding, no parallelism of a kind nobody named, and data parallelism over the remaining devices."""
    model, split = record["model"], record["parallelism"]
    vocabulary = model.get("padded_vocab_size") or model.get("vocab_size")
    if vocabulary is None:
        raise Unsupported("model.vocab_size is not recorded, and nothing stands in for it")
    ranks = split["tensor"] * (split.get("pipeline") or 1) * (split.get("context") or 1)
    return {
        "model.padded_vocab_size": vocabulary,
        "model.num_query_groups": model["num_attention_heads"],
        "model.head_dim": model["hidden_size"] // model["num_attention_heads"],
        "parallelism.pipeline": 1,
        "parallelism.context": 1,
        "parallelism.expert": 1,
        "parallelism.expert_tensor": split["tensor"] if model.get("moe") else 1,
        "parallelism.data": split.get("data") or _data(record, ranks),
    }


def _data(record: Record, ranks: int) -> int:
    world = record.get("world_size")
    if not world:
        raise Unsupported("neither parallelism.data nor world_size is recorded, so how states are shared is not known")
    return max(int(world) // ranks, 1)
