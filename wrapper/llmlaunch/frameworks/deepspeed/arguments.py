"""The command line of the shipped training script (llmlaunch/trainers/deepspeed/train.py)."""

from __future__ import annotations

from llmlaunch.frameworks.argument import (
    ALLOCATOR_SETTINGS,
    ENVIRONMENT_REASONS,
    EXPANDABLE_SEGMENTS,
    RUN_DIR,
    Argument,
    NodeVariable,
    Reason,
    argument,
    blend_words,
    merged_environment,
    number,
    optional,
)
from llmlaunch.frameworks.deepspeed.techniques import technique_arguments
from llmlaunch.layout import Layout
from llmlaunch.recipe.datasets import ROW_FILES, Data
from llmlaunch.recipe.training import MOST_WARMUP_STEPS, Training, default_schedule
from llmlaunch.recipe.types import Recipe

CONFIG_FILE = "ds_config.json"
MODEL_FILE = "trainer/model.json"
TRAINER_FILE = "trainer/train.py"
SAMPLES, SAMPLE_TOKENS = 3, 128  # rows that are answered, tokens of an answer at most
FIRST_START = "read by the first start alone: where --save has a checkpoint, that one wins"


def trainer_arguments(recipe: Recipe, layout: Layout) -> tuple[Argument, ...]:
    """All the shipped script is told beside ds_config.json, each with what it follows from."""
    return (
        argument("--model", NodeVariable(RUN_DIR, f"/{MODEL_FILE}"), of="model", why="Hugging Face configuration"),
        *optional("--weights", recipe.training.start_from, of="training.start_from", why=FIRST_START),
        *_data(recipe),
        *_schedule(recipe),
        *technique_arguments(recipe.techniques, layout),
        *_checkpoints(recipe),
        *_results(recipe),
    )


def config_arguments() -> tuple[Argument, ...]:
    """How ds_config.json is handed over, as DeepSpeed's own argument parser names it (deepspeed/__init__.py
    `add_config_arguments`, 0.19.8)."""
    why = "hands ds_config.json to the script"
    return (
        argument("--deepspeed", of="backend", why=why),
        argument("--deepspeed_config", NodeVariable(RUN_DIR, f"/{CONFIG_FILE}"), of="backend", why=why),
    )


def _data(recipe: Recipe) -> list[Argument]:
    data = recipe.data
    if data.mock:
        source = argument("--data", "mock", of="data.mock")
    elif data.python_source:
        source = argument("--data", "python-source", of="data.python_source")
    elif data.blend:
        source = argument("--data", *blend_words(data.blend), of="data.blend")
    else:
        source = argument("--data", data.path, of="data.path")
    return [
        source,
        *_rows(data),
        *_validation(recipe),
        *optional("--tokenizer", data.tokenizer, of="data.tokenizer"),
    ]


def _rows(data: Data) -> list[Argument]:
    return [
        *optional("--format", data.format, of="data.format"),
        *optional("--packed", data.packed, of="data.packed"),
        *optional("--chat-template", data.chat_template, of="data.chat_template"),
    ]


def _validation(recipe: Recipe) -> list[Argument]:
    """What is evaluated, and when. Without an evaluation nothing is kept apart for it, unless the recipe says so."""
    data, evaluation = recipe.data, recipe.training.evaluation
    arguments = []
    if data.validation:
        arguments.append(argument("--validation-data", *blend_words(data.validation), of="data.validation"))
    elif data.split is not None or (evaluation is not None and not data.mock and not _may_hold_validation(data)):
        arguments.append(argument("--split", data.shares, of="data.split"))
    if evaluation is not None:
        arguments += [
            argument("--evaluation-interval", evaluation.interval, of="training.evaluation"),
            argument("--evaluation-iterations", evaluation.iterations, of="training.evaluation"),
            *optional("--patience", evaluation.patience, of="training.evaluation.patience"),
            *optional("--keep-best", evaluation.keep_best, of="training.evaluation.keep_best"),
        ]
    return arguments


def _may_hold_validation(data: Data) -> bool:
    """Return whether rows are of a folder or of the hub, which have a part for validation where nothing else is
    said."""
    return data.learns_answers and not str(data.path).lower().endswith(ROW_FILES)


def _schedule(recipe: Recipe) -> list[Argument]:
    training = recipe.training
    length = ("training.steps", "training.tokens")
    return [
        argument("--steps", training.steps, of=length),
        argument("--sequence-length", recipe.workload.sequence_length, of="training.sequence_length"),
        argument("--learning-rate", repr(training.learning_rate), of="training.learning_rate"),
        warmup_argument("--warmup-steps", recipe, of=length),
        *_learning(training),
        argument("--seed", training.seed, of="training.seed"),
        argument("--log-interval", training.log_interval, of="training.log_interval"),
    ]


def warmup_argument(flag: str, recipe: Recipe, of: str | tuple[str, ...]) -> Argument:
    """Return the recipe's warm-up, else a tenth of the steps; `of` names the keys that decide their number."""
    stated, steps = recipe.training.warmup_steps, recipe.training.steps
    if stated is not None:
        return argument(flag, stated, of="training.warmup_steps")
    why = f"a tenth of the steps, at most {MOST_WARMUP_STEPS}"
    warmup = default_schedule(recipe.backend.name, recipe.backend.script_kind, steps).warmup_steps
    return argument(flag, warmup, of=of, why=why)


def _learning(training: Training) -> list[Argument]:
    """What differs from the script's own: AdamW as the Llama models were trained, at a constant rate."""
    least = repr(training.minimum_learning_rate) if training.minimum_learning_rate else None
    weight_decay = training.weight_decay if training.weight_decay != Training.weight_decay else None
    arguments = [
        *optional("--learning-rate-decay", training.learning_rate_decay, of="training.learning_rate_decay"),
        *optional("--minimum-learning-rate", least, of="training.minimum_learning_rate"),
        *optional("--weight-decay", weight_decay, of="training.weight_decay"),
    ]
    if training.adam_betas != Training.adam_betas:
        arguments += [argument("--adam-betas", *map(number, training.adam_betas), of="training.adam_betas")]
    return arguments


def _checkpoints(recipe: Recipe) -> list[Argument]:
    training = recipe.training
    if training.checkpoint_path is None or training.save_interval is None:
        return []
    return [
        argument("--save", training.checkpoint_path, of="training.checkpoint_path"),
        argument("--save-interval", training.save_interval, of="training.save_interval"),
    ]


def _results(recipe: Recipe) -> list[Argument]:
    """What becomes of the trained model."""
    training, export = recipe.training, recipe.training.export
    by_itself = "the default for rows with answers" if training.samples is None else ""
    samples = SAMPLES if training.samples is None and recipe.data.learns_answers else training.samples
    arguments = []
    if samples:
        arguments += [
            argument("--samples", samples, of="training.samples", why=by_itself),
            argument("--sample-tokens", SAMPLE_TOKENS, of="training.samples"),
        ]
    if export is not None:
        apart = not export.merge_adapters
        arguments += [
            argument("--export", export.path, of="training.export"),
            *optional("--keep-adapters-apart", apart, of="training.export.merge_adapters"),
        ]
    return arguments


# glibc keeps freed blocks of up to 32 MiB once it has seen some. With these thresholds tensors go back to the kernel,
# and resident memory is what the tensors need (docs/deepspeed.md, "Resident memory on a CPU").
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072"}
CPU_ACCELERATOR = {"DS_ACCELERATOR": "cpu"}

_FREED = Reason(("cluster",), "without a GPU the peak is resident memory: freed tensors go back to the kernel")
REASONS = {
    **ENVIRONMENT_REASONS,
    "TOKENIZERS_PARALLELISM": Reason(why="each rank reads its own text; threads of tokenizers would fight for cores"),
    "DS_ACCELERATOR": Reason(("cluster",), "the cluster has no GPU, and DeepSpeed would look for one"),
    "MALLOC_MMAP_THRESHOLD_": _FREED,
    "MALLOC_TRIM_THRESHOLD_": _FREED,
}


def environment(recipe: Recipe) -> dict[str, str]:
    """Raises UserError where the recipe sets one that must be so to something else."""
    wanted = {"TOKENIZERS_PARALLELISM": "false"}
    if not recipe.techniques.steps_on_the_host:  # else each node shares out its cores
        wanted["OMP_NUM_THREADS"] = "1"
    if recipe.cluster.accelerator.kind == "gpu":
        return merged_environment(recipe, wanted | {ALLOCATOR_SETTINGS: EXPANDABLE_SEGMENTS}, {}, "")
    because = f"cluster {recipe.cluster.name}, which has no GPU,"
    return merged_environment(recipe, wanted | MALLOC, CPU_ACCELERATOR, because)
