"""A command that starts a recipe of Megatron-Bridge, read into a recipe of ours.

`scripts/training/run_recipe.py --recipe NAME KEY=VALUE ...` takes one of Bridge's own recipes, whose values are in
recipes.json; a Python script fills a ConfigContainer itself or calls such a recipe (Megatron-Bridge 0.6). The fields
become the words of Megatron-LM that mean the same, and those are read.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from llmlaunch.command_lines.command import Reading, TrainerCommand, is_unset
from llmlaunch.command_lines.recipe_draft import RecipeDraft, ScriptOptions, add_job, add_model, file_text, job_name
from llmlaunch.documents.yaml_strict import parse_document, parse_value
from llmlaunch.errors import NoVerdict, UserError
from llmlaunch.families.hub_ids import preset_names
from llmlaunch.frameworks.argument import ALLOCATOR_SETTINGS, EXPANDABLE_SEGMENTS
from llmlaunch.frameworks.bridge.recipe_fields import (
    PRECISION,
    STAGES,
    UNREAD,
    Fields,
    PythonModule,
    bridge_arguments,
    field_text,
    flat,
    known_recipes,
    megatron_words,
    plain_fields,
    resolved,
    row_fields,
    script_fields,
)
from llmlaunch.frameworks.bridge.rules import ALL_REQUIREMENTS
from llmlaunch.frameworks.bridge.settings import SECTIONS
from llmlaunch.frameworks.megatron.command_line import model_values, read_namespace
from llmlaunch.frameworks.megatron.flags.table import column
from llmlaunch.frameworks.megatron.parser import dest_of
from llmlaunch.frameworks.megatron.words import read_words

RUNNER = "run_recipe"
KIND = "megatron-bridge"
RECIPE_VARIABLES = {ALLOCATOR_SETTINGS: EXPANDABLE_SEGMENTS}  # recipes/utils/environment_utils.py, 0.6
LORA_RANK = 32  # megatron/bridge/peft/lora.py LoRA.dim, 0.6
TASKS = {"pretrain": "pretrain", "sft": "sft", "lora": "peft", "dora": "peft"}
# Options of run_recipe.py that set a field (COMMON_OVERRIDE_FIELDS, scripts/training/run_recipe.py, 0.6).
OPTIONS = {
    ("max_steps", "ms"): "train.train_iters",
    ("global_batch_size", "gb"): "train.global_batch_size",
    ("micro_batch_size", "mb"): "train.micro_batch_size",
    ("seq_length", "sl"): "dataset.seq_length",
    ("tensor_model_parallel_size", "tp"): "model.tensor_model_parallel_size",
    ("pipeline_model_parallel_size", "pp"): "model.pipeline_model_parallel_size",
    ("context_parallel_size", "cp"): "model.context_parallel_size",
    ("virtual_pipeline_model_parallel_size", "vp"): "model.virtual_pipeline_model_parallel_size",
    ("expert_model_parallel_size", "ep"): "model.expert_model_parallel_size",
    ("expert_tensor_parallel_size", "etp"): "model.expert_tensor_parallel_size",
    ("lr",): "optimizer.lr",
    ("min_lr",): "optimizer.min_lr",
    ("warmup_iters",): "scheduler.lr_warmup_iters",
    ("pretrained_checkpoint",): "checkpoint.pretrained_checkpoint",
    ("save_dir",): "checkpoint.save",
    ("load_dir",): "checkpoint.load",
    ("save_interval",): "checkpoint.save_interval",
}
OBJECTS = ("comm_overlap", "peft")  # that a command may switch off whole
SIZES_OF_STEP = ("training.global_batch_size", "training.sequence_length")
# What decides memory and no recipe of ours says, by the beginning of the field.
UNPRICED = ("model.freeze_", "model.quant", "optimizer_config_override", "profiling.record_memory")


def read_bridge(command: TrainerCommand) -> Reading:
    """Return the recipe of a command that trains with Megatron-Bridge.

    Raises:
        NoVerdict: the recipe is none that is known, or what it trains is none of ours.
        UserError: a file cannot be read, or a value is none.
    """
    words = [word for word in command.arguments if "=" not in word or word.startswith("-")]
    options = ScriptOptions(words, command.place)
    base = _of_recipe(command, options) if PurePath(command.trainer).stem == RUNNER else _of_script(command, options)
    stated = dict(_overrides(command, options))
    if PurePath(command.trainer).stem == RUNNER:
        command = replace(command, environment={**RECIPE_VARIABLES, **command.environment})
    draft = RecipeDraft(job_name(command, options.text("recipe", "model"), PurePath(command.trainer).stem), kind=KIND)
    add_job(draft, command)
    without = tuple(f"{name}." for name in OBJECTS if name in stated and stated[name] is None)
    fields = {
        name: value
        for name, value in (base | stated).items()
        if value is not None and not (without and name.startswith(without))
    }
    named = options.text("hf_path", "hf_model_id") or fields.pop("model", None)
    if named in preset_names():
        draft.keys["model"] = named
    else:
        add_model(draft, named, command.folder)
    _refuse_others(fields, stated, command.place)
    values = resolved(fields)
    if fields.get("perf") and values.get("optimizer.optimizer", "adam") == "adam":
        _as_benchmark(command, values, stated)
    _adapters(values, draft)
    _data(values)
    if values.get(STAGES) == UNREAD:
        draft.lack(
            "layout.layers_by_stage", f"Bridge works out {STAGES} of this recipe; --set layout.layers_by_stage=..."
        )
    groups = list(megatron_words(values))
    parsed = read_words([word for group in groups for word in group], place=command.place)
    if values.get("model.cross_entropy_loss_fusion") and values.get("model.cross_entropy_fusion_impl") == "te":
        draft.layout["loss"] = "te"
    model = draft.keys.pop("model", None)
    base_values = {} if model is None else model_values(model, command.folder)
    own = {dest for dest in parsed.values.keys() & base_values.keys() if parsed.values[dest] != base_values[dest]}
    if model is not None and not own:
        draft.keys["model"] = model
    draft.keys["backend"] = {"name": KIND}
    extra = list(_unsaid(stated, draft))
    draft.keys["backend"] |= {"extra_args": extra} if extra else {}
    reading = read_namespace(
        draft,
        {**base_values, **parsed.values},
        parsed,
        command,
        extra_argument=bridge_arguments(draft, stated),
        requirements=ALL_REQUIREMENTS,
    )
    of_person = {flag for name in stated for flag in row_fields().get(name, ())}
    return replace(
        reading, unread=tuple(each for each in reading.unread if "=" in each.words[0] or each.words[0] in of_person)
    )


def _of_recipe(command: TrainerCommand, options: ScriptOptions) -> dict[str, Any]:
    """Return the fields of the recipe that run_recipe.py is told to run."""
    name, model = options.text("recipe"), options.text("model")
    mode = options.text("mode") or "pretrain"
    if name is None and model is not None:
        name = f"{model}_{TASKS.get(mode, mode)}_config"
    if name is None:
        raise UserError(f"{command.place}: {command.trainer}: --recipe is not given, or has no value; add it")
    fields = _known(name)
    if fields is None:
        near = difflib.get_close_matches(name, known_recipes()["recipes"], 2, 0.5)
        nearest = f"; the nearest that are known are {' and '.join(near)}" if near else ""
        raise NoVerdict.on(command.place, f"Megatron-Bridge's recipe {ascii(name)[1:-1]} is not known{nearest}")
    devices = re.search(r"_(\d{1,6})gpu_", name)
    fields |= {"devices": int(devices[1])} if devices else {}
    return fields | ({"peft.class": mode} if mode in ("lora", "dora") else {})


def _known(name: str) -> dict[str, Any] | None:
    fields = known_recipes()["recipes"].get(name)
    return None if fields is None else {**(_known(fields.get("as", "")) or {}), **fields}


def _of_script(command: TrainerCommand, options: ScriptOptions) -> dict[str, Any]:
    """Return the fields of the ConfigContainer that a Python script fills, and of the file of overrides that it is
    given. Raises NoVerdict where that cannot be read."""
    text = file_text(command, command.trainer)
    place = f"{command.place}: {command.trainer}"
    if text is None:
        raise NoVerdict.on(command.place, f"{command.trainer}, a script of Megatron-Bridge's, is not there to be read")
    try:
        fields = script_fields(PythonModule.of(text), _known_fields)
    except (SyntaxError, ValueError, RecursionError):
        raise NoVerdict.on(place, "is no Python that can be read") from None
    if fields is None:
        raise NoVerdict.on(place, "fills no ConfigContainer of Megatron-Bridge that can be read without running it")
    values = flat(fields)
    lost = [name for name, value in values.items() if value == UNREAD and _decides(name)]
    if lost:
        raise NoVerdict.on(place, f"{', '.join(lost)}: the value is no literal; give it as {lost[0]}=VALUE")
    model = values.get("model.hub_model", values.get("model"))
    file = options.text("config_file")
    inside = "" if file is None else file_text(command, file)
    if inside is None:
        raise NoVerdict.on(place, f"--config-file {file} is not there to be read")
    named = parse_document(inside, str(file)).value if inside else {}
    return {**plain_fields(values), "model": model, **flat(_as_fields(named))}


def _decides(name: str) -> bool:
    keys = (column("key").get(dest_of(flag), "") for flag in row_fields().get(name, ()))
    return any(key.startswith(("layout.", "model.")) or key in SIZES_OF_STEP for key in keys)


def _known_fields(name: str) -> Fields | None:
    known = _known(name)
    if known is None:
        return None
    fields = Fields()
    for key, value in {**known, "model": None, "model.hub_model": known["model"]}.items():
        *places, last = key.split(".")
        within = fields
        for each in places:
            if not isinstance(within.get(each), Fields):  # a number format by its name, and a change of it
                within[each] = Fields()
            within = within[each]
        within[last] = value
    return fields


def _as_fields(value: Any) -> Any:
    return Fields({str(key): _as_fields(each) for key, each in value.items()}) if isinstance(value, dict) else value


def _overrides(command: TrainerCommand, options: ScriptOptions) -> Iterator[tuple[str, Any]]:
    """Yield the fields that the command sets; those that it writes as KEY=VALUE go over options."""
    for names, field in OPTIONS.items():
        text = options.text(*names)
        if text is not None:
            yield field, parse_value(text, f"{command.place}: --{names[0]}").value
    for word in command.arguments:
        name, equals, text = word.partition("=")
        if not equals or word.startswith("-"):
            continue
        if is_unset(text):
            raise UserError(f"{command.place}: {word}: the variable has no value in the script; --set it")
        yield name.lstrip("+~"), parse_value(text, f"{command.place}: {name}").value


def _refuse_others(fields: Mapping[str, Any], stated: Mapping[str, Any], place: str) -> None:
    whole = [name for name, value in stated.items() if "." not in name and value is not None and name != PRECISION]
    if whole:
        raise NoVerdict.on(
            place, f"{whole[0]}= replaces a whole section, which is not read; write its fields one by one"
        )
    precision = fields.get(PRECISION)
    if precision is not None and precision not in known_recipes()["precisions"]:
        known = ", ".join(known_recipes()["precisions"])
        raise NoVerdict.on(place, f"{PRECISION}={ascii(precision)[:60]} is none that is known: {known}")
    for name, value in fields.items():
        if name.startswith(UNPRICED) and value:
            raise NoVerdict.on(place, f"{name}={value}: its memory is not known; `llmlaunch observe --` measures it")
    kind = fields.get("peft.class")
    if kind is not None and str(kind).lower() not in ("lora", "none"):
        raise NoVerdict.on(place, f"peft: {kind} is not priced, LoRA alone; `llmlaunch observe --` measures it")


def _as_benchmark(command: TrainerCommand, values: dict[str, Any], stated: Mapping[str, Any]) -> None:
    """What run_recipe.py does to a performance recipe: it keeps the samples of a data parallel rank, and the narrow
    optimizer (_apply_benchmark_weak_scaling, _apply_benchmark_runtime_defaults, 0.6)."""
    if "optimizer.use_precision_aware_optimizer" not in stated and not values.get("model.fp8"):
        values["optimizer.use_precision_aware_optimizer"] = True
    devices, batch = values.get("devices"), values.get("train.global_batch_size")
    world = (command.nodes or 0) * (command.devices_per_node or 0)
    if devices and world and isinstance(batch, int) and "train.global_batch_size" not in stated:
        values["train.global_batch_size"] = max(batch * world // devices, 1)


def _data(values: dict[str, Any]) -> None:
    """Say of which kind the data is: indexed where there are paths, else made up for a recipe that pretrains."""
    paths = _paths(values)
    if paths:
        values |= {"dataset.kind": "indexed", "dataset.data_path": paths}
    elif values.get("dataset.class", "GPTDatasetConfig") == "GPTDatasetConfig":
        values["dataset.kind"] = "mock"
        if values.get("tokenizer.tokenizer_type") != "NullTokenizer":
            values.pop("tokenizer.tokenizer_type", None)


def _paths(values: Mapping[str, Any]) -> list[str]:
    """Return the prefixes of indexed data as Megatron's --data-path has them: of several, each with its weight before
    it. `dataset.blend` holds the prefixes, and their weights or nothing."""
    blend, stated = values.get("dataset.blend"), values.get("dataset.data_path")
    if isinstance(blend, list) and len(blend) == 2 and isinstance(blend[0], list):
        weights = blend[1] if isinstance(blend[1], list) else [1.0] * len(blend[0])
        pairs = zip(weights, blend[0], strict=False)
        return [str(word) for pair in pairs for word in pair] if len(blend[0]) > 1 else [str(each) for each in blend[0]]
    return str(stated).split() if isinstance(stated, str) else [str(each) for each in stated or ()]


def _adapters(values: Mapping[str, Any], draft: RecipeDraft) -> None:
    if str(values.get("peft.class", "none")).lower() != "lora":
        return
    draft.training["adapters"] = {"rank": values.get("peft.dim", LORA_RANK)}
    if not values.get("checkpoint.pretrained_checkpoint"):
        draft.lack("training.start_from", "checkpoint.pretrained_checkpoint is not given; add it")
        draft.stand_in("training.start_from", "/weights", "the weights that adapters are trained for are not named")
    if values.get("peft.target_modules"):
        targets = values["peft.target_modules"]
        draft.training["adapters"]["target_modules"] = list(targets) if isinstance(targets, list) else [targets]


def _unsaid(stated: Mapping[str, Any], draft: RecipeDraft) -> Iterator[str]:
    """Yield the overrides that no flag of Megatron-LM says, as `backend.extra_args` has them."""
    for name, value in stated.items():
        section = name.partition(".")[0]
        if name in row_fields() or section in (PRECISION, *OBJECTS, "env_vars") or name == "dataset.blend":
            continue
        if section in SECTIONS and "." in name and section != "dataset":
            yield f"{name}={field_text(value)}"
        else:
            draft.leave_out((f"{name}={field_text(value)}",), "no key of a recipe says it")
