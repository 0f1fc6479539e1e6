"""Megatron-LM arguments for the training (core 0.19): batch, schedule, optimizer, log, data and checkpoints."""

from __future__ import annotations

from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import (
    ALLOCATOR_SETTINGS,
    EXPANDABLE_SEGMENTS,
    RUN_DIR,
    Argument,
    NodeVariable,
    argument,
    blend_words,
    number,
    optional,
)
from llmlaunch.frameworks.base import Requirement
from llmlaunch.frameworks.checkpoints import RESHARDING_FLAG, saved_by_parameter
from llmlaunch.frameworks.megatron.number_formats import number_arguments
from llmlaunch.frameworks.megatron.sharding import FIRST_STAGE, asks_for_sharding, pinned_stages
from llmlaunch.frameworks.megatron.versions import core_parser, rendered_version
from llmlaunch.layout import Layout
from llmlaunch.recipe.datasets import Data
from llmlaunch.recipe.tracking import NO_TRACKING
from llmlaunch.recipe.training import default_schedule
from llmlaunch.recipe.types import Recipe

__all__ = ["CHECKPOINT_REQUIREMENTS", "checkpoint_arguments", "data_arguments", "training_arguments", "warmup_steps"]


MEGATRON_FIRST_BETA = 0.9  # --adam-beta1's default


def training_arguments(recipe: Recipe, layout: Layout) -> tuple[Argument, ...]:
    """Return the arguments for batch, schedule, optimizer, number formats and log."""
    return (*_batch(recipe, layout), *_optimizer(recipe), *_log(recipe), *number_arguments(recipe, layout))


def _batch(recipe: Recipe, layout: Layout) -> list[Argument]:
    return [
        argument("--micro-batch-size", layout.micro_batch_size, of="layout.micro_batch_size"),
        argument("--global-batch-size", recipe.workload.global_batch_size, of="training.global_batch_size"),
        argument("--train-iters", recipe.training.steps, of=("training.steps", "training.tokens")),
    ]


def _optimizer(recipe: Recipe) -> list[Argument]:
    training = recipe.training
    first, second = training.adam_betas
    least = repr(training.minimum_learning_rate) if training.minimum_learning_rate else None
    first_beta = number(first) if first != MEGATRON_FIRST_BETA else None
    return [
        argument("--lr", repr(training.learning_rate), of="training.learning_rate"),
        *_decay(recipe),
        _warmup(recipe),
        argument("--clip-grad", training.gradient_clipping, of="training.gradient_clipping"),
        argument("--weight-decay", training.weight_decay, of="training.weight_decay"),
        *optional("--min-lr", least, of="training.minimum_learning_rate"),
        *optional("--adam-beta1", first_beta, of="training.adam_betas"),
        argument("--adam-beta2", number(second), of="training.adam_betas"),
        argument("--seed", training.seed, of="training.seed"),
    ]


def _decay(recipe: Recipe) -> list[Argument]:
    """Without a word of the recipe's, the person's own extra argument decides, such as Megatron's WSD."""
    flag, stated = "--lr-decay-style", recipe.training.learning_rate_decay
    if stated is None and any(word.split("=", 1)[0] == flag for word in recipe.backend.extra_args):
        return []
    why = "as the Llama models were trained" if stated is None else ""
    decay = stated or default_schedule(recipe.backend.name, recipe.backend.script_kind, recipe.training.steps).decay
    return [argument(flag, decay, of="training.learning_rate_decay", why=why)]


def warmup_steps(recipe: Recipe) -> int:
    """Return the steps over which the learning rate rises: the recipe's, or what is usual."""
    stated = recipe.training.warmup_steps
    if stated is not None:
        return stated
    return default_schedule(recipe.backend.name, recipe.backend.script_kind, recipe.training.steps).warmup_steps


def _warmup(recipe: Recipe) -> Argument:
    flag, steps = "--lr-warmup-iters", warmup_steps(recipe)
    if recipe.training.warmup_steps is not None:
        return argument(flag, steps, of="training.warmup_steps")
    return argument(flag, steps, of=("training.steps", "training.tokens"), why="a hundredth of the steps")


def _log(recipe: Recipe) -> list[Argument]:
    training = recipe.training
    evaluation = [
        argument("--eval-iters", 0, why="the recipe has no training.evaluation"),
        argument("--eval-interval", training.steps, why="no default in core 0.19, yet training.py divides by it"),
    ]
    if training.evaluation is not None:
        evaluation = [
            argument("--eval-iters", training.evaluation.iterations, of="training.evaluation"),
            argument("--eval-interval", training.evaluation.interval, of="training.evaluation"),
        ]
    return [
        *evaluation,
        argument("--log-interval", training.log_interval, of="training.log_interval"),
        argument("--log-throughput", why="for whoever reads the log"),
        argument("--log-device-memory-used", why="for whoever reads the log, beside what the monitor measures"),
        *_tracking(recipe),
    ]


def _tracking(recipe: Recipe) -> list[Argument]:
    """Return the arguments for TensorBoard and Weights & Biases, which the last rank writes.

    It logs to W&B only what it logs to TensorBoard, and only where that has a folder (training_log, training/
    training.py, core 0.16 and 0.19). The id of the run and that it goes on come from the environment."""
    run, folder = recipe.tracking.wandb, recipe.tensorboard
    key = "training.tensorboard" if recipe.training.tensorboard else "tracking.tensorboard"
    timed = "seconds and throughput of a step are among the curves"
    arguments = [
        *optional("--tensorboard-dir", folder, of=key),
        *optional("--log-timers-to-tensorboard", recipe.tracking != NO_TRACKING, of="tracking", why=timed),
    ]
    if run is None:
        return arguments
    if folder is None:
        why = "Megatron logs to W&B only what it writes for TensorBoard, too"
        arguments.append(
            argument("--tensorboard-dir", NodeVariable(RUN_DIR, "/tensorboard"), of="tracking.wandb", why=why)
        )
    place = run.save_dir or NodeVariable(RUN_DIR)
    return [
        *arguments,
        argument("--wandb-project", run.project, of="tracking.wandb.project"),
        *optional("--wandb-entity", run.entity, of="tracking.wandb.entity"),
        argument("--wandb-exp-name", NodeVariable("WANDB_NAME"), of="tracking.wandb.name"),
        argument("--wandb-save-dir", place, of="tracking.wandb.save_dir", why="its default is below --save"),
    ]


NUMBERS, HUGGING_FACE = "NullTokenizer", "HuggingFaceTokenizer"


def data_arguments(recipe: Recipe, layout: Layout) -> tuple[Argument, ...]:
    """Raises UserError for data that only the DeepSpeed trainer reads."""
    data = recipe.data
    if data.python_source:
        raise UserError(
            f"{recipe.path}: data.python_source: is for the DeepSpeed trainer; Megatron-LM reads indexed datasets "
            "(data.path, data.blend) or made-up data (data.mock: true)"
        )
    causal = "fused attention is causal by itself; masks would take sequence x sequence bytes of every sample"
    mask = [] if data.attention_masks else [argument("--no-create-attention-mask-in-dataloader", why=causal)]
    source = [argument("--mock-data", of="data.mock")] if data.mock else _files(data)
    return (*mask, *source, *_tokenizer(recipe, layout))


def _files(data: Data) -> list[Argument]:
    """Validation data of its own excludes --data-path and --split (BlendedMegatronDatasetConfig,
    core/datasets/blended_megatron_dataset_config.py, core 0.19)."""
    flag = "--train-data-path" if data.validation else "--data-path"
    if data.blend:
        arguments = [argument(flag, *blend_words(data.blend), of="data.blend")]
    else:
        arguments = [argument(flag, data.path, of="data.path")]
    if data.validation:
        arguments.append(argument("--valid-data-path", *blend_words(data.validation), of="data.validation"))
    else:
        why = "" if data.split else "a hundredth is kept apart"
        arguments.append(argument("--split", data.shares, of="data.split", why=why))
    return [*arguments, *optional("--data-cache-path", data.cache_path, of="data.cache_path")]


def _tokenizer(recipe: Recipe, layout: Layout) -> list[Argument]:
    """Megatron makes as many rows of the embedding as the tokenizer has words, padded (build_tokenizer,
    core/tokenizers/utils/build_tokenizer.py, core 0.19), unless it is told: the plan's are said."""
    data, shape = recipe.data, recipe.model
    kind = data.tokenizer_type or (HUGGING_FACE if data.tokenizer else NUMBERS)
    none = "tokens are numbers already" if kind == NUMBERS else ""
    arguments = [argument("--tokenizer-type", kind, of=("data.tokenizer", "data.tokenizer_type"), why=none)]
    if kind == NUMBERS:
        return [*arguments, argument("--vocab-size", shape.vocab_size, of="model.vocab_size")]
    planned = "the plan's number, whatever the tokenizer counts"
    size = shape.padded_vocab_size(layout.tensor)
    return [
        *arguments,
        *optional("--tokenizer-model", data.tokenizer, of="data.tokenizer"),
        argument("--padded-vocab-size", size, of=("model.vocab_size", "layout.tensor"), why=planned),
    ]


def checkpoint_arguments(recipe: Recipe, layout: Layout) -> tuple[Argument, ...]:
    """The weights of the first step, and where checkpoints are written and read.

    --pretrained-checkpoint is read only where --load has no checkpoint yet (load_checkpoint, training/checkpointing.py,
    core 0.19), without optimizer and from step 0, so a job that comes back goes on from its own; without --load it is
    always read. Where it holds no checkpoint, Megatron ends with an error.

    Told by SIGTERM (--exit-signal's default), Megatron saves after the step and exits with 0; workers of its data
    loader then ignore that signal, too (training/datasets/data_samplers.py, core 0.16 on). Where --load is empty, it
    begins at step 0."""
    training = recipe.training
    first = "read by the first start alone: where --load has a checkpoint, that one wins"
    start = optional("--pretrained-checkpoint", training.start_from, of="training.start_from", why=first)
    begun = (*start, *_format(recipe, layout))
    if training.checkpoint_path is None or training.save_interval is None:
        return begun
    place, key = training.checkpoint_path, "training.checkpoint_path"
    arguments = [
        argument("--save", place, of=key),
        argument("--load", place, of=key, why="a job that comes back goes on from its last checkpoint"),
        argument("--save-interval", training.save_interval, of="training.save_interval"),
        argument("--exit-signal-handler", of="restart", why="saves and ends when it is told to"),
    ]
    if training.non_persistent_save_interval is not None:
        often = "training.non_persistent_save_interval"
        arguments += [
            argument("--non-persistent-save-interval", training.non_persistent_save_interval, of=often),
            argument("--non-persistent-ckpt-type", "global", of=often, why="in the checkpoint folder, for every node"),
        ]
    if training.async_save:
        arguments += _asynchronous(recipe)
    requested = RESHARDING_FLAG in recipe.backend.extra_args
    if layout.zero_stage == 1 and saved_by_parameter(recipe, layout) and not requested:
        keys = ("on_oom", "nodes.at_least")
        arguments.append(argument(RESHARDING_FLAG, of=keys, why="another layout may have to load it"))
    return (*begun, *arguments)


def _asynchronous(recipe: Recipe) -> list[Argument]:
    """Core switches --async-save off, with a warning alone, where there is no persistent worker (arguments.py
    validate_args, core 0.16 and 0.19). Core 0.19 takes nvidia-resiliency-ext for it unless it is told to use its own
    (get_async_strategy, core/dist_checkpointing/strategies/torch.py), which core 0.16 always does."""
    key = "training.async_save"
    arguments = [
        argument("--async-save", of=key),
        argument("--use-persistent-ckpt-worker", of=key, why="without it --async-save is switched off"),
    ]
    if "--async-strategy" in core_parser(rendered_version(recipe)).flags:
        arguments.append(argument("--async-strategy", "mcore", of=key, why="the other needs nvidia-resiliency-ext"))
    return arguments


def _format(recipe: Recipe, layout: Layout) -> tuple[Argument, ...]:
    """Megatron-FSDP takes no other format than its own, checkpoints or not."""
    if layout.zero_stage >= FIRST_STAGE:
        return (argument("--ckpt-format", "fsdp_dtensor", of="layout.zero_stage", why="Megatron-FSDP takes no other"),)
    if recipe.training.checkpoint_path is None:
        return ()
    requested, key = recipe.training.checkpoint_format, "training.checkpoint_format"
    why = "" if requested else "loaded under another split, too"
    return (argument("--ckpt-format", requested or "torch_dist", of=key, why=why),)


ARGUMENTS = "megatron/training/arguments.py validate_args, core 0.19"
KEY = "training.checkpoint_format"

CHECKPOINT_REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        "async-format",
        "training.async_save",
        "writes torch_dist alone: torch cannot, and fsdp_dtensor needs nvidia-resiliency-ext; remove it, or take "
        "torch_dist with zero_stage 0 or 1",
        "megatron/training/checkpointing.py save_checkpoint, megatron/training/config/training_config.py, core 0.19",
        lambda r: (
            r.training.async_save and (r.training.checkpoint_format not in (None, "torch_dist") or asks_for_sharding(r))
        ),
    ),
    Requirement(
        "async-on-a-gpu",
        "training.async_save",
        "needs a GPU, to which the process that writes binds itself; remove it",
        "megatron/core/dist_checkpointing/strategies/async_utils.py PersistentAsyncCaller.async_loop, core 0.19",
        lambda r: r.training.async_save and r.cluster.accelerator.kind != "gpu",
    ),
    Requirement(
        "async-whole-segments",
        "training.async_save",
        "the process that writes cannot read tensors in expandable segments; remove expandable_segments:True from "
        "environment.PYTORCH_CUDA_ALLOC_CONF, or async_save",
        "c10/cuda/CUDACachingAllocator.cpp ExpandableSegment::fromShared, torch 2.13",
        lambda r: r.training.async_save and EXPANDABLE_SEGMENTS in r.environment.get(ALLOCATOR_SETTINGS, ""),
    ),
    Requirement(
        "non-persistent-format",
        "training.non_persistent_save_interval",
        "is read back in torch_dist alone; remove it, or take torch_dist with zero_stage 0 or 1",
        "megatron/training/checkpointing.py save_checkpoint and _load_non_persistent_base_checkpoint, core 0.19",
        lambda r: (
            r.training.non_persistent_save_interval is not None
            and (r.training.checkpoint_format not in (None, "torch_dist") or asks_for_sharding(r))
        ),
    ),
    Requirement(
        "no-torch-dcp",
        KEY,
        "torch_dcp needs --use-torch-fsdp2, which is not planned; write fsdp_dtensor with zero_stage 2 or 3",
        ARGUMENTS,
        lambda r: r.training.checkpoint_format == "torch_dcp",
    ),
    Requirement(
        "sharded-format",
        KEY,
        "zero_stage 2 and 3 take fsdp_dtensor alone; remove it",
        ARGUMENTS,
        lambda r: asks_for_sharding(r) and r.training.checkpoint_format not in (None, "fsdp_dtensor"),
    ),
    Requirement(
        "format-of-sharded",
        KEY,
        "fsdp_dtensor needs zero_stage 2 or 3; pin one, or remove it",
        ARGUMENTS,
        lambda r: r.training.checkpoint_format == "fsdp_dtensor" and not asks_for_sharding(r),
    ),
    Requirement(
        "old-format-whole-optimizer",
        KEY,
        "torch needs zero_stage: 0 pinned: one rank would gather the states of a sharded optimizer in host memory",
        "megatron/core/optimizer/distrib_optimizer.py get_parameter_state_dp_zero, core 0.19",
        lambda r: r.training.checkpoint_format == "torch" and set(pinned_stages(r)) != {0},
    ),
)
