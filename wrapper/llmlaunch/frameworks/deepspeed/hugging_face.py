"""Arguments of Hugging Face's Trainer, read into keys of a recipe: TrainingArguments of transformers 5.23, and those of
TRL, ms-swift, LLaMA-Factory and other trainers that are made of it: a row of FAMILIES each.

What rendering says again is taken out of the script's words (`RENDERED_AGAIN` of trainer_table.py); all others are
handed on as they were written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmlaunch.command_lines.command import TrainerCommand
from llmlaunch.command_lines.recipe_draft import RecipeDraft, ScriptOptions, assume_steps, true_or_false, wanted_value
from llmlaunch.command_lines.trainers import model_options
from llmlaunch.errors import NoVerdict
from llmlaunch.frameworks.classed_arguments import NEUTRAL
from llmlaunch.frameworks.deepspeed.setting_row import ABSENT
from llmlaunch.frameworks.deepspeed.trainer_table import ARGUMENTS, DECAYS, LEAST, trainer_group
from llmlaunch.rundir.files import parse_json
from llmlaunch.rundir.foreign_values import whole_number_in
from llmlaunch.rundir.values import number
from llmlaunch.techniques.requests import FUSED_MODULES, Adapters

MODELS = model_options()
LENGTHS = (
    *("block_size", "max_seq_length", "max_length", "model_max_length", "cutoff_len", "max_seq_len"),
    *("seq_length", "seq_len", "sequence_length", "sequence_len", "packing_length"),
)
ASKED_FOR = ("batch and length", "adapters", "other optimizers")
"""Groups of arguments (flag_classes.json) in which no default stands for a value that is not known."""
UNSAID_LENGTH = "the script decides it by itself; --set training.sequence_length=N, how many tokens a sequence has"
DEFAULTS: Mapping[str, Any] = {
    **{row.key: row.default for row in ARGUMENTS if row.default is not ABSENT},
    **{"finetuning_type": "full", "lora_rank": 8, "num_train_epochs": 3, "warmup_ratio": 0.0},
}
"""The Trainer's own defaults, which count where the command sets nothing, and those of scripts with adapters."""
NAMES = {"lora_r": "lora_rank", "lora_dim": "lora_rank", "use_lora": "use_peft", "lora_target": "lora_target_modules"}
"""Options that several families have by another name than the one that is read."""


@dataclass(frozen=True)
class TrainerFamily:
    """Scripts that share their arguments. `defaults` are those that differ from the Trainer's own, `length` is the
    length of a sequence where none is said, and `names` has the Trainer's name of an option of their own."""

    name: str
    length: int | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)

    def default(self, name: str) -> Any:
        return self.defaults.get(name, DEFAULTS[name])


AXOLOTL, LLAMA_FACTORY, OPEN_INSTRUCT, SWIFT = "Axolotl", "LLaMA-Factory", "open-instruct", "ms-swift"
FAMILIES: Mapping[str, TrainerFamily] = {
    name: TrainerFamily(name, **row)
    for name, row in json.loads(Path(__file__).with_name("trainer_families.json").read_text("utf-8"))[
        "families"
    ].items()
}
TRANSFORMERS = FAMILIES["transformers"]


def is_trainer(options: ScriptOptions, family: str) -> bool:
    """Return whether a script takes the arguments of Hugging Face's Trainer. Scripts without it name some alike."""
    named = options.has("per_device_train_batch_size", "output_dir", "num_train_epochs", "max_steps", "learning_rate")
    without = options.has("num_warmup_steps", "zero_stage", "with_tracking", "deepspeed_config")
    return family in FAMILIES or (named and options.has(*MODELS, "model_type", "config_name") and not without)


def family_of_script(named: str, options: ScriptOptions) -> TrainerFamily:
    """Return the family by its name in the table of trainers, else by the options that only one has."""
    if named in FAMILIES:
        return FAMILIES[named]
    if options.has("base_model") and options.has("micro_batch_size"):
        return FAMILIES[AXOLOTL]
    if options.has("finetuning_type", "cutoff_len", "stage", "template"):
        return FAMILIES[LLAMA_FACTORY]
    if options.has("model_max_length"):
        return FAMILIES["FastChat"]
    own = ("packing", "dataset_text_field", "max_length", "use_peft", "dataset_mixer", "dataset_mixture")
    return FAMILIES["TRL"] if options.has(*own) else TRANSFORMERS


def read_batch(options: ScriptOptions, family: TrainerFamily, draft: RecipeDraft, ranks: int | None) -> None:
    """Add micro-batch and batch; `ranks` is the number of data parallel ranks, None where it is not known."""
    micro = options.whole("per_device_train_batch_size", "per_gpu_train_batch_size")
    micro = family.default("per_device_train_batch_size") if micro is None else micro
    accumulated = options.whole("gradient_accumulation_steps")
    if accumulated is None and family.name == SWIFT and ranks is not None:  # swift/trainers/arguments.py, 4.5
        accumulated = max(math.ceil(16 / (max(micro, 1) * ranks)), 1)
    accumulated = family.default("gradient_accumulation_steps") if accumulated is None else accumulated
    add_batch(draft, micro, accumulated, ranks)


def add_batch(draft: RecipeDraft, micro: int, accumulated: int, ranks: int | None) -> None:
    """Add a batch of `accumulated` micro-batches on every data parallel rank."""
    draft.layout["micro_batch_size"] = micro
    if ranks is None:
        draft.lack(
            "training.global_batch_size",
            f"{micro} x {accumulated} sequences for every data parallel rank, whose number is not known; write the "
            "product, or say nodes and devices",
        )
    else:
        draft.training["global_batch_size"] = micro * accumulated * ranks


def read_length(options: ScriptOptions, family: TrainerFamily, draft: RecipeDraft) -> None:
    """Add the length of a sequence and of the training."""
    tokens = options.whole(*LENGTHS)
    if tokens is None and family.length is not None:
        tokens = family.length
        draft.notes.append(f"{tokens} tokens in a sequence: the default of {family.name}'s scripts")
    if tokens is None:
        draft.lack("training.sequence_length", UNSAID_LENGTH)
    else:
        draft.training["sequence_length"] = tokens
    steps = options.whole("max_steps")
    if steps is not None and steps > 0:
        draft.training["steps"] = steps
        return
    epochs = options.number("num_train_epochs")
    epochs = family.default("num_train_epochs") if epochs is None else epochs
    draft.lack(
        "training.steps",
        f"the data decides how many steps --num_train_epochs {epochs:g} makes; --set training.steps=N (the rendered "
        "--max_steps goes before the epochs)",
    )
    assume_steps(draft, options.number("warmup_steps"), _interval(options))


def read_schedule(options: ScriptOptions, family: TrainerFamily, draft: RecipeDraft) -> None:
    """Add learning rate, its decay and warm-up, and AdamW's settings."""
    training = draft.training
    for row in ARGUMENTS:
        if row.read is not None:
            value, default = row.read(options, row.key), family.default(row.key)
            training[row.reads.partition(".")[2]] = default if value is None else type(default)(value)
    betas = [options.number(name) for name in ("adam_beta1", "adam_beta2")]
    training["adam_betas"] = [
        float(family.default(f"adam_beta{i + 1}") if beta is None else beta) for i, beta in enumerate(betas)
    ]
    interval = options.number("logging_steps")
    if interval is not None and interval < 1:
        draft.leave_out(
            options.written("logging_steps"), "is a share of all steps; write training.log_interval", matters=False
        )
        interval = None
    training["log_interval"] = int(family.default("logging_steps") if interval is None else interval)
    _decay(options, family, draft)


def _decay(options: ScriptOptions, family: TrainerFamily, draft: RecipeDraft) -> None:
    training = draft.training
    name = options.text("lr_scheduler_type") or str(family.default("lr_scheduler_type"))
    if name in DECAYS:
        training["learning_rate_decay"] = DECAYS[name]
    else:
        draft.leave_out(
            options.written("lr_scheduler_type"),
            "the recipe knows cosine, linear and constant; memory and time are the same: write "
            "training.learning_rate_decay",
            matters=False,
        )
    least = _minimum_rate(options)
    if least is not None and name == LEAST:
        training["minimum_learning_rate"] = least
    elif options.has("lr_scheduler_kwargs"):
        draft.leave_out(
            options.written("lr_scheduler_kwargs"), "the recipe knows min_lr of a cosine decay alone", matters=False
        )
    warmup, ratio = options.number("warmup_steps"), options.number("warmup_ratio")
    if warmup is None and ratio is None:
        ratio = family.default("warmup_ratio")
    if warmup is not None and 0 < warmup < 1:  # a share, since transformers 5
        warmup, ratio = None, warmup
    if name == "constant":
        training["warmup_steps"] = 0
        return
    if warmup or not ratio:
        training["warmup_steps"] = int(warmup or 0)
    elif "steps" in training:
        training["warmup_steps"] = math.ceil(training["steps"] * ratio)
    else:
        key = "training.warmup_steps"
        draft.lack(key, f"{ratio:g} of all steps warm up; --set {key}=N with training.steps")
        warmup = math.ceil(draft.stand_ins["training.steps"].value * ratio)
        draft.stand_in(key, warmup, f"{ratio:g} of the steps that are assumed warm up")


def _minimum_rate(options: ScriptOptions) -> float | None:
    text = options.text("lr_scheduler_kwargs")
    try:
        values = parse_json(text.encode("utf-8", "replace")) if text else None
    except ValueError:
        return None
    return number(values["min_lr"]) if isinstance(values, dict) and set(values) == {"min_lr"} else None


def read_numbers(options: ScriptOptions, family: TrainerFamily, draft: RecipeDraft, otherwise: str | None) -> None:
    """Add the number format and what is recomputed; `otherwise` is the format that launcher or ds_config.json say."""
    automatic = options.text("bf16") == "auto"  # Axolotl's: wherever the device has it
    fp16, bf16 = options.flag("fp16"), True if automatic else options.flag("bf16")
    if family.name == SWIFT and fp16 is None and bf16 is None:  # by the format of the weights
        weights = options.text("torch_dtype", "dtype") or "bfloat16"
        fp16, bf16 = weights in ("float16", "fp16"), weights in ("bfloat16", "bf16", "AUTO")
    if bf16 is None:
        default = family.default("bf16")
        bf16 = not fp16 if default is None else default
    precision = "fp16" if fp16 else "bf16" if bf16 or options.flag("pure_bf16") else otherwise or "fp32"
    draft.training["precision"] = precision
    kind = options.text("gradient_checkpointing")
    recomputed = None if kind is None else true_or_false(kind)
    if kind is not None and recomputed is None:  # Axolotl's "offload" and "unsloth"
        recomputed = True
        draft.notes.append(f"gradient_checkpointing {ascii(kind)[1:-1]}: what leaves the device is counted on it")
    if options.flag("disable_gradient_checkpointing"):
        recomputed = False
    recomputed = family.default("gradient_checkpointing") if recomputed is None else recomputed
    draft.layout["recompute"] = "full" if recomputed else "none"
    if options.flag("use_liger_kernel", "use_liger", "enable_liger_kernel"):
        draft.layout["loss"] = "fused_linear"
        draft.notes.append("Liger: its fused loss is counted, what its other kernels spare is not")


def stated_model(options: ScriptOptions, family: str) -> str | None:
    """Return the model that a script names; `family` is its trainer's name in the table of trainers."""
    return next((options.text(name) for name in model_options(family) if options.has(name)), None)


def read_new_model(options: ScriptOptions, draft: RecipeDraft) -> bool:
    """Add a GPT-2 that the script makes anew with sizes of its own (`--config_overrides` of run_clm.py); return whether
    there is one."""
    text = options.text("config_overrides")
    if text is None or options.text("model_type") != "gpt2" or options.has(*MODELS):
        return False
    overrides = dict(part.split("=", 1) for part in text.split(",") if part.count("=") == 1)
    sizes = {
        key: size for name, key in _GPT2_SIZES.items() if (size := whole_number_in(overrides.get(name))) is not None
    }
    if "hidden_size" in sizes:
        sizes["ffn_hidden_size"] = 4 * sizes["hidden_size"]
    if "num_attention_heads" in sizes:
        sizes["num_query_groups"] = sizes["num_attention_heads"]
    draft.keys["model"] = {"base": "gpt2", **sizes}
    if overrides.get("gradient_checkpointing") == "true":  # of the configuration, in earlier versions of transformers
        draft.layout["recompute"] = "full"
        draft.notes.append("gradient_checkpointing of the model's configuration is rendered as the Trainer's argument")
    if "max_position_embeddings" in sizes and not options.has(*LENGTHS):
        draft.training["sequence_length"] = min(sizes["max_position_embeddings"], 1024)
        draft.missing[:] = [
            sentence for sentence in draft.missing if not sentence.startswith("training.sequence_length")
        ]
    return True


_GPT2_SIZES = {
    "n_layer": "num_layers",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "vocab_size": "vocab_size",
}


def read_adapters(options: ScriptOptions, family: TrainerFamily, draft: RecipeDraft, place: str) -> None:
    """Add low-rank adapters, and note what changes memory and no recipe says. Raises NoVerdict for another tuning."""
    kind = options.text("finetuning_type") or family.default("finetuning_type")
    own = options.has("lora_rank") and not options.has("finetuning_type")
    switch = options.flag("use_peft", "only_optimize_lora")
    own = own and family.name not in ("TRL", "alignment-handbook", OPEN_INSTRUCT, AXOLOTL)
    on = switch if switch is not None else kind in ("lora", "qlora") or own
    rank = options.whole("lora_rank")
    rank = family.default("lora_rank") if rank is None else rank
    if on and rank > 0:
        draft.training["adapters"] = {"rank": rank}
        targets = [name for word in options.values("lora_target_modules") or () for name in word.split(",")]
        known = [_TARGETS[name] for name in targets if name in _TARGETS]
        if len(known) < len(targets) and not any(target in ("all", "all-linear") for target in targets):
            draft.notes.append("adapters are counted beside every linear layer, and these are fewer: no less is needed")
        elif known and Adapters(rank, target_modules=tuple(known)).targets < Adapters(rank).targets:
            draft.training["adapters"]["target_modules"] = known
    elif family.name == SWIFT and not options.has("learning_rate"):
        draft.training["learning_rate"] = 1.0e-5
    if kind not in ("full", "lora", "qlora"):
        raise NoVerdict.on(place, f"{options.written('finetuning_type')[0]} {kind}: its memory is not known")


_TARGETS = {part: part for parts in FUSED_MODULES.values() for part in parts}
_TARGETS |= {"qkv_proj": "linear_qkv", "gate_up_proj": "linear_fc1"}


def _interval(options: ScriptOptions) -> float | None:
    """Return after how many steps it saves; None where it does not say, or after an epoch, as open-instruct says it."""
    return None if options.text("save_steps") == "epoch" else options.number("save_steps")


def read_saving(options: ScriptOptions, family: TrainerFamily, draft: RecipeDraft) -> None:
    """Add where and how often it saves."""
    folder, when = options.text("output_dir"), options.text("save_strategy") or "steps"
    interval = _interval(options)
    when = "epoch" if options.text("save_steps") == "epoch" else when
    interval = family.default("save_steps") if interval is None else interval
    if when == "steps" and folder is not None and interval >= 1:
        draft.training |= {"save_interval": int(interval), "checkpoint_path": folder}
        return
    if folder is not None:
        draft.leave_out(
            options.written("output_dir"),
            "nothing is saved by steps; the run directory has such a folder",
            matters=False,
        )
    if when not in ("steps", "no") or interval < 1:
        draft.leave_out(
            options.written("save_strategy", "save_steps"), "a recipe saves every so many steps", matters=False
        )
        draft.lack(
            "training.save_interval",
            f"it saves every {when.removesuffix('s')}, a recipe every so many steps; write save_interval and "
            "checkpoint_path, or nothing is saved",
        )


def words_of_file(values: Mapping[str, Any], draft: RecipeDraft) -> tuple[str, ...]:
    """Return the arguments that a file of them says, as words of a command line.

    What has no such form is told of: a mapping within, and text of several lines.
    """
    words: list[str] = []
    for name, value in values.items():
        items = value if isinstance(value, list) else [value]
        plain = all(isinstance(item, (str, int, float)) and "\n" not in str(item) for item in items)
        if value is None or not items:
            continue
        if isinstance(value, dict) and name in ("gradient_checkpointing_kwargs", "lr_scheduler_kwargs"):
            words += [f"--{name}", json.dumps(value)]
        elif plain:
            words += [f"--{name}", *(str(item) for item in items)]
        else:
            group = trainer_group(name, ())
            matters = group is None or group.flag_class.kind != NEUTRAL
            draft.leave_out((name,), "a mapping, or text of several lines, cannot be an argument", matters)
    return tuple(words)


def ask_for_values(command: TrainerCommand, options: ScriptOptions, draft: RecipeDraft) -> None:
    """Ask for the value of every option that only the job knows, which no default may replace if memory depends on
    it."""
    for group in options.without_value():
        flag, _, value = group[0].partition("=")
        words = (*filter(None, (value,)), *group[1:])
        if any(word in command.files for word in words):
            continue  # a file that the script writes, under whatever name
        kind, name = trainer_group(flag.lstrip("-").replace("-", "_"), words), flag.lstrip("-")
        decides = kind is not None and kind.title in ASKED_FOR and not name.startswith("use_")
        (draft.ask if decides else draft.lack)(flag, wanted_value(flag, " ".join(words), command.unset))
