"""The two JSON files of a DeepSpeed job: ds_config.json, and the model the shipped script builds, as Hugging Face's
configuration.

DeepSpeed refuses unknown keys inside its sections but not at the top level, and takes "auto" silently for a default
(deepspeed/runtime/config_utils.py, 0.19.8): every key here is known and every value explicit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from llmlaunch.errors import UserError
from llmlaunch.frameworks.argument import Reason
from llmlaunch.frameworks.deepspeed.facts import OFFLOAD_GROUPS, SUB_GROUP_ELEMENTS
from llmlaunch.frameworks.deepspeed.own_settings import OWN_REASON, own_number
from llmlaunch.frameworks.deepspeed.rules import split_sections
from llmlaunch.frameworks.deepspeed.techniques import checkpointing_section, offload_sections, wide_gradients
from llmlaunch.layout import Layout
from llmlaunch.models.huggingface.written import UNBALANCED, config_of, unsaid
from llmlaunch.models.parameters import count_parameters
from llmlaunch.models.shape import ModelShape
from llmlaunch.recipe.types import Recipe

__all__ = [
    "REASONS",
    "bucket_elements",
    "dotted_keys",
    "ds_config",
    "live_parameters",
    "model_config",
    "refuse_what_the_trainer_cannot_build",
    "settings",
    "to_json",
]


Json = dict[str, Any]

# Elements in one collective. DeepSpeed's default is 5e8 (1 GB in bf16, and copies of it); 100 MB fill a link as well.
# Of a small model a tenth, because a bucket is allocated whole.
MOST_BUCKET = 50_000_000
LEAST_BUCKET = 1_000_000
LIVE_PARAMETERS = 1_000_000_000
PERSISTENT_PARAMETER = 100_000  # smaller tensors (norms) stay whole on every rank


def ds_config(recipe: Recipe, layout: Layout) -> Json:
    """The whole of ds_config.json. The batch triple is exact: total = micro x accumulation x data.

    With AutoTP the total is left out: without a process mesh of the script's own DeepSpeed takes tensor parallel ranks
    for data parallel ones when it checks the three (runtime/config.py __init__, 0.19.8)."""
    work = recipe.workload
    config: Json = {
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.num_microbatches(work.global_batch_size),
        "gradient_clipping": recipe.training.gradient_clipping,
        "steps_per_print": recipe.training.log_interval,
        # The script brings torch's AdamW: DeepSpeed's own would be compiled on the node first.
        "zero_allow_untested_optimizer": True,
        "zero_optimization": _zero(recipe, layout),
        **split_sections(recipe, layout),
        **checkpointing_section(recipe.techniques),
    }
    config |= _monitors(recipe)
    if layout.tensor == 1:
        config["train_batch_size"] = work.global_batch_size
    if recipe.techniques.offload_optimizer:
        # The script's AdamW runs on the host as it is: DeepSpeed's own would be compiled on the node first.
        config["zero_force_ds_cpu_optimizer"] = False
    if wide_gradients(recipe):
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if work.precision == "bf16":
        config["bf16"] = {"enabled": True}
    elif work.precision == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}
    return config


def _monitors(recipe: Recipe) -> Json:
    """What DeepSpeed's engine logs its loss and learning rate to, by rank 0 (deepspeed/monitor/, 0.19.8). Hugging
    Face's Trainer logs by callbacks of its own."""
    if recipe.backend.script is not None and recipe.backend.script_kind == "hugging-face":
        return {}
    monitors: Json = {}
    run, folder = recipe.tracking.wandb, recipe.tensorboard
    if run is not None:
        team = {} if run.entity is None else {"team": run.entity}
        monitors["wandb"] = {"enabled": True, "project": run.project, "group": recipe.name, **team}
    if folder is not None:
        monitors["tensorboard"] = {"enabled": True, "output_path": folder, "job_name": recipe.name}
    return monitors


def _zero(recipe: Recipe, layout: Layout) -> Json:
    stage = layout.zero_stage
    if stage == 0:
        return {"stage": 0, **offload_sections(recipe)}
    section: Json = {
        "stage": stage,
        "contiguous_gradients": True,
        "overlap_comm": recipe.cluster.accelerator.kind == "gpu",
        "reduce_scatter": True,
        "reduce_bucket_size": bucket_elements(recipe),
        "allgather_bucket_size": bucket_elements(recipe),
    }
    if stage == 3:
        section |= {
            "stage3_prefetch_bucket_size": bucket_elements(recipe),
            "stage3_param_persistence_threshold": PERSISTENT_PARAMETER,
            "stage3_max_live_parameters": live_parameters(recipe),
            "stage3_max_reuse_distance": live_parameters(recipe),
            "sub_group_size": _sub_group(recipe, layout),
        }
    return section | offload_sections(recipe)


def _sub_group(recipe: Recipe, layout: Layout) -> int:
    """Elements of a rank's shard stepped together: fewer where a share of the groups goes to the host."""
    if recipe.techniques.offload_optimizer in (0.0, 1.0):
        return SUB_GROUP_ELEMENTS
    return max(_parameters(recipe) // layout.world_size // OFFLOAD_GROUPS, 1)


def _parameters(recipe: Recipe) -> int:
    return count_parameters(recipe.model).total


def bucket_elements(recipe: Recipe) -> int:
    """Elements in one collective: an even number, which ZeRO 1 and 2 insist on (runtime/zero/stage_1_and_2.py
    `nccl_start_alignment_factor`, 0.19.8). What the recipe says itself may be odd. "auto" is the square of the hidden
    size (transformers/integrations/deepspeed.py trainer_config_finalize, 5.23)."""
    stated = own_number(recipe, "zero_optimization.reduce_bucket_size", recipe.model.hidden_size**2)
    return stated or min(MOST_BUCKET, max(_parameters(recipe) // 20 * 2, LEAST_BUCKET))


def live_parameters(recipe: Recipe) -> int:
    """Most parameters ZeRO 3 may keep gathered at once."""
    stated = own_number(recipe, "zero_optimization.stage3_max_live_parameters", LIVE_PARAMETERS)
    return min(LIVE_PARAMETERS if stated is None else stated, _parameters(recipe))


def to_json(value: Json) -> bytes:
    """Readable, and the same bytes for the same values."""
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


_BUCKET = Reason(("model",), "elements in one collective: a tenth of the model, 1 to 50 million; the estimate counts 3")
_LIVE = Reason(("model",), "no more than the model has; the estimate counts them")
_PINNED = Reason(("cluster",), "page-locked memory is what a GPU copies from without waiting")
_OPTIMIZER = Reason(("layout.offload_optimizer",))

REASONS: Mapping[str, Reason] = {
    "wandb.enabled": Reason(("tracking.wandb",)),
    "wandb.project": Reason(("tracking.wandb.project",)),
    "wandb.team": Reason(("tracking.wandb.entity",)),
    "wandb.group": Reason(("name",), "all runs of a recipe stand together"),
    "tensorboard.enabled": Reason(("tracking.tensorboard",)),
    "tensorboard.output_path": Reason(("tracking.tensorboard",)),
    "tensorboard.job_name": Reason(("name",), "the folder below it"),
    "train_batch_size": Reason(("training.global_batch_size",)),
    "train_micro_batch_size_per_gpu": Reason(("layout.micro_batch_size",)),
    "gradient_accumulation_steps": Reason(
        ("training.global_batch_size", "layout.micro_batch_size", "layout.data"),
        "what makes the batch of its micro-batches over all data parallel ranks",
    ),
    "tensor_parallel.autotp_size": Reason(("layout.tensor",)),
    "tensor_parallel.vocab_parallel_lm_head": Reason(
        ("layout.tensor",), "every rank gets the logits of the whole vocabulary, as the script's loss wants them"
    ),
    "sequence_parallel_size": Reason(("layout.context",), "Ulysses sequence parallelism"),
    "seq_parallel_communication_data_type": Reason(
        ("training.precision", "layout.context"), "gradients travel as they do without Ulysses; its default is fp32"
    ),
    "pipeline.stages": Reason(("layout.pipeline",), "the script makes as many"),
    "pipeline.activation_checkpoint_interval": Reason(("layout.recompute",), "1: the input of every layer is kept"),
    "gradient_clipping": Reason(("training.gradient_clipping",)),
    "steps_per_print": Reason(("training.log_interval",)),
    "zero_allow_untested_optimizer": Reason(
        why="the script brings torch's AdamW; one named here would be compiled on the node first"
    ),
    "zero_force_ds_cpu_optimizer": Reason(
        ("layout.offload_optimizer",), "torch's AdamW runs on the host; DeepSpeed's would be compiled on the node first"
    ),
    "data_types.grad_accum_dtype": Reason(("training.gradient_dtype",)),
    "bf16.enabled": Reason(("training.precision",)),
    "fp16.enabled": Reason(("training.precision",)),
    "fp16.loss_scale": Reason(("training.precision",), "0: found while training"),
    "fp16.initial_scale_power": Reason(("training.precision",), "the search begins at 2 to this power"),
    "activation_checkpointing.cpu_checkpointing": Reason(("layout.offload_checkpoints",)),
    "zero_optimization.stage": Reason(("layout.zero_stage",)),
    "zero_optimization.contiguous_gradients": Reason(why="gradients do not fragment memory"),
    "zero_optimization.overlap_comm": Reason(("cluster",), "on a GPU gradients are reduced beside the backward pass"),
    "zero_optimization.reduce_scatter": Reason(why="a rank is sent the gradients of its own shard alone"),
    "zero_optimization.reduce_bucket_size": _BUCKET,
    "zero_optimization.allgather_bucket_size": _BUCKET,
    "zero_optimization.stage3_prefetch_bucket_size": _BUCKET,
    "zero_optimization.stage3_param_persistence_threshold": Reason(why="smaller tensors, norms, stay whole"),
    "zero_optimization.stage3_max_live_parameters": _LIVE,
    "zero_optimization.stage3_max_reuse_distance": _LIVE,
    "zero_optimization.sub_group_size": Reason(
        ("layout.offload_optimizer",), "stepped together; smaller where only a share of the states is offloaded"
    ),
    "zero_optimization.offload_optimizer.device": _OPTIMIZER,
    "zero_optimization.offload_optimizer.ratio": _OPTIMIZER,
    "zero_optimization.offload_optimizer.pin_memory": _PINNED,
    "zero_optimization.offload_param.device": Reason(("layout.offload_parameters",)),
    "zero_optimization.offload_param.pin_memory": _PINNED,
}


def settings(config: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Reason]:
    """The reason of every key of a ds_config, dotted, in the order of the file; `own` are the keys the person wrote.
    Raises KeyError for another key that has none: a key is rendered together with its reason."""
    written = set(dotted_keys(own))
    return {key: OWN_REASON if key in written else REASONS[key] for key in dotted_keys(config)}


def dotted_keys(config: Mapping[str, Any], within: str = "") -> Iterator[str]:
    """ "zero_optimization.stage" and so on: every value that is no section itself."""
    for name in sorted(config):
        value = config[name]
        if isinstance(value, Mapping):
            yield from dotted_keys(value, f"{within}{name}.")
        else:
            yield f"{within}{name}"


# fields of a shape in the words of a person; others go by their own name
FIELD_NAMES = {
    "normalization": "its kind of norms",
    "position_embedding": "its kind of positions",
    "gated_mlp": "its kind of MLP",
    "linear_bias": "its biases",
    "qkv_bias": "its biases on query, key and value",
    "qk_layernorm": "its norms on queries and keys",
    "hidden_dropout": "dropout on the residual stream",
    "moe.layer_pattern": "its dense layers between mixtures",
    "moe.shared_expert_ffn_hidden_size": "its shared expert",
    "moe.router.balancing": "the way it balances its experts",
    "moe": "experts, or none,",
    "mla": "ordinary attention, or latent,",
}
BYTE_TOKENS = 256
# transformers refuses other widths even where head_dim is given (validate_architecture of these classes, 5.23)
WHOLE_HEADS = ("llama", "gemma2", "gemma3_text", "deepseek_v2")


def model_config(recipe: Recipe) -> Json:
    """The model as a Hugging Face configuration of its family, long enough for the recipe's sequences."""
    longest = max(recipe.model.max_position_embeddings, recipe.workload.sequence_length)
    return config_of(replace(recipe.model, max_position_embeddings=longest))


def refuse_what_the_trainer_cannot_build(recipe: Recipe) -> None:
    """What transformers has no class for, or would train as something else. Raises UserError."""
    shape = recipe.model
    lost = unsaid(replace(shape, mtp_num_layers=0))
    if lost:
        parts = ", ".join(FIELD_NAMES.get(field, field) for field in lost)
        raise UserError(
            f"{recipe.path}: model: {shape.name} is no {shape.family} of Hugging Face's: {parts} cannot be said in its "
            "configuration; set model.family, name a script of your own (backend.script) or use backend: megatron-lm"
        )
    for key, problem in _problems(recipe, shape):
        raise UserError(f"{recipe.path}: {key}: {problem}")


def _problems(recipe: Recipe, shape: ModelShape) -> Iterator[tuple[str, str]]:
    if shape.mtp_num_layers:
        yield (
            "model.mtp_num_layers",
            "transformers builds no multi-token prediction; set it to 0 or use backend: megatron-lm",
        )
    if shape.moe is not None and shape.moe.capacity_factor is not None:
        yield (
            "model.moe.capacity_factor",
            "transformers' experts drop no tokens; remove it or use backend: megatron-lm",
        )
    if shape.family in UNBALANCED and recipe.training.start_from is None and recipe.techniques.adapters is None:
        yield (
            "model",
            f"transformers' {shape.family} has neither the loss nor the bias update that keeps experts evenly used, so "
            "that it is no model to train from nothing; name training.start_from or use backend: megatron-lm",
        )
    if shape.family in WHOLE_HEADS and shape.hidden_size % shape.num_attention_heads:
        yield (
            "model.num_attention_heads",
            f"transformers' {shape.family} wants a number that divides hidden_size {shape.hidden_size}; with "
            "family: mistral the same model is built",
        )
    if not recipe.data.mock and recipe.data.tokenizer is None and shape.vocab_size < BYTE_TOKENS:
        yield (
            "data",
            f"without a tokenizer every byte is a token, which needs a vocabulary of at least {BYTE_TOKENS}; the model "
            f"has {shape.vocab_size}: raise model.vocab_size",
        )
