"""A command that trains with DeepSpeed or with Hugging Face's Trainer, read into a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any

from llmlaunch.command_lines.command import Reading, TrainerCommand, is_unset
from llmlaunch.command_lines.recipe_draft import (
    NO_DATA,
    RecipeDraft,
    ScriptOptions,
    add_job,
    add_model,
    assume_steps,
    file_text,
    full_path,
    job_name,
    recipe_name,
    true_or_false,
    wanted_value,
)
from llmlaunch.command_lines.trainers import not_read
from llmlaunch.documents.secrets import is_secret_variable, known_secret
from llmlaunch.errors import NoVerdict, UserError
from llmlaunch.frameworks.classed_arguments import UNKNOWN
from llmlaunch.frameworks.deepspeed.hugging_face import (
    AXOLOTL,
    LENGTHS,
    LLAMA_FACTORY,
    NAMES,
    OPEN_INSTRUCT,
    TRANSFORMERS,
    UNSAID_LENGTH,
    TrainerFamily,
    add_batch,
    ask_for_values,
    family_of_script,
    is_trainer,
    read_adapters,
    read_batch,
    read_length,
    read_new_model,
    read_numbers,
    read_saving,
    read_schedule,
    stated_model,
    words_of_file,
)
from llmlaunch.frameworks.deepspeed.own_settings import AUTO
from llmlaunch.frameworks.deepspeed.read_config import (
    DsConfig,
    as_trl_launches,
    configuration,
    ds_config_of,
    is_trl,
    keep_precision,
    parse_ds_config,
    read_fsdp,
    read_mapping,
    read_optimizer,
    read_precision,
    read_rest,
    read_rows,
    read_split,
    read_zero,
)
from llmlaunch.frameworks.deepspeed.settings import settings_of
from llmlaunch.frameworks.deepspeed.trainer_table import RENDERED_AGAIN, trainer_group

COMMANDS = {
    "axolotl": "src/axolotl/cli/train.py",
    "llamafactory-cli": "src/train.py",
    "llamafactory": "src/train.py",
    "swift": "swift/cli/sft.py",
    "trl": "trl/scripts/sft.py",
}
SWIFT_SETTINGS = {  # settings that ms-swift takes as arguments (swift/arguments/sft_args.py, 4.5)
    "zero_hpz_partition_size": "zero_optimization.zero_hpz_partition_size",
    "deepspeed_autotp_size": "tensor_parallel.autotp_size",
}
STEPS = ("max_steps", "max_train_steps", "train_iters", "steps", "num_steps", "total_steps", "train_steps")
RECOMPUTED = ("gradient_checkpointing", "checkpoint_activations", "activation_checkpointing")
STAGES = ("pipeline_parallel_size", "pipe_parallel_size", "pipeline_stages", "num_stages")


def read_deepspeed(command: TrainerCommand) -> Reading:
    """Return the recipe of a command that trains with DeepSpeed, or with Hugging Face's Trainer.

    Raises UserError for a value that no parser would take, and for a file that cannot be read.
    """
    command = as_trl_launches(command) if is_trl(command) and command.nodes is None else command
    stem = PurePath(next((w for w in command.arguments if w.endswith((".yaml", ".yml"))), command.trainer)).stem
    draft = RecipeDraft(job_name(command, stem))
    options = _options(command, draft)
    if command.family == LLAMA_FACTORY and true_or_false(command.environment.get("USE_MCA", "")):
        from llmlaunch.frameworks.megatron.swift import read_llama_factory  # what no other command needs

        return read_llama_factory(command, options)
    add_job(draft, command)
    kind = "hugging-face" if is_trainer(options, command.family) else "deepspeed"
    _READERS[kind](command, options, draft)
    ask_for_values(command, options, draft)
    return draft.reading(kind)


def read_ds_config(text: str, name: str = "ds_config.json") -> Reading:
    """Return the recipe of a ds_config.json alone, for the shipped training script. Raises UserError."""
    command, options = TrainerCommand("", (), place=name), ScriptOptions((), name)
    draft = RecipeDraft(recipe_name(PurePath(name).stem))
    config = parse_ds_config(text, name)
    if AUTO in text:
        draft.notes.append(
            '"auto" is what Hugging Face\'s Trainer fills in from its arguments: read those for the rest'
        )
    add_job(draft, command)
    _own_keys(command, config, options, draft, name)
    add_model(draft, None, command.folder)
    for section in ("optimizer", "scheduler"):
        if config.settings.pop(section, None) is not None:
            draft.leave_out(
                (section,), "the shipped script brings AdamW and its schedule, with the same settings", matters=False
            )
    own = config.rest(trainer=False)
    draft.keys["backend"] = {"name": "deepspeed", "ds_config": own} if own else "deepspeed"
    draft.lack("data", "write data.path, or data: {mock: true}; and backend.script for a script of your own")
    draft.stand_in("data", {"mock": True}, NO_DATA)
    return draft.reading("deepspeed")


def read_training_args(
    text: str,
    name: str,
    folder: Path = Path(),
    files: Mapping[str, str] = MappingProxyType({}),
    nodes: int | None = None,
    devices_per_node: int | None = None,
) -> Reading:
    """Return the recipe of a file of arguments alone, YAML or JSON: TrainingArguments, TRL's or LLaMA-Factory's, or
    the configuration of `accelerate launch`. `nodes` and `devices_per_node` are what somebody says of them beside it.
    Raises UserError."""
    values = read_mapping(text, name, "a file of TrainingArguments")
    if "zero_optimization" in values or "train_micro_batch_size_per_gpu" in values:
        return read_ds_config(text, name)
    of_launcher = "distributed_type" in values
    command = TrainerCommand(
        "train.py",
        () if of_launcher else (name,),
        launcher="accelerate" if of_launcher else "torchrun",
        nodes=nodes,
        devices_per_node=devices_per_node,
        launcher_options={"config_file": name} if of_launcher else {},
        files={**files, name: text},
        folder=folder,
        place=name,
    )
    draft = RecipeDraft(recipe_name(PurePath(name).stem))
    options = _options(command, draft)
    add_job(draft, command)
    _read_trainer(command, options, draft)
    draft.lack("backend.script", f"{name} does not name the script that reads it; write its path")
    ask_for_values(command, options, draft)
    return draft.reading("hugging-face")


def _options(command: TrainerCommand, draft: RecipeDraft) -> ScriptOptions:
    """Return the script's options, by the Trainer's names: those of the command line, and of the file of arguments that
    it names."""
    words, beneath = _words(command, draft)
    family = family_of_script(command.family, ScriptOptions(words, command.place, beneath))
    return ScriptOptions(words, command.place, beneath, {**NAMES, **family.names})


def _words(command: TrainerCommand, draft: RecipeDraft) -> tuple[Sequence[str], Sequence[str]]:
    """Return the words of the script's options, and those of the file over which they go."""
    words = list(command.arguments)
    if PurePath(command.trainer).name in COMMANDS and words and not words[0].startswith("-"):
        words = words[1:]  # `train` of llamafactory-cli, `sft` of trl and swift
    names_file = bool(words) and words[0].lower().endswith((".yaml", ".yml", ".json")) and words[0][0] != "-"
    if names_file:
        inside = words_of_file(_arguments_in(command, words[0]), draft)
        rest = [part for word in words[1:] for part in _as_option(word)]
        return (*inside, *rest), ()
    file = ScriptOptions(words, command.place).path("config")
    if file is None or not file.lower().endswith((".yaml", ".yml")):
        return words, ()
    # the file is handed on with all that is in it, so nothing is to be told of what has no form of an argument
    return words, words_of_file(_arguments_in(command, file), RecipeDraft(draft.name))


def _arguments_in(command: TrainerCommand, path: str) -> dict[str, Any]:
    text = file_text(command, path)
    if text is None and is_unset(path):
        asked = wanted_value("the file of the trainer's arguments", path, command.unset)
        raise UserError(f"{command.place}: {asked}")
    if text is None:
        raise NoVerdict.on(
            command.place,
            f"{path}: there is no such file below {command.folder.absolute()}, and it holds the trainer's arguments; "
            "read the script where the file is",
        )
    return read_mapping(text, path, "a file of TrainingArguments")


def _as_option(word: str) -> tuple[str, ...]:
    """Return `key=value`, as LLaMA-Factory takes it after its file, as an option."""
    name, equals, value = word.partition("=")
    return (f"--{name}", value) if equals and name.isidentifier() else (word,)


def _read_trainer(command: TrainerCommand, options: ScriptOptions, draft: RecipeDraft) -> None:
    family = family_of_script(command.family, options)
    _refuse_other_losses(command, family, options)
    config, precision, place = configuration(command, options, draft)
    for name, key in SWIFT_SETTINGS.items():
        value = options.whole(name)
        if value and config is not None:
            config.put(key, value)
            options.take(name)
    stated = read_precision(config) if config is not None else None
    read_numbers(options, family, draft, precision or (stated if stated != "fp32" else None))
    if config is not None:
        keep_precision(config, draft.training["precision"])
    read_zero(config or DsConfig(), draft, place)
    together = read_split(config or DsConfig(), draft)
    ranks = _data_ranks(command, together)
    read_batch(options, family, draft, ranks)
    read_length(options, family, draft)
    read_schedule(options, family, draft)
    read_adapters(options, family, draft, command.place)
    read_saving(options, family, draft)
    if "checkpoint_path" in draft.training:
        draft.training["checkpoint_path"] = full_path(draft.training["checkpoint_path"], command.folder)
    if not read_new_model(options, draft):
        add_model(draft, stated_model(options, command.family), command.folder)
    own: dict[str, Any] = {}
    if config is not None:
        _agree(config, draft, place)
        read_rest(config, draft)
        own = config.rest(trainer=True)
    elif not read_fsdp(command, options, draft) and not draft.undecided:
        if family.name == OPEN_INSTRUCT and "adapters" not in draft.training:
            raise NoVerdict.on(command.place, _NARROW_STATES)
        draft.notes.append("without DeepSpeed it trains by DistributedDataParallel; the recipe is DeepSpeed's ZeRO 0")
    options.take(*RENDERED_AGAIN, "local_rank", *(("num_processes", "num_machines") if is_trl(command) else ()))
    _add_script(command, (*options.rest(), *_deciding(options)), draft, "hugging-face", own)
    if family.name == AXOLOTL:
        draft.not_rendered = (
            "Axolotl reads its own file alone, and a rendered job gives the script the Trainer's arguments; the recipe "
            "can be checked"
        )


# open_instruct/finetune.py e6c3044: from_pretrained(torch_dtype=torch.bfloat16), whatever the arguments say
_NARROW_STATES = (
    "open_instruct/finetune.py loads weights as bfloat16, and without DeepSpeed gradients and optimizer states are "
    "bfloat16, too: its memory is not known"
)


def _refuse_other_losses(command: TrainerCommand, family: TrainerFamily, options: ScriptOptions) -> None:
    """Raise NoVerdict for LLaMA-Factory's stages other than pre-training and supervised tuning, which keep a second
    model, or two sequences for one."""
    stage = options.text("stage") if family.name == LLAMA_FACTORY else None
    if stage not in (None, "pt", "sft"):
        raise not_read(f"LLaMA-Factory's stage {stage}", command.place)


def _deciding(options: ScriptOptions) -> Iterator[tuple[str, ...]]:
    """Yield the options of a file of arguments that change memory and no recipe says, such as another optimizer."""
    for name, *values in options.of_the_file():
        group = trainer_group(name.lstrip("-"), values)
        if group is not None and group.flag_class.kind == UNKNOWN and not group.flag_class.key:
            yield name, *values


def _data_ranks(command: TrainerCommand, together: int) -> int | None:
    """Return over how many ranks a batch is shared out; None where it is not known."""
    if command.nodes is None or command.devices_per_node is None:
        return None
    return max(command.nodes * command.devices_per_node // together, 1)


def _agree(config: DsConfig, draft: RecipeDraft, place: str) -> None:
    """Take out of the file what the Trainer's arguments say, and tell where the two differ: the Trainer would stop."""
    training, layout = draft.training, draft.layout
    expected = {
        "train_micro_batch_size_per_gpu": layout["micro_batch_size"],
        "train_batch_size": training.get("global_batch_size"),
        "gradient_accumulation_steps": None,
        "optimizer.params.lr": training["learning_rate"],
        "optimizer.params.weight_decay": training["weight_decay"],
        "optimizer.params.betas": training["adam_betas"],
        "scheduler.params.warmup_max_lr": training["learning_rate"],
        "scheduler.params.warmup_num_steps": training.get("warmup_steps"),
        "scheduler.params.total_num_steps": training.get("steps"),
    }
    clips, clipping = config.has("gradient_clipping"), config.take("gradient_clipping")
    if not clips:
        training["gradient_clipping"] = 0.0
        draft.notes.append(
            "ds_config.json has no gradient_clipping, so DeepSpeed clips nothing, whatever the Trainer says"
        )
    elif clipping is not None and clipping != training["gradient_clipping"]:
        draft.notes.append(
            f"{place}: gradient_clipping {clipping} is not the Trainer's, which stops there; make them equal"
        )
    for key, value in expected.items():
        present, written = config.has(key), config.take(key)
        if written is not None and value is not None and written != value:
            draft.notes.append(
                f"{place}: {key} {written} is not the Trainer's {value}; it stops there: make them equal"
            )
        if present and "." in key:
            config.put(key, AUTO)  # of optimizer and schedule, filled in from the Trainer's arguments


def _add_script(
    command: TrainerCommand,
    groups: Sequence[tuple[str, ...]],
    draft: RecipeDraft,
    kind: str,
    own: Mapping[str, Any],
) -> None:
    """Add the script with the arguments that are handed on to it, each with its words."""
    backend: dict[str, Any] = {"name": "deepspeed", "script": _script(command, draft)}
    if kind != "own":
        backend["script_kind"] = kind
    words: list[str] = []
    for group in groups:
        name = group[0].lstrip("-").partition("=")[0]
        value = " ".join((group[0].partition("=")[2], *group[1:])).strip()
        if is_secret_variable(name, value) or any(map(known_secret, group)):
            draft.leave_out((group[0].partition("=")[0],), "looks like a secret, which is never written", matters=False)
        elif not any(map(is_unset, group)):
            words += group
    if words:
        backend["script_args"] = words
    if own:
        backend["ds_config"] = dict(own)
    draft.keys["backend"] = backend
    if "data" not in draft.keys:
        draft.keys["data"] = {"mock": True}
        draft.notes.append("what it is trained on is the script's own affair (its arguments); data: mock says no more")


def _script(command: TrainerCommand, draft: RecipeDraft) -> str:
    """Return the path of the script's file."""
    name = COMMANDS.get(PurePath(command.trainer).name)
    if name is not None:
        draft.lack("backend.script", f"{command.trainer} starts {name} of its own checkout; write that file's path")
        return full_path(name, command.folder)
    if "/" not in command.trainer and not command.trainer.endswith(".py"):
        name = command.trainer.replace(".", "/") + ".py"
        draft.notes.append(f"the module {command.trainer} is taken to be {name}; backend.script names the file")
        return full_path(name, command.folder)
    return full_path(command.trainer, command.folder)


def _read_own(command: TrainerCommand, options: ScriptOptions, draft: RecipeDraft) -> None:
    """A script with a training loop of its own: ds_config.json decides, and its arguments where their names say it."""
    config, precision, place = configuration(command, options, draft)
    handed_over = config is not None and options.has("deepspeed_config", "deepspeed")
    if config is None and not draft.undecided and not options.has("zero_stage") and not _replicates(command):
        draft.leave_stage_open(
            f"{command.place} names no ds_config.json, and {command.trainer} decides by itself how model states are "
            "shared out; write the stage"
        )
    config = config or ds_config_of(_settings_of_script(options), place)
    _own_keys(command, config, options, draft, place, precision)
    read_adapters(options, TRANSFORMERS, draft, command.place)
    add_model(draft, stated_model(options, command.family), command.folder)
    options.take("deepspeed", "deepspeed_config", "local_rank")
    kind = "pipeline" if draft.layout.get("pipeline", 1) > 1 else "own"
    _add_script(command, options.rest(), draft, kind, config.rest(trainer=False))
    if not handed_over:
        draft.not_rendered = (
            "the script makes its DeepSpeed configuration itself or gets it from its launcher, and a rendered job "
            "hands it --deepspeed_config; the recipe can be checked"
        )


def _replicates(command: TrainerCommand) -> bool:
    """Return whether accelerate is told that every rank holds a whole replica."""
    stated = command.launcher_options
    return command.launcher == "accelerate" and bool(stated.get("multi_gpu")) and "config_file" not in stated


def _own_keys(
    command: TrainerCommand,
    config: DsConfig,
    options: ScriptOptions,
    draft: RecipeDraft,
    place: str,
    precision: str | None = None,
) -> None:
    """Add what a configuration says, and a script's arguments where their names say it."""
    draft.training["precision"] = _own_precision(config, options, precision)
    keep_precision(config, draft.training["precision"])
    draft.layout["recompute"] = (
        "full" if any(options.flag(name) for name in RECOMPUTED if options.has(name)) else "none"
    )
    read_rows(config, draft, settings_of("layout.recompute"))
    read_zero(config, draft, place)
    together = read_split(config, draft)
    stages = options.whole(*STAGES) or 1
    if stages > 1 and "pipeline" not in draft.layout:
        draft.layout["pipeline"] = stages
        together *= stages
    _own_batch(command, config, options, draft, together, place)
    _own_length(options, draft)
    clipping = config.take("gradient_clipping")
    draft.training["gradient_clipping"] = float(clipping) if isinstance(clipping, (int, float)) else 0.0
    read_optimizer(config, draft)
    for name, key in (("learning_rate", "learning_rate"), ("lr", "learning_rate"), ("weight_decay", "weight_decay")):
        if options.has(name) and key not in draft.training:
            value = options.number(name)
            draft.training |= {} if value is None else {key: value}
    read_rest(config, draft)


def _settings_of_script(options: ScriptOptions) -> dict[str, Any]:
    """Return the settings that a script's own arguments say, by the names of DeepSpeed-Chat's."""
    stage = options.whole("zero_stage")
    zero: dict[str, Any] = {"stage": 0 if stage is None else stage}
    if options.flag("offload"):
        zero |= {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    return {"zero_optimization": zero}


def _own_precision(config: DsConfig, options: ScriptOptions, launcher: str | None) -> str:
    stated = read_precision(config)
    if stated != "fp32":
        return stated
    dtype = options.text("dtype", "precision", "data_type")
    if dtype in ("bf16", "fp16", "bfloat16", "float16"):
        return "bf16" if dtype.startswith("b") else "fp16"
    named = next((name for name in ("bf16", "fp16") if options.has(name) and options.flag(name)), None)
    return named or launcher or "fp32"


def _own_batch(
    command: TrainerCommand, config: DsConfig, options: ScriptOptions, draft: RecipeDraft, together: int, place: str
) -> None:
    """Two of the three sizes decide the third, as in deepspeed/runtime/config.py _set_batch_related_parameters."""
    ranks = _data_ranks(command, together)
    whole = config.take_whole("train_batch_size", place)
    micro = config.take_whole("train_micro_batch_size_per_gpu", place)
    accumulated = config.take_whole("gradient_accumulation_steps", place)
    if micro is None:
        micro = options.whole("per_device_train_batch_size", "micro_batch_size", "train_micro_batch_size_per_gpu")
    if accumulated is None:
        accumulated = options.whole("gradient_accumulation_steps")
    if whole is None:
        if micro is None:
            draft.lack("training.global_batch_size", f"{place} says no batch; write it, and layout.micro_batch_size")
        else:
            add_batch(draft, micro, accumulated or 1, ranks)
        return
    draft.training["global_batch_size"] = whole
    if micro is None and ranks is not None:
        micro = max(whole // ((accumulated or 1) * ranks), 1)
    if micro is not None:
        draft.layout["micro_batch_size"] = micro


def _own_length(options: ScriptOptions, draft: RecipeDraft) -> None:
    tokens, steps = options.whole(*LENGTHS), options.whole(*STEPS)
    if tokens is None:
        draft.lack("training.sequence_length", UNSAID_LENGTH)
    else:
        draft.training["sequence_length"] = tokens
    if steps is None or steps < 1:
        draft.lack("training.steps", "the script decides it by itself; --set training.steps=N")
        assume_steps(draft, options.number("warmup_steps", "num_warmup_steps"), options.number("save_steps"))
    else:
        draft.training["steps"] = steps


_READERS = {"hugging-face": _read_trainer, "deepspeed": _read_own}
