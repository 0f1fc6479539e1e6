"""`pretrain_gpt.py` of a Megatron-DeepSpeed checkout: `backend.script_kind: megatron-deepspeed`. A legacy profile.

Its parser is Megatron-LM's of 2023 with DeepSpeed's flags (deepspeedai/Megatron-DeepSpeed, megatron/arguments.py,
4efb479 of 2025-07, the last commit): the words for Megatron-LM, those that have another name said by it, those the
plan does without left out. What is left and the old parser has not is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import Argument, argument
from llmlaunch.frameworks.deepspeed.arguments import config_arguments
from llmlaunch.frameworks.deepspeed.config import ds_config
from llmlaunch.frameworks.deepspeed.rules import ANY_RULES
from llmlaunch.frameworks.megatron.model_arguments import model_arguments
from llmlaunch.frameworks.megatron.training_arguments import data_arguments, training_arguments
from llmlaunch.layout import RECOMPUTE_FULL, Layout, Rule, Situation
from llmlaunch.recipe.types import Recipe

__all__ = [
    "MEGATRON_DEEPSPEED_RULES",
    "TAKEN",
    "megatron_deepspeed_arguments",
    "megatron_deepspeed_config",
]

PARSER = "deepspeedai/Megatron-DeepSpeed megatron/arguments.py, 4efb479"
NAMES = {
    "--rotary-base": "--rotary-position-embeddings-theta",
    "--num-query-groups": "--num-key-value-heads",
    "--norm-epsilon": "--layernorm-epsilon",
}
VALUES = {"RMSNorm": "rmsnorm", "LayerNorm": "layernorm", "HuggingFaceTokenizer": "HFTokenizer"}
# What the plan does without: the old parser says nothing of it, or always does it.
LEFT_OUT = frozenset(
    (
        "--group-query-attention",  # --num-key-value-heads says it
        "--log-throughput",
        "--log-device-memory-used",
        "--no-create-attention-mask-in-dataloader",
        "--padded-vocab-size",
    )
)
# Flags of ours that the old parser has.
TAKEN = frozenset(
    (
        *("--num-layers", "--hidden-size", "--ffn-hidden-size", "--seq-length", "--max-position-embeddings"),
        *("--num-attention-heads", "--num-key-value-heads", "--kv-channels", "--attention-dropout", "--hidden-dropout"),
        *("--normalization", "--layernorm-epsilon", "--swiglu", "--disable-bias-linear"),
        *("--use-rotary-position-embeddings", "--rotary-position-embeddings-theta"),
        "--untie-embeddings-and-output-weights",
        *("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--no-pipeline-parallel"),
        *("--ds-sequence-parallel-size", "--zero-stage", "--deepspeed-activation-checkpointing"),
        *("--recompute-granularity", "--recompute-method", "--recompute-num-layers"),
        *("--micro-batch-size", "--global-batch-size", "--train-iters", "--seed", "--bf16", "--fp16"),
        *("--lr", "--min-lr", "--lr-decay-style", "--lr-warmup-iters"),
        *("--clip-grad", "--weight-decay", "--adam-beta1", "--adam-beta2"),
        *("--eval-iters", "--eval-interval", "--log-interval"),
        *("--data-path", "--split", "--data-cache-path", "--tokenizer-type", "--tokenizer-model", "--vocab-size"),
        *("--save", "--load", "--save-interval", "--exit-signal-handler", "--deepspeed", "--deepspeed_config"),
    )
)


def megatron_deepspeed_arguments(recipe: Recipe, layout: Layout) -> tuple[Argument, ...]:
    """Raises UserError for data it cannot read, and where the recipe asks for what its parser has no flag for."""
    if recipe.data.mock:
        raise UserError(
            f"{recipe.path}: data.mock: Megatron-DeepSpeed reads indexed datasets alone; name one in data.path"
        )
    planned = (
        *_said_as_then(model_arguments(recipe)),
        *_parallel(layout),
        *_recompute(layout),
        *_said_as_then(training_arguments(recipe, layout)),
        *_said_as_then(data_arguments(recipe, layout)),
        *_checkpoints(recipe),
        *config_arguments(),
    )
    for each in planned:
        if each.flag not in TAKEN:
            named = ", ".join(each.reason.keys) or "the plan"
            raise UserError(f"{recipe.path}: {named}: needs {each.flag}, which Megatron-DeepSpeed's parser has not")
    return planned


def _said_as_then(arguments: Iterable[Argument]) -> Iterator[Argument]:
    for each in arguments:
        if each.flag == "--position-embedding-type":
            if each.values == ("rope",):
                yield Argument("--use-rotary-position-embeddings", (), each.reason)
            elif each.values != ("learned_absolute",):
                yield each
        elif each.flag not in LEFT_OUT:
            values = tuple(VALUES.get(str(value), value) for value in each.values)
            yield Argument(NAMES.get(each.flag, each.flag), values, each.reason)


def _parallel(layout: Layout) -> list[Argument]:
    arguments = [
        argument("--tensor-model-parallel-size", layout.tensor, of="layout.tensor"),
        argument("--pipeline-model-parallel-size", layout.pipeline, of="layout.pipeline"),
        argument("--zero-stage", layout.zero_stage, of="layout.zero_stage"),
    ]
    if layout.pipeline == 1:
        arguments += [argument("--no-pipeline-parallel", of="layout.pipeline", why="else even one stage is a pipeline")]
    if layout.context > 1:
        arguments += [argument("--ds-sequence-parallel-size", layout.context, of="layout.context", why="Ulysses")]
    return arguments


def _recompute(layout: Layout) -> list[Argument]:
    if layout.recompute != RECOMPUTE_FULL:
        return []
    return [
        argument("--recompute-granularity", "full", of="layout.recompute"),
        argument("--recompute-method", "uniform", of="layout.recompute"),
        argument("--deepspeed-activation-checkpointing", of="layout.recompute"),
    ]


def _checkpoints(recipe: Recipe) -> list[Argument]:
    training = recipe.training
    if training.checkpoint_path is None or training.save_interval is None:
        return []
    return [
        argument("--save", training.checkpoint_path, of="training.checkpoint_path"),
        argument("--load", training.checkpoint_path, of="training.checkpoint_path"),
        argument("--save-interval", training.save_interval, of="training.save_interval"),
        argument("--exit-signal-handler", of="training.checkpoint_path", why="told by SIGTERM it saves and ends"),
    ]


def megatron_deepspeed_config(recipe: Recipe, layout: Layout) -> dict[str, Any]:
    """Megatron splits the layers and hands DeepSpeed its groups: the file says nothing of them, and the batch whole."""
    config = ds_config(recipe, layout)
    config.pop("tensor_parallel", None)
    config.pop("sequence_parallel_size", None)
    return config | {"train_batch_size": recipe.workload.global_batch_size}


def _divides(field: str, whole: str) -> Any:
    def allows(s: Situation) -> Any:
        return np.equal(getattr(s.shape, whole) % getattr(s.layouts, field), 0)

    return allows


MEGATRON_DEEPSPEED_RULES: tuple[Rule, ...] = (
    Rule(
        "megatron-pipeline-zero",
        "a pipeline runs with ZeRO 0 or 1",
        "deepspeed/runtime/pipe/engine.py PipelineEngine.__init__, 0.19.8",
        lambda s: np.equal(s.layouts.pipeline, 1) | np.less(s.layouts.zero_stage, 2),
        of_techniques=True,
    ),
    Rule(
        "megatron-heads",
        "--tensor-model-parallel-size must divide the attention heads",
        PARSER,
        _divides("tensor", "num_attention_heads"),
    ),
    Rule(
        "megatron-query-groups",
        "--tensor-model-parallel-size must divide --num-key-value-heads",
        "deepspeedai/Megatron-DeepSpeed megatron/model/transformer.py ParallelAttention, 4efb479",
        _divides("tensor", "num_query_groups"),
    ),
    Rule(
        "megatron-layers",
        "--pipeline-model-parallel-size must divide --num-layers, unless layers_by_stage says how "
        "--pp-partition-method among script_args splits them",
        PARSER,
        lambda s: s.layouts.uneven | np.equal(s.shape.num_layers % s.layouts.pipeline, 0),
    ),
    Rule(
        "megatron-ulysses-heads",
        "--ds-sequence-parallel-size must divide the attention heads",
        "deepspeed/sequence/layer.py DistributedAttention, 0.19.8",
        _divides("context", "num_attention_heads"),
    ),
    Rule(
        "megatron-ulysses-alone",
        "Ulysses runs without a pipeline: set pipeline or context to 1",
        PARSER,
        lambda s: np.equal(s.layouts.pipeline, 1) | np.equal(s.layouts.context, 1),
    ),
    *ANY_RULES,
)
