"""What every key of a rendered ds_config.json follows from (`llmlaunch explain-args` tells it)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmlaunch.backends.argument import Reason

__all__ = ["REASONS", "dotted_keys", "settings"]

_BUCKET = Reason(("model",), "elements in one collective: a tenth of the model, 1 to 50 million; the estimate counts 3")
_LIVE = Reason(("model",), "no more than the model has; the estimate counts them")
_PINNED = Reason(("cluster",), "page-locked memory is what a GPU copies from without waiting")
_OPTIMIZER = Reason(("layout.offload_optimizer",))

REASONS: Mapping[str, Reason] = {
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


def settings(config: Mapping[str, Any]) -> dict[str, Reason]:
    """The reason of every key of a ds_config, dotted, in the order of the file. Raises KeyError for a key that has
    none: a key is rendered together with its reason."""
    return {key: REASONS[key] for key in dotted_keys(config)}


def dotted_keys(config: Mapping[str, Any], within: str = "") -> Iterator[str]:
    """ "zero_optimization.stage" and so on: every value that is no section itself."""
    for name in sorted(config):
        value = config[name]
        if isinstance(value, Mapping):
            yield from dotted_keys(value, f"{within}{name}.")
        else:
            yield f"{within}{name}"
