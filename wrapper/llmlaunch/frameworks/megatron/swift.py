"""Commands of trainers on Megatron core that name its arguments their own way, read into a recipe: Megatron-SWIFT
(`megatron sft`, `megatron pt` of modelscope/ms-swift) and LLaMA-Factory's engine of Megatron's kind (USE_MCA).

Their arguments are Megatron-LM's with underscores and values, and some of their own (swift/megatron/arguments, 4.5,
with the names of 3.x; src/llamafactory/hparams and examples/megatron, ff6d4d1). They become the words of Megatron-LM
that mean the same, and those are read. The model's sizes are those of the model that is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llmlaunch.command_lines.command import Reading, TrainerCommand
from llmlaunch.command_lines.recipe_draft import RecipeDraft, ScriptOptions, add_job, add_model, job_name, true_or_false
from llmlaunch.errors import NoVerdict
from llmlaunch.frameworks.bridge.recipe_fields import bridge_arguments
from llmlaunch.frameworks.classed_arguments import NEUTRAL
from llmlaunch.frameworks.deepspeed.trainer_table import trainer_group
from llmlaunch.frameworks.megatron.command_line import model_values, read_namespace
from llmlaunch.frameworks.megatron.parser import NEWEST, core_parser
from llmlaunch.frameworks.megatron.words import read_words
from llmlaunch.rundir.foreign_values import whole_number_in


@dataclass(frozen=True)
class Dialect:
    """How a trainer names Megatron's arguments: `names` has the `dest` of Megatron's parser that an argument of its own
    means, empty where it means nothing to Megatron; `defaults` are those that are not Megatron's own, by `dest`."""

    trainer: str
    names: Mapping[str, str]
    defaults: Mapping[str, str]


OF_ALL = {
    **{"use_distributed_optimizer": "true", "lr_decay_style": "cosine", "seed": "42", "bf16": "true"},
    **{"accumulate_allreduce_grads_in_fp32": "true", "create_attention_mask_in_dataloader": "false"},
    **{"moe_router_dtype": "fp32", "moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": "true"},
    "expert_tensor_parallel_size": "1",
}
SWIFT = Dialect(
    "Megatron-SWIFT",
    {
        **{"max_length": "seq_length", "packing_length": "seq_length", "output_dir": "save", "fp8_format": "fp8"},
        **{"save_steps": "save_interval", "eval_steps": "eval_interval", "logging_steps": "log_interval"},
        **{"fp4_format": "fp4", "dataloader_num_workers": "num_workers", "mcore_model": "load"},
        "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
        **dict.fromkeys(("report_to", "loss_scale", "model"), ""),  # of another meaning than Megatron's
    },
    {
        **OF_ALL,
        **{"micro_batch_size": "1", "global_batch_size": "16", "recompute_granularity": "selective"},
        **{"cross_entropy_loss_fusion": "true", "weight_decay": "0.1", "adam_beta2": "0.95", "log_interval": "5"},
    },
)
LLAMA_FACTORY = Dialect(
    "LLaMA-Factory's training by Megatron (USE_MCA)",
    {
        **{"cutoff_len": "seq_length", "per_device_train_batch_size": "micro_batch_size", "output_dir": "save"},
        **{"save_steps": "save_interval", "logging_steps": "log_interval", "learning_rate": "lr"},
        **{"max_steps": "train_iters", "dataloader_num_workers": "num_workers"},
        "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
        **dict.fromkeys(("gradient_accumulation_steps", "lr_scheduler_type", "warmup_ratio", "report_to"), ""),
    },
    {**OF_ALL, "micro_batch_size": "8", "seq_length": "2048"},
)
FULL, LORA = "full", "lora"
SPLITS = ("tensor_model", "pipeline_model", "context")
LEARNING_RATES = {FULL: "1e-5", LORA: "1e-4"}
LORA_RANK, ADAPTERS = 8, "training.adapters"


def read_megatron_swift(command: TrainerCommand) -> Reading:
    """Return the recipe of a command of Megatron-SWIFT.

    Raises:
        NoVerdict: it trains what no recipe describes.
        UserError: a value is none that Megatron's parser takes.
    """
    given = command.arguments[1:] if command.arguments[:1] in (("sft",), ("pt",)) else command.arguments
    return _read(command, ScriptOptions(given, command.place), SWIFT)


def read_llama_factory(command: TrainerCommand, options: ScriptOptions) -> Reading:
    """Return the recipe of a command of LLaMA-Factory that trains by Megatron. Raises NoVerdict and UserError."""
    return _read(command, options, LLAMA_FACTORY)


def _read(command: TrainerCommand, options: ScriptOptions, dialect: Dialect) -> Reading:
    named = options.text("model", "model_id_or_path", "model_name_or_path")
    draft = RecipeDraft(job_name(command, f"megatron-{(named or 'model').rpartition('/')[2]}"), "megatron-lm")
    add_job(draft, command)
    add_model(draft, named, command.folder)
    tuner = _tuner(options, command.place)
    words = [*_words(options, draft, tuner, dialect, command)]
    model = draft.keys.pop("model", None)
    sizes = {} if model is None else model_values(model, command.folder)
    if "num_experts" not in sizes:
        words = [group for group in words if not group[0].startswith(("--moe", "--expert"))]
    parsed = read_words([word for group in words for word in group], place=command.place)
    if model is not None and all(sizes[dest] == parsed.values[dest] for dest in sizes.keys() & parsed.values.keys()):
        draft.keys["model"] = model
    draft.keys["backend"] = "megatron-bridge" if tuner == LORA else "megatron-lm"
    if tuner == LORA:
        rank = options.whole("lora_rank")
        draft.training["adapters"] = {"rank": LORA_RANK if rank is None else rank}
        draft.training["start_from"] = options.text("mcore_model", "load") or named or "weights"
    draft.not_rendered = f"{dialect.trainer} is started by its own programs, which llmlaunch does not render"
    extra = bridge_arguments(draft) if tuner == LORA else list
    return read_namespace(draft, {**sizes, **parsed.values}, parsed, command, extra_argument=extra)


def _tuner(options: ScriptOptions, place: str) -> str:
    """Return whether all weights are trained, or adapters. Raises NoVerdict for anything else."""
    tuner = options.text("tuner_type", "train_type", "sft_type", "finetuning_type") or FULL
    if tuner not in (FULL, LORA):
        raise NoVerdict.on(place, f"--tuner_type {tuner}: its memory is not known; `llmlaunch observe --` measures it")
    task = options.text("task_type") or "causal_lm"
    if task != "causal_lm":
        raise NoVerdict.on(place, f"--task_type {task} is not read: recipes train language models")
    return LORA if options.has("adapters", "mcore_adapter") else tuner


def _words(
    options: ScriptOptions, draft: RecipeDraft, tuner: str, dialect: Dialect, command: TrainerCommand
) -> Iterator[tuple[str, ...]]:
    """Yield the words of Megatron-LM that mean the same as the command's, a flag each."""
    flags, dests = core_parser(NEWEST).flags, {flag.dest for flag in core_parser(NEWEST).flags.values()}
    stated: dict[str, tuple[str, ...]] = {name: (value,) for name, value in dialect.defaults.items()}
    stated["lr"] = (LEARNING_RATES[tuner],)
    if options.flag("fp16") or options.text("torch_dtype") == "float16":
        stated |= {"bf16": ("false",), "fp16": ("true",)}
    for group in options.all():
        name = group[0].lstrip("-").partition("=")[0].replace("-", "_")
        values = options.values(name)
        dest = dialect.names.get(name, name)
        known = trainer_group(name, values or ())
        if dest in dests:
            stated[dest] = values or group[1:]
        elif dest and (known is None or (known.flag_class.kind != NEUTRAL and known.flag_class.key != ADAPTERS)):
            yield (f"--{name.replace('_', '-')}", *(values or ()))
    if stated.get("recompute_granularity") == ("none",):
        del stated["recompute_granularity"]
    if "seq_length" not in stated:
        draft.lack(
            "training.sequence_length",
            "without --max_length a sequence may be as long as the model takes; add it, or --set "
            "training.sequence_length=N",
        )
    if "global_batch_size" not in stated:
        stated |= _batch(options, stated, command)
    for dest, values in stated.items():
        for name, flag in flags.items():
            if flag.dest != dest:
                continue
            if flag.values != 0:
                yield (name, *values)
                break
            on = true_or_false(values[0]) if values else True
            if on is not None and str(on) == flag.sets:
                yield (name,)
                break


def _batch(
    options: ScriptOptions, stated: Mapping[str, tuple[str, ...]], command: TrainerCommand
) -> dict[str, tuple[str, ...]]:
    """Return the batch of so many micro-batches on each data parallel rank; nothing where their number is not known."""
    sizes = [stated.get(f"{name}_parallel_size", ("1",))[0] for name in SPLITS]
    numbers = [whole_number_in(size) for size in (*sizes, stated["micro_batch_size"][0])]
    if None in numbers or not command.nodes or not command.devices_per_node:
        return {}
    tensor, pipeline, context, micro = (max(number or 1, 1) for number in numbers)
    ranks = max(command.nodes * command.devices_per_node // (tensor * pipeline * context), 1)
    return {"global_batch_size": (str(micro * (options.whole("gradient_accumulation_steps") or 1) * ranks),)}
