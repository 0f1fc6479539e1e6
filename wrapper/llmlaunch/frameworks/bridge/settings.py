"""What Megatron-Bridge's ConfigContainer is filled with, a value for each of its fields that a recipe decides.

The model, the layout and the training are those of Megatron-LM's arguments: each argument that would be rendered for
backend: megatron-lm becomes the field that this argument sets there, and keeps its reason. So both backends configure
Megatron core alike. An argument that has no field here is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from llmlaunch.documents.nested import put_at
from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import Argument, NodeVariable, Reason, Word
from llmlaunch.frameworks.bridge.overrides import overrides
from llmlaunch.frameworks.megatron.arguments import planned_arguments
from llmlaunch.frameworks.megatron.flags.row import Parsed
from llmlaunch.frameworks.megatron.flags.table import bridge_fields
from llmlaunch.frameworks.megatron.parser import NEWEST, ParserFlag, core_parser
from llmlaunch.frameworks.megatron.program import BLACKWELL
from llmlaunch.frameworks.megatron.sharding import FIRST_STAGE
from llmlaunch.layout import Layout
from llmlaunch.models.shape import ModelShape
from llmlaunch.recipe.types import Recipe

Settings = dict[str, tuple[Any, Reason]]
"""Value and reason by the dotted name of a field: "model.num_layers"."""

MODEL, ADAM, DDP = "model", "optimizer", "ddp"

# Where Megatron-LM's parser and Bridge's classes disagree, the parser's value is said (megatron/training/arguments.py,
# core 0.19; megatron/bridge/training/config.py, 0.6): recipes plan what Megatron-LM does.
MEGATRON_DEFAULTS: Mapping[str, Any] = {
    f"{MODEL}.bias_dropout_fusion": True,
    f"{MODEL}.bias_activation_fusion": True,
    f"{MODEL}.persist_layer_norm": True,
    f"{MODEL}.cp_comm_type": "p2p",
    f"{MODEL}.pipeline_dtype": "fp32",
    f"{MODEL}.cross_entropy_loss_fusion": False,
    f"{ADAM}.min_lr": 0.0,
    f"{ADAM}.barrier_with_L1_time": True,
    f"{ADAM}.optimizer_offload_fraction": 1.0,
    f"{DDP}.check_for_nan_in_grad": True,
    "rerun_state_machine.rerun_mode": "validate_results",
    "checkpoint.use_persistent_ckpt_worker": False,
    "checkpoint.strict_fsdp_dtensor_load": True,
    "dataset.reset_position_ids": False,
    "dataset.reset_attention_mask": False,
    "dataset.eod_mask_loss": False,
    "dataset.dataloader_type": "single",
}
"""Values that follow from no key of a recipe."""


def settings_of(recipe: Recipe, layout: Layout) -> Settings:
    """Return what the container is filled with.

    Raises:
        UserError: Bridge has no field for an argument that the recipe asks for.
    """
    chosen = Reason(why="as Megatron-LM does, and not Bridge's default")
    settings: Settings = {name: (value, chosen) for name, value in MEGATRON_DEFAULTS.items()}
    settings |= _derived(recipe, layout)
    arguments = planned_arguments(recipe, layout)
    flags, fields = core_parser(NEWEST).flags, bridge_fields()
    for each in arguments:
        if each.flag not in fields:
            key = each.reason.keys[0] if each.reason.keys else each.flag
            raise UserError(
                f"{recipe.path}: {key}: backend: megatron-bridge has no setting for it ({each.flag} of Megatron-LM); "
                "remove it, or take backend: megatron-lm"
            )
        for name, value in fields[each.flag]:
            settings[name] = (_value(value, each, flags[each.flag]), each.reason)
    if recipe.data.format is not None:
        settings = {name: value for name, value in settings.items() if not name.startswith("dataset.")} | _rows(recipe)
    if recipe.data.packed:
        settings |= _packs(recipe, layout)
    settings |= _adapters(recipe)
    settings = _with_yarn(settings)
    decided = {name for each in fields.values() for name, _ in each}
    decided |= {name for name, (_, reason) in settings.items() if reason.keys}
    sections = SECTIONS if recipe.techniques.adapters is None else (*SECTIONS, "peft")
    return settings | overrides(recipe, sections, decided)


UNSCALED = "what an adapter puts out is scaled by alpha / dim"
IN_LATENTS = "attention in latents has these in place of linear_qkv"


def _adapters(recipe: Recipe) -> Settings:
    adapters, rank = recipe.techniques.adapters, Reason(("training.adapters.rank",))
    if adapters is None:
        return {}
    settings: Settings = {"peft.dim": (adapters.rank, rank), "peft.alpha": (adapters.rank, replace(rank, why=UNSCALED))}
    targets, mla = adapters.fused_targets(recipe.model.gated_mlp) or (), recipe.model.mla
    named = Reason(("training.adapters.target_modules",))
    if mla is not None and "linear_qkv" in targets:
        queries = ("linear_q_proj",) if mla.q_lora_rank is None else ("linear_q_down_proj", "linear_q_up_proj")
        latents = (*queries, "linear_kv_down_proj", "linear_kv_up_proj")
        targets, named = (*latents, *(name for name in targets if name != "linear_qkv")), replace(named, why=IN_LATENTS)
    if adapters.target_modules or mla is not None:
        settings["peft.target_modules"] = (list(targets), named)
    return settings


def task_of(recipe: Recipe) -> str:
    """Return the function of Bridge's that trains: `finetune` is `pretrain` that wants weights to begin with."""
    return "pretrain" if recipe.data.format is None and recipe.techniques.adapters is None else "finetune"


def _rows(recipe: Recipe) -> Settings:
    """Rows of text, tokenized while the job runs, each filled up to a whole sequence: the memory that was planned, and
    what stages of a pipeline send each other is of one size (data/datasets/gpt_sft.py collate_fn, 0.6)."""
    filled = Reason(("training.sequence_length",), "every row takes a whole sequence, as planned")
    alike = Reason(("data.format",), "every token of an answer counts alike, however the step is split")
    source, evaluation = Reason(("data.path",)), Reason(("training.evaluation",))
    return {
        "dataset.kind": ("rows", Reason(("data.format",))),
        "dataset.preprocessing": ({"kind": recipe.data.format}, Reason(("data.format",))),
        "dataset.dataset_root": (recipe.data.path, source),
        "dataset.seq_length": (recipe.workload.sequence_length, Reason(("training.sequence_length",))),
        "dataset.dataset_kwargs": ({"pad_to_max_length": True}, filled),
        "dataset.seed": (recipe.training.seed, Reason(("training.seed",))),
        "dataset.do_validation": (recipe.training.evaluation is not None, evaluation),
        "dataset.do_test": (False, Reason(why="nobody asked")),
        f"{MODEL}.calculate_per_token_loss": (True, alike),
        f"{DDP}.average_in_collective": (False, alike),
    }


def _packs(recipe: Recipe, layout: Layout) -> Settings:
    """Rows one after another in each sequence. Context parallelism cuts every row into two pieces for each rank
    (recipes/llama/h100/llama3.py, 0.6)."""
    packed = Reason(("data.packed",))
    whole = Reason(("data.packed", "training.sequence_length"), "a sequence is filled with rows, and no row is longer")
    pieces = 2 * layout.context if layout.context > 1 else 1
    cut = Reason(("data.packed", "layout.context"), "each context rank has two pieces of every row")
    specs = "dataset.offline_packing_specs"
    return {
        "dataset.enable_offline_packing": (True, packed),
        f"{specs}.packed_sequence_size": (recipe.workload.sequence_length, whole),
        f"{specs}.pad_seq_to_mult": (pieces, cut),
    }


def _derived(recipe: Recipe, layout: Layout) -> Settings:
    """What `validate_args` and gpt_config_from_args make of several arguments (megatron/training, core 0.19), and
    nobody does in Bridge."""
    shape = recipe.model
    interleaved = layout.virtual_pipeline > 1
    chunks = Reason(("layout.virtual_pipeline",), "messages overlap with the computation of other chunks alone")
    rotated = Reason(("model.position_embedding",), "the fused kernel rotates plainly")
    biased = Reason(("model.linear_bias",), "those of queries, keys and values among them")
    wide = recipe.workload.precision == "bf16"  # unless a flag says otherwise
    gradients = Reason(("training.precision",), "gradients accumulate in fp32" if wide else "as parameters")
    tied = shape.tied_embeddings, Reason(("model.tied_embeddings",), "classes of models do not agree on it")
    padded = Reason(("model.vocab_size", "layout.tensor"), "Bridge does not pad a number that it is told")
    first = Reason(("layout.zero_stage",), "gathers of parameters go before computation, from Blackwell on")
    capability = recipe.cluster.accelerator.compute_capability
    hurried = layout.zero_stage >= FIRST_STAGE and capability is not None and float(capability) >= BLACKWELL
    fused = Reason(why="where there is no kernel for it, Bridge would go on without, and take more memory")
    groups = ["dp_cp", *(["ep_dp"] if layout.expert > 1 else [])]
    tensorwise = Reason(("training.fp8",), "slices of a tensor would be read with scales of their own")
    return {
        **({"checkpoint.stream_ckpt_dequant": (False, tensorwise)} if recipe.training.fp8 == "tensorwise" else {}),
        **({"dist.high_priority_stream_groups": (groups, first)} if hurried else {}),
        f"{MODEL}.overlap_p2p_comm": (interleaved, chunks),
        f"{MODEL}.batch_p2p_comm": (not interleaved, chunks),
        f"{DDP}.align_param_gather": (interleaved, chunks),
        f"{MODEL}.apply_rope_fusion": (_rotates_plainly(shape), rotated),
        f"{MODEL}.add_qkv_bias": (shape.linear_bias, biased),
        f"{MODEL}.gradient_accumulation_fusion": (True, fused),
        **({} if shape.mla is None else LATENT | _stretched_latents(shape)),
        **({} if shape.mamba is None else HYBRID | {f"{MODEL}.share_embeddings_and_output_weights": tied}),
        **({} if shape.mamba is None or wide else HYBRID_IN_FP32),
        f"{DDP}.grad_reduce_in_fp32": (wide, gradients),
        f"{MODEL}.vocab_size": (shape.padded_vocab_size(layout.tensor), padded),
        f"{MODEL}.should_pad_vocab": (False, padded),
    }


# The class for latent attention has defaults of one model, and for the rest those of core (MLATransformerConfig, core
# 0.19; models/mla_provider.py, 0.6).
_OF_ALL = Reason(("model.mla",), "as all other models have it")
LATENT: Settings = {
    f"{MODEL}.attention_softmax_in_fp32": (False, _OF_ALL),
    f"{MODEL}.masked_softmax_fusion": (True, _OF_ALL),
    f"{MODEL}.deallocate_pipeline_outputs": (True, _OF_ALL),
    f"{MODEL}.q_lora_rank": (None, Reason(("model.mla.q_lora_rank",), "queries have no latent")),
    f"{MODEL}.rotary_scaling_factor": (1.0, Reason(("model.rope_scaling",), "positions are not stretched")),
}


def _stretched_latents(shape: ModelShape) -> Settings:
    """What yarn of latent attention has no argument for in Megatron-LM, where it is not what MLATransformerConfig has
    (core 0.19)."""
    at = shape.rope_scaling
    if at is None or at.kind != "yarn":
        return {}
    usual = {"original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
    other = {name: getattr(at, name) for name, value in usual.items() if getattr(at, name) != value}
    return {f"{MODEL}.{name}": (value, Reason((f"model.rope_scaling.{name}",))) for name, value in other.items()}


# The class for layers of one part each has core's defaults and some of its own (hybrid_provider.py, 0.6).
_BESIDE_MIXERS = Reason(("model.mamba",), "as pretrain_hybrid.py has it")
HYBRID: Settings = {
    f"{MODEL}.is_hybrid_model": (True, _BESIDE_MIXERS),
    f"{MODEL}.attention_backend": ("auto", _BESIDE_MIXERS),
    f"{MODEL}.attention_softmax_in_fp32": (False, _BESIDE_MIXERS),
    f"{MODEL}.masked_softmax_fusion": (True, _BESIDE_MIXERS),
}


# The same class computes in bf16 by default, and other classes in fp32; --fp16 sets its formats after these.
_NOT_BF16 = Reason(("training.precision",), "the class for layers of one part each computes in bf16 by default")
HYBRID_IN_FP32: Settings = {
    f"{MODEL}.bf16": (False, _NOT_BF16),
    f"{MODEL}.params_dtype": ("fp32", _NOT_BF16),
    f"{MODEL}.autocast_dtype": ("fp32", _NOT_BF16),
}


def _rotates_plainly(shape: ModelShape) -> bool:
    stretched = shape.rope_scaling is not None and shape.rope_scaling.kind == "yarn" and shape.mla is None
    return shape.position_embedding == "rope" and not stretched


# Their names on the command line, and what YarnRotaryEmbedding takes without them (megatron/training/argument_utils.py
# _apply_yarn_config_from_args, core 0.19).
YARN: Mapping[str, tuple[str, Any]] = {
    "yarn_rotary_scaling_factor": (f"{MODEL}.rotary_scaling_factor", 1.0),
    "yarn_mscale": (f"{MODEL}.mscale", 1.0),
    "yarn_mscale_all_dim": (f"{MODEL}.mscale_all_dim", 0.0),
    "yarn_original_max_position_embeddings": (f"{MODEL}.yarn_original_max_position_embeddings", 4096),
    "yarn_beta_fast": (f"{MODEL}.yarn_beta_fast", 32.0),
    "yarn_beta_slow": (f"{MODEL}.yarn_beta_slow", 1.0),
    "yarn_correction_range_round_to_int": (f"{MODEL}.yarn_correction_range_round_to_int", True),
}


def _with_yarn(settings: Settings) -> Settings:
    """Attention that is not latent has names of its own for yarn."""
    kind, reason = settings[f"{MODEL}.position_embedding_type"]
    if kind != "yarn":
        return settings
    stated = {f"{MODEL}.{name}": settings.get(flag, (default, reason)) for name, (flag, default) in YARN.items()}
    return {name: value for name, value in settings.items() if name not in dict(YARN.values())} | stated


def _value(value: Any, argument: Argument, flag: ParserFlag) -> Any:
    if isinstance(value, Parsed):
        return _parsed(argument, flag)
    return value(_parsed(argument, flag)) if callable(value) else value


def _parsed(argument: Argument, flag: ParserFlag) -> Any:
    """What Megatron's parser makes of the words, as JSON has it."""
    if flag.values == 0:
        return flag.sets == "True"
    values = [_number(word, flag.type) for word in argument.values]
    if flag.values != 1:
        return values
    return values[0]


NUMBERS: Mapping[str | None, Callable[[str], Any]] = {"int": int, "float": float}


def _number(word: Word, kind: str | None) -> Any:
    if isinstance(word, NodeVariable):
        return {"variable": word.name, "suffix": word.suffix}
    if kind in NUMBERS:
        return NUMBERS[kind](word)
    if kind in ("moe_freq_type", "la_freq_type", "no_rope_freq_type"):
        return json.loads(word) if word.startswith("[") else int(word)
    if kind == "tuple_type":
        return [int(part) for part in word.split(",")]
    return word


def as_json(settings: Settings, task: str) -> bytes:
    """Return the file that the rendered program reads, its sections by the names of ConfigContainer's fields."""
    whole: dict[str, Any] = {"task": task}
    for section in SECTIONS:
        whole[section] = {}
    for name, (value, _) in settings.items():
        put_at(whole, name, value)
    return (json.dumps(whole, indent=2) + "\n").encode()


SECTIONS = (
    *("model", "train", "validation", "scheduler", "optimizer", "ddp", "dataset", "tokenizer", "checkpoint"),
    *("logger", "rng", "dist", "rerun_state_machine"),
)
