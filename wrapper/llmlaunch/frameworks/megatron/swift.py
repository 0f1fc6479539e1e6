"""A command of Megatron-SWIFT (`megatron sft`, `megatron pt` of modelscope/ms-swift), read into a recipe.

Its arguments are Megatron-LM's with underscores and values, and some of its own (swift/megatron/arguments, 4.5, with
the names of 3.x). They become the words of Megatron-LM that mean the same, and those are read. The model's sizes are
those of the model that it names.
"""

from __future__ import annotations

from collections.abc import Iterator

from llmlaunch.command_lines.command import Reading, TrainerCommand
from llmlaunch.command_lines.options import ScriptOptions, true_or_false
from llmlaunch.command_lines.recipe_draft import RecipeDraft, add_job, add_model, job_name
from llmlaunch.errors import NoVerdict
from llmlaunch.frameworks.bridge.recipe_fields import bridge_argument
from llmlaunch.frameworks.deepspeed.trainer_table import trainer_group
from llmlaunch.frameworks.flag_classes import NEUTRAL
from llmlaunch.frameworks.megatron.command_line import model_values, read_namespace
from llmlaunch.frameworks.megatron.parser import NEWEST, core_parser
from llmlaunch.frameworks.megatron.words import read_words

__all__ = ["read_megatron_swift"]

# Names of its own, and the `dest` of Megatron's parser that means the same.
NAMES = {
    "max_length": "seq_length",
    "packing_length": "seq_length",
    "output_dir": "save",
    "save_steps": "save_interval",
    "eval_steps": "eval_interval",
    "logging_steps": "log_interval",
    "fp8_format": "fp8",
    "fp4_format": "fp4",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "dataloader_num_workers": "num_workers",
    "mcore_model": "load",
    **dict.fromkeys(("report_to", "loss_scale", "model"), ""),  # of another meaning than Megatron's
}
# Its defaults that are not Megatron-LM's; those of the model come with the model.
DEFAULTS = {
    "micro_batch_size": "1",
    "global_batch_size": "16",
    "recompute_granularity": "selective",
    "use_distributed_optimizer": "true",
    "cross_entropy_loss_fusion": "true",
    "lr_decay_style": "cosine",
    "weight_decay": "0.1",
    "adam_beta2": "0.95",
    "log_interval": "5",
    "seed": "42",
    "bf16": "true",
    "accumulate_allreduce_grads_in_fp32": "true",
    "create_attention_mask_in_dataloader": "false",
    "moe_router_dtype": "fp32",
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": "true",
    "expert_tensor_parallel_size": "1",
    "vocab_size": "",
}
OF_MIXTURES = ("moe_", "expert_")
FULL, LORA = "full", "lora"
LEARNING_RATES = {FULL: "1e-5", LORA: "1e-4"}
LORA_RANK, ADAPTERS = 8, "training.adapters"
CHECKED_ONLY = "Megatron-SWIFT trains by its own programs, which llmlaunch does not render"


def read_megatron_swift(command: TrainerCommand) -> Reading:
    """Return the recipe of a command of Megatron-SWIFT.

    Raises:
        NoVerdict: it trains what no recipe describes.
        UserError: a value is none that Megatron's parser takes.
    """
    given = command.arguments[1:] if command.arguments[:1] in (("sft",), ("pt",)) else command.arguments
    options = ScriptOptions(given, command.place)
    draft = RecipeDraft(
        job_name(command, f"megatron-{(options.text('model') or 'swift').rpartition('/')[2]}"), "megatron-lm"
    )
    add_job(draft, command)
    add_model(draft, options.text("model", "model_id_or_path"), command.folder)
    tuner = _tuner(options, command.place)
    words = [*_words(options, draft, tuner)]
    parsed = read_words([word for group in words for word in group], place=command.place)
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
        draft.training["start_from"] = options.text("mcore_model", "load") or options.text("model") or "weights"
    draft.not_rendered = CHECKED_ONLY
    extra = bridge_argument if tuner == LORA else tuple
    return read_namespace(draft, {**sizes, **parsed.values}, parsed, command, extra_argument=extra)


def _tuner(options: ScriptOptions, place: str) -> str:
    """Return whether all weights are trained, or adapters. Raises NoVerdict for anything else."""
    tuner = options.text("tuner_type", "train_type", "sft_type") or FULL
    if tuner not in (FULL, LORA):
        raise NoVerdict.on(place, f"--tuner_type {tuner}: its memory is not known; `llmlaunch observe --` measures it")
    task = options.text("task_type") or "causal_lm"
    if task != "causal_lm":
        raise NoVerdict.on(place, f"--task_type {task} is not read: recipes train language models")
    return LORA if options.has("adapters", "mcore_adapter") else tuner


def _words(options: ScriptOptions, draft: RecipeDraft, tuner: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of Megatron-LM that mean the same as the command's, a flag each."""
    flags, dests = core_parser(NEWEST).flags, {flag.dest for flag in core_parser(NEWEST).flags.values()}
    stated: dict[str, tuple[str, ...]] = {name: (value,) for name, value in DEFAULTS.items() if value}
    stated["lr"] = (LEARNING_RATES[tuner],)
    if options.text("fp16") == "true" or options.text("torch_dtype") == "float16":
        stated |= {"bf16": ("false",), "fp16": ("true",)}
    for group in options.all():
        name = group[0].lstrip("-").partition("=")[0].replace("-", "_")
        values = options.values(name)
        dest = NAMES.get(name, name)
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
