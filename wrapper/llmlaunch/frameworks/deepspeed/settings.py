"""All keys of ds_config.json that llmlaunch writes, reads, checks, prices or classes: one row each (deepspeed/runtime/
config.py, precision_config.py, tensor_parallel/config.py, monitor/config.py, 0.19.8). DeepSpeed refuses unknown keys
inside its sections but not at the top level, and takes "auto" silently for a default (runtime/config_utils.py): every
key here is known and every value that is rendered is explicit.

Rendering, reading, forms, classes, reasons, versions and the tables of the documentation are loops over SETTINGS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from llmlaunch.command_lines.recipe_draft import whole_or_none
from llmlaunch.frameworks.classed_arguments import FlagGroup
from llmlaunch.frameworks.deepspeed.facts import BF16_STATES
from llmlaunch.frameworks.deepspeed.number_formats import adds_up_in_fp32, has_bf16_masters, optimizer_states
from llmlaunch.frameworks.deepspeed.setting_row import (
    ABSENT,
    ANY,
    BETAS,
    COUNT,
    MAPPING,
    NUMBER,
    SIZE,
    SWITCH,
    TEXT,
    WHOLE,
    DsConfigKey,
    Form,
    above_one,
    as_number,
    deepspeed_groups,
    switched,
)
from llmlaunch.frameworks.deepspeed.zero_table import ZERO_SETTINGS
from llmlaunch.layout import RECOMPUTE_FULL, Layout
from llmlaunch.recipe.sections import WandbRun
from llmlaunch.recipe.types import Recipe


def _accumulated(value: Any) -> Any:
    return {"fp32": "fp32", "bf16": "bf16", "bfloat16": "bf16"}.get(str(value), ABSENT)


def _both_fractions(value: Any) -> Any:
    fits = isinstance(value, list) and len(value) == 2 and all(isinstance(beta, float) for beta in value)
    return list(value) if fits else ABSENT


DECAYS: Mapping[str, str] = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def _decay(value: Any) -> Any:
    return DECAYS.get(value, ABSENT)


def _steps(value: Any) -> Any:
    number = whole_or_none({"steps": value}, "steps")
    return ABSENT if number is None else number


def _run(recipe: Recipe) -> WandbRun:
    assert recipe.tracking.wandb is not None
    return recipe.tracking.wandb


def _in(precision: str, value: Any) -> Callable[[Recipe, Layout], Any]:
    """Return a writer of a key that belongs to a number format."""
    return lambda recipe, layout: value if recipe.workload.precision == precision else ABSENT


def _pipeline(value: Callable[[Layout], Any]) -> Callable[[Recipe, Layout], Any]:
    """Return a writer of a key of scripts of stages. How such a script shares out its layers is an argument of
    PipelineModule; the plan has equally many decoder layers a stage."""

    def write(recipe: Recipe, layout: Layout) -> Any:
        stages = recipe.backend.script is not None and recipe.backend.script_kind == "pipeline"
        return value(layout) if stages else ABSENT

    return write


def _logged(value: Callable[[Recipe], Any]) -> Callable[[Recipe, Layout], Any]:
    """Return a writer of a key of DeepSpeed's monitors, to which rank 0 logs loss and learning rate
    (deepspeed/monitor/, 0.19.8). Hugging Face's Trainer logs by callbacks of its own."""

    def write(recipe: Recipe, layout: Layout) -> Any:
        of_the_trainer = recipe.backend.script is not None and recipe.backend.script_kind == "hugging-face"
        said = None if of_the_trainer else value(recipe)
        return ABSENT if said is None else said

    return write


def _of_run(value: Callable[[Recipe], Any]) -> Callable[[Recipe, Layout], Any]:
    return _logged(lambda recipe: None if recipe.tracking.wandb is None else value(recipe))


def _of_curves(value: Callable[[Recipe], Any]) -> Callable[[Recipe, Layout], Any]:
    return _logged(lambda recipe: None if recipe.tensorboard is None else value(recipe))


SETTINGS: tuple[DsConfigKey, ...] = (
    DsConfigKey(
        "train_batch_size",
        SIZE,
        of="training.global_batch_size",
        # With AutoTP it is left out: without a process mesh of the script's own DeepSpeed takes tensor parallel ranks
        # for data parallel ones when it checks the three sizes (runtime/config.py __init__, 0.19.8).
        write=lambda recipe, layout: recipe.workload.global_batch_size if layout.tensor == 1 else ABSENT,
        planned=True,
    ),
    DsConfigKey("train_micro_batch_size_per_gpu", SIZE, write="layout.micro_batch_size", planned=True),
    DsConfigKey(
        "gradient_accumulation_steps",
        SIZE,
        of=("training.global_batch_size", "layout.micro_batch_size", "layout.data"),
        why="what makes the batch of its micro-batches over all data parallel ranks",
        write=lambda recipe, layout: layout.num_microbatches(recipe.workload.global_batch_size),
        planned=True,
    ),
    DsConfigKey("gradient_clipping", NUMBER, write="training.gradient_clipping", planned=True),
    DsConfigKey(
        "zero_allow_untested_optimizer",
        subject="numbers of the schedule and the optimizer",
        why="the script brings torch's AdamW; one named here would be compiled on the node first",
        write=lambda recipe, layout: True,
        adds="an optimizer that the script brings may be any",
    ),
    DsConfigKey(
        "zero_force_ds_cpu_optimizer",
        of="layout.offload_optimizer",
        why="torch's AdamW runs on the host; DeepSpeed's would be compiled on the node first",
        write=lambda recipe, layout: False if recipe.techniques.offload_optimizer else ABSENT,
        adds="that optimizer steps on the host too, as it is",
        since="0.8.3",
    ),
    DsConfigKey(
        "steps_per_print",
        subject="logs, curves and profiles of time",
        write="training.log_interval",
        adds="DeepSpeed reports as often as the trainer does",
    ),
    DsConfigKey(
        "sequence_parallel_size",
        SIZE,
        why="Ulysses sequence parallelism",
        write=lambda recipe, layout: layout.context if layout.context > 1 else ABSENT,
        planned=True,
        reads="layout.context",
        read=above_one,
        splits="context",
        since="0.11.2",
    ),
    DsConfigKey(
        "seq_parallel_communication_data_type",
        of=("training.precision", "layout.context"),
        why="gradients travel as they do without Ulysses; its default is fp32",
        write=lambda recipe, layout: recipe.workload.precision if layout.context > 1 else ABSENT,
        since="0.11.2",
    ),
    DsConfigKey(
        "bf16.enabled",
        SWITCH,
        write=_in("bf16", True),
        planned=True,
        reads="training.precision",
        read=switched("bf16"),
        since="0.6.0",
    ),
    DsConfigKey("bfloat16.enabled", SWITCH, reads="training.precision", read=switched("bf16"), since="0.5.5"),
    DsConfigKey(
        "fp16.enabled", SWITCH, write=_in("fp16", True), planned=True, reads="training.precision", read=switched("fp16")
    ),
    DsConfigKey(
        "bf16.bf16_master_weights_and_grads",
        SWITCH,
        write=lambda recipe, layout: True if has_bf16_masters(recipe) else ABSENT,
        planned=True,
        reads="training.optimizer",
        read=switched({"main_parameters": BF16_STATES}),
        since="0.18.3",
    ),
    DsConfigKey(
        "bf16.bf16_optimizer_states",
        SWITCH,
        write=lambda recipe, layout: True if optimizer_states(recipe) == BF16_STATES else ABSENT,
        planned=True,
        reads="training.optimizer",
        read=switched({"first_moment": BF16_STATES, "second_moment": BF16_STATES}),
        since="0.18.3",
    ),
    DsConfigKey(
        "fp16.loss_scale",
        subject="loss scale",
        of="training.precision",
        why="0: found while training",
        write=_in("fp16", 0),
    ),
    DsConfigKey("fp16.loss_scale_window", subject="loss scale"),
    DsConfigKey(
        "fp16.initial_scale_power",
        subject="loss scale",
        of="training.precision",
        why="the search begins at 2 to this power",
        write=_in("fp16", 16),
    ),
    DsConfigKey("fp16.hysteresis", subject="loss scale"),
    DsConfigKey("fp16.min_loss_scale", subject="loss scale"),
    DsConfigKey("fp16.consecutive_hysteresis", subject="loss scale"),
    DsConfigKey("fp16.auto_cast", since="0.7.0"),
    DsConfigKey("fp16.fp16_master_weights_and_grads", subject="narrow model states", since="0.5.0"),
    DsConfigKey(
        "data_types.grad_accum_dtype",
        TEXT,
        write=lambda recipe, layout: "fp32" if adds_up_in_fp32(recipe) else ABSENT,
        planned=True,
        reads="training.gradient_dtype",
        read=_accumulated,
        since="0.7.6",
    ),
    DsConfigKey(
        "tensor_parallel.autotp_size",
        COUNT,
        write=lambda recipe, layout: layout.tensor if layout.tensor > 1 else ABSENT,
        planned=True,
        reads="layout.tensor",
        read=above_one,
        splits="tensor",
        since="0.16.4",
    ),
    DsConfigKey(
        "tensor_parallel.vocab_parallel_lm_head",
        of="layout.tensor",
        why="every rank gets the logits of the whole vocabulary, as the script's loss wants them",
        write=lambda recipe, layout: False if layout.tensor > 1 else ABSENT,
        splits="tensor",
        since="0.19.8",
    ),
    DsConfigKey(
        "pipeline.stages",
        COUNT,
        why="the script makes as many",
        write=_pipeline(lambda layout: layout.pipeline),
        planned=True,
        reads="layout.pipeline",
        read=above_one,
    ),
    DsConfigKey(
        "pipeline.activation_checkpoint_interval",
        why="1: the input of every layer is kept",
        write=_pipeline(lambda layout: 1 if layout.recompute == RECOMPUTE_FULL else 0),
        reads="layout.recompute",
        read=lambda value: "full" if value == 1 else ABSENT,
    ),
    DsConfigKey(
        "activation_checkpointing.cpu_checkpointing",
        SWITCH,
        of="layout.offload_checkpoints",
        write=lambda recipe, layout: True if recipe.techniques.offload_checkpoints else ABSENT,
        planned=True,
    ),
    *ZERO_SETTINGS,
    DsConfigKey("optimizer.type", TEXT, "other optimizers"),
    DsConfigKey("optimizer.params.lr", NUMBER, reads="training.learning_rate", read=as_number, kept=True),
    DsConfigKey("optimizer.params.weight_decay", NUMBER, reads="training.weight_decay", read=as_number, kept=True),
    DsConfigKey("optimizer.params.betas", BETAS, reads="training.adam_betas", read=_both_fractions, kept=True),
    DsConfigKey("scheduler.type", TEXT, reads="training.learning_rate_decay", read=_decay, kept=True),
    DsConfigKey("scheduler.params.warmup_num_steps", WHOLE, reads="training.warmup_steps", read=_steps, kept=True),
    DsConfigKey("scheduler.params.total_num_steps", WHOLE),
    DsConfigKey("scheduler.params.warmup_max_lr", NUMBER),
    DsConfigKey("wandb.enabled", of="tracking.wandb", write=_of_run(lambda recipe: True), since="0.6.6"),
    DsConfigKey("wandb.project", of="tracking.wandb.project", write=_of_run(lambda r: _run(r).project), since="0.6.6"),
    DsConfigKey("wandb.team", of="tracking.wandb.entity", write=_of_run(lambda r: _run(r).entity), since="0.6.6"),
    DsConfigKey(
        "wandb.group",
        of="name",
        why="all runs of a recipe stand together",
        write=_of_run(lambda r: r.name),
        since="0.6.6",
    ),
    DsConfigKey("tensorboard.enabled", of="tracking.tensorboard", write=_of_curves(lambda recipe: True)),
    DsConfigKey("tensorboard.output_path", of="tracking.tensorboard", write=_of_curves(lambda r: r.tensorboard)),
    DsConfigKey("tensorboard.job_name", of="name", why="the folder below it", write=_of_curves(lambda r: r.name)),
    DsConfigKey("wall_clock_breakdown", subject="logs, curves and profiles of time"),
    DsConfigKey("dump_state", subject="logs, curves and profiles of time"),
    DsConfigKey("memory_breakdown", subject="logs, curves and profiles of time"),
    DsConfigKey("prescale_gradients", subject="numbers of the schedule and the optimizer"),
    DsConfigKey("gradient_predivide_factor", subject="numbers of the schedule and the optimizer"),
    DsConfigKey("sparse_attention", uncounted=True, since="0.3", until="0.19.7"),
    DsConfigKey("compression_training", uncounted=True, since="0.7.0", until="0.19.7"),
    DsConfigKey("progressive_layer_drop", uncounted=True, since="0.3.1", until="0.19.8"),
    DsConfigKey("quantize_training", uncounted=True, since="0.4.0", until="0.19.7"),
    DsConfigKey("torch_autocast", uncounted=True, since="0.17.2"),
)


def settings_of(recipe_key: str) -> tuple[DsConfigKey, ...]:
    """Return the rows that are read into a recipe key, in the order in which they decide it."""
    return tuple(row for row in SETTINGS if row.reads == recipe_key)


@cache
def setting_groups() -> tuple[FlagGroup, ...]:
    """Return the classes of keys that a person writes in `backend.ds_config`."""
    return deepspeed_groups(("settings",), SETTINGS)


def _forms() -> Iterator[tuple[str, Form]]:
    """Yield each dotted name that has a form; a section comes before what is in it."""
    for row in SETTINGS:
        for name in row.names if row.form is not ANY else ():
            sections = name.split(".")[:-1]
            yield from ((".".join(sections[: i + 1]), MAPPING) for i in range(len(sections)))
            yield name, row.form


FORMS: Mapping[str, Form] = dict(_forms())
PLANNED: Mapping[str, str] = {row.key: row.reason.keys[0] for row in SETTINGS if row.planned}
"""Keys of ds_config.json that a key of the recipe decides."""
