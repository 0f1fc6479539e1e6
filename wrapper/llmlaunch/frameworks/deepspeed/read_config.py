"""ds_config.json read into keys of a recipe: what it says of the split, the batch and the numbers, the rest of
it, and which configuration a command reads: a file, or what `accelerate launch` says.

"auto" is for Hugging Face's Trainer, which fills it in from its own arguments (transformers/integrations/deepspeed.py,
5.23); DeepSpeed itself would take it for the default.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path, PurePath
from typing import Any

from llmlaunch.command_lines.command import TrainerCommand, is_unset
from llmlaunch.command_lines.recipe_draft import RecipeDraft, ScriptOptions, file_text, true_or_false, whole_or_none
from llmlaunch.command_lines.trainers import FSDP, not_read
from llmlaunch.documents.json_strict import parse_object
from llmlaunch.documents.nested import put_at, value_at
from llmlaunch.documents.yaml_strict import parse_document
from llmlaunch.errors import UserError
from llmlaunch.frameworks.deepspeed.config import WrongSetting, checked_settings
from llmlaunch.frameworks.deepspeed.own_settings import AUTO
from llmlaunch.frameworks.deepspeed.setting_row import ABSENT, DsConfigKey
from llmlaunch.frameworks.deepspeed.settings import SETTINGS, settings_of
from llmlaunch.rundir.values import shortened

COMMENT, LAST_COMMA = r"(?:#|//)[^\n]*|/\*.*?(?:\*/|\Z)", r",(?=\s*[}\]])"
ZERO = "zero_optimization"
PRECISION = "training.precision"
OFFLOADED = {"offload_optimizer": "layout.offload_optimizer", "offload_param": "layout.offload_parameters"}


def read_mapping(text: str, name: str, kind: str) -> dict[str, Any]:
    """Return the mapping in a file of JSON or YAML. Raises UserError for anything else, and for a number of YAML that
    64 bits do not hold."""
    if text.lstrip().startswith("{"):
        return parse_object(text, name, kind)
    document = parse_document(text, name)
    for key, value in document.value.items():
        if isinstance(value, float) and 2**63 <= abs(value) < math.inf:
            where = document.where((key,))
            raise UserError(f"{where}: {key}: {value:g} does not fit 64 bits; is a digit too many there?")
    mapping: dict[str, Any] = document.value
    return mapping


def parse_ds_config(text: str, name: str) -> DsConfig:
    """Return the settings of a ds_config.json, in which comments and a comma at the end of a list may stand: DeepSpeed
    reads HJSON (runtime/config.py, 0.19.8). Raises UserError for what is none, and for a key that has another form than
    DeepSpeed takes."""
    for dropped in (COMMENT, LAST_COMMA):
        text = re.sub(rf'("(?:\\.|[^"\\])*(?:"|\Z))|{dropped}', lambda match: match[1] or "", text, flags=re.DOTALL)
    return ds_config_of(parse_object(text, name, "a ds_config.json"), name)


def ds_config_of(settings: Mapping[str, Any], name: str) -> DsConfig:
    """Return settings whose known keys have the form that DeepSpeed takes. Raises UserError that names another one."""
    try:
        return DsConfig(checked_settings(_with_whole_numbers(settings)))
    except WrongSetting as wrong:
        raise UserError(f"{name}: {wrong}") from None


def _with_whole_numbers(value: Any) -> Any:
    """Return settings in which 5e8 is a whole number, as DeepSpeed takes it."""
    if isinstance(value, dict):
        return {key: _with_whole_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(item) for item in value]
    if isinstance(value, float) and value == int(value) and abs(value) >= 1000:
        return int(value)
    return value


@dataclass
class DsConfig:
    """The settings of a file, of which those that a recipe has keys for are taken out one after the other."""

    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.settings = copy.deepcopy(self.settings)

    def section(self, name: str) -> dict[str, Any]:
        """Return a section; an empty one where there is none."""
        value = self.settings.get(name)
        return value if isinstance(value, dict) else {}

    def has(self, key: str) -> bool:
        """Return whether a dotted key is written."""
        section, _, name = key.rpartition(".")
        within = value_at(self.settings, section) if section else self.settings
        return isinstance(within, dict) and name in within

    def put(self, key: str, value: Any) -> None:
        """Write a dotted key."""
        put_at(self.settings, key, value)

    def value(self, key: str) -> Any:
        """Return the value of a dotted key; None where it is absent or "auto"."""
        value = value_at(self.settings, key)
        return None if value == AUTO else value

    def take(self, key: str) -> Any:
        """Remove a dotted key and return its value; None where it is absent or "auto"."""
        value = self.value(key)
        if self.has(key):
            section, _, name = key.rpartition(".")
            (value_at(self.settings, section) if section else self.settings).pop(name)
        return value

    def take_whole(self, key: str, place: str) -> int | None:
        """Remove a dotted key and return its whole number. Raises UserError for another value."""
        value = self.take(key)
        number = whole_or_none({key: value}, key)
        if value is not None and number is None:
            raise UserError(f"{place}: {key}: must be a whole number, not {str(value)[:40]!a}; correct it")
        return number

    def rest(self, trainer: bool) -> dict[str, Any]:
        """Return what is left, for `backend.ds_config`; "auto" stays for Hugging Face's Trainer alone."""
        return _without_empty(self.settings, trainer)


def _without_empty(settings: Mapping[str, Any], trainer: bool) -> dict[str, Any]:
    settings_left: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            below = _without_empty(value, trainer)
            if below:
                settings_left[name] = below
        elif value is not None and (trainer or value != AUTO):
            settings_left[name] = value
    return settings_left


def read_rows(config: DsConfig, draft: RecipeDraft, rows: Iterable[DsConfigKey]) -> None:
    """Add what the values of some rows say, each to the recipe key that its row names.

    A value leaves the file that a recipe key says instead, and so does a planned one that says nothing, such as 1 for
    the size of a split. Mappings that several rows read into one recipe key are joined.
    """
    for row in rows:
        value = config.value(row.key)
        recipe_value = ABSENT if value is None else row.read(value)
        if row.planned or (recipe_value is not ABSENT and not row.kept):
            config.take(row.key)
        if recipe_value is not ABSENT:
            section, _, name = row.reads.partition(".")
            keys = getattr(draft, section)
            both = isinstance(recipe_value, Mapping) and isinstance(keys.get(name), Mapping)
            keys[name] = {**keys[name], **recipe_value} if both else recipe_value


def read_zero(config: DsConfig, draft: RecipeDraft, place: str) -> None:
    """Add what the file says of ZeRO and of offload."""
    section, rows = config.section(ZERO), [row for row in SETTINGS if row.key.startswith(f"{ZERO}.")]
    for row in rows:
        for old in row.old:
            if old in section:
                section[row.key.partition(".")[2]] = section.pop(old)
    if config.has(f"{ZERO}.stage") and section.get("stage") == AUTO:
        draft.leave_stage_open(f'{place}: {ZERO}.stage: "auto" is filled in by nobody who is read; write the stage')
    stage = config.take_whole(f"{ZERO}.stage", place) or 0
    if not 0 <= stage <= 3:
        raise UserError(f"{place}: {ZERO}.stage: must be 0, 1, 2 or 3, not {stage}; correct it")
    draft.layout["zero_stage"] = stage
    _offload(config, draft, stage)
    if not stage:
        config.settings.pop(ZERO, None)
        return
    _tell_of_added(config, draft)
    for row in rows:
        within = row.key.rpartition(".")[0]
        if row.unwritten[stage] is not ABSENT and not config.has(row.key) and (within == ZERO or config.has(within)):
            config.put(row.key, row.unwritten[stage])
    section = config.section(ZERO)
    for name in [name for name in section if name.startswith("stage3_") and stage < 3]:
        draft.leave_out((f"{ZERO}.{name}",), f"belongs to stage 3, and the stage is {stage}", matters=False)
        del section[name]


def _tell_of_added(config: DsConfig, draft: RecipeDraft) -> None:
    added = [f"{row.key} ({row.adds})" for row in SETTINGS if row.adds and not config.has(row.key)]
    if not draft.layout["offload_optimizer"]:
        added = [text for text in added if not text.startswith("zero_force")]
    if added:
        draft.notes.append(f"rendering adds to ds_config.json: {', '.join(added)}")


def _offload(config: DsConfig, draft: RecipeDraft, stage: int) -> None:
    """Add what leaves the device: by the switches of earlier versions, or by a section of its own, which wins."""
    devices = {}
    for name, key in OFFLOADED.items():
        switches = [true_or_false(config.take(row.key)) for row in settings_of(key)]
        if any(switches):
            devices[name] = "cpu"
        if isinstance(config.section(ZERO).get(name), dict):
            devices[name] = str(config.take(f"{ZERO}.{name}.device") or "none")
    for name, device in devices.items():
        if device == "nvme":
            draft.notes.append(f"{ZERO}.{name}: states on NVMe are priced and rendered as in host memory")
            for row in SETTINGS:
                if row.left_out and row.key.startswith(f"{ZERO}.{name}.") and config.take(row.key) is not None:
                    draft.leave_out((row.key,), row.left_out, matters=False)
    ratio = config.take(f"{ZERO}.offload_optimizer.ratio")
    moved = devices.get("offload_optimizer", "none") != "none"
    draft.layout["offload_optimizer"] = float(ratio if ratio is not None else 1.0) if moved and stage else 0.0
    draft.layout["offload_parameters"] = devices.get("offload_param", "none") != "none" and stage == 3
    for name in OFFLOADED:
        if devices.get(name, "none") == "none" or (name == "offload_param" and stage < 3):
            config.section(ZERO).pop(name, None)
        elif not config.has(f"{ZERO}.{name}"):
            config.put(f"{ZERO}.{name}", {})


def read_precision(config: DsConfig) -> str:
    """Return the number format that the file turns on; fp32 where it turns on none."""
    values = [(row, config.take(row.key)) for row in settings_of(PRECISION)]
    on = [row.read(value) for row, value in values if value is not None]
    return next((name for name in on if name is not ABSENT), "fp32")


def keep_precision(config: DsConfig, precision: str) -> None:
    """Leave out the settings of number formats that are not computed in."""
    for row in settings_of(PRECISION):
        name = row.key.partition(".")[0]
        if name != precision:
            config.settings.pop(name, None)


def read_split(config: DsConfig, draft: RecipeDraft) -> int:
    """Add the sizes of the split that the file says; return how many devices share one replica."""
    sizes = ("layout.tensor", "layout.context", "layout.pipeline")
    read_rows(config, draft, (row for key in sizes for row in settings_of(key)))
    return math.prod(draft.layout.get(key.partition(".")[2], 1) for key in sizes)


def read_rest(config: DsConfig, draft: RecipeDraft) -> None:
    """Add formats of gradients and optimizer states, and offloaded checkpoints, and tell of sections that no estimate
    counts."""
    read_rows(config, draft, settings_of("training.optimizer"))
    for row in settings_of("training.gradient_dtype"):
        value = config.value(row.key)
        read_rows(config, draft, (row,))
        if value is not None and "gradient_dtype" not in draft.training and value != draft.training.get("precision"):
            draft.leave_out((row.key,), f"{shortened(value, 20)}: gradients of a recipe accumulate in fp32 or bf16")
    if true_or_false(config.take("activation_checkpointing.cpu_checkpointing")):
        if draft.layout.get("recompute") == "full":
            draft.layout["offload_checkpoints"] = True
        else:
            draft.leave_out(("activation_checkpointing.cpu_checkpointing",), "nothing is recomputed", matters=False)
    uncounted = [row.key for row in SETTINGS if row.uncounted and row.key in config.settings]
    if uncounted:
        draft.notes.append(f"{', '.join(uncounted)} of ds_config.json: handed on, and not counted in the estimate")


def read_optimizer(config: DsConfig, draft: RecipeDraft) -> None:
    """Add what the file says of optimizer and schedule; both sections are handed on as they are."""
    kind = str(config.section("optimizer").get("type", "AdamW"))
    if "adam" not in kind.lower():
        draft.notes.append(f"optimizer {kind}: the estimate counts the states of AdamW")
    read_rows(config, draft, (row for row in SETTINGS if row.kept))
    if "learning_rate_decay" not in draft.training:  # of a schedule that no recipe has
        draft.training.pop("warmup_steps", None)


OF_FSDP = ("fsdp", "fsdp_config", "fsdp_transformer_layer_cls_to_wrap")
NOT_READ = {"FSDP": "FSDP of accelerate", "MEGATRON_LM": "Megatron-LM of accelerate"}


def configuration(
    command: TrainerCommand, options: ScriptOptions, draft: RecipeDraft
) -> tuple[DsConfig | None, str | None, str]:
    """Return ds_config.json with the number format that the launcher says and how messages call the file; no settings
    where the command names none, or none that is here: then the draft says that the ZeRO stage is not known.

    Raises:
        NoVerdict: accelerate splits the model in a way that is not read.
    """
    launcher, absent = _accelerate(command, options)
    precision = launcher.get("mixed_precision")
    precision = precision if precision in ("bf16", "fp16") else None
    path = options.path("deepspeed_config") or options.path("deepspeed") or launcher.get("deepspeed_config_file")
    path = path if isinstance(path, str) and path not in ("True", "False", "none") else None
    if path is not None:
        text = file_text(command, path)
        if text is not None:
            return parse_ds_config(text, path), precision, path
        packaged = None if is_unset(path) else _packaged("deepspeed", command.family, path)
        if packaged is not None:
            draft.notes.append(f"{path} is not here; it is taken as {command.family} brings it")
            return ds_config_of(packaged, path), precision, path
        draft.leave_stage_open(_not_here(path, command))
        return None, precision, str(path)
    if options.has("deepspeed_config", "deepspeed"):
        if not options.has("zero_stage"):
            draft.leave_stage_open(f"{command.place} does not say which ds_config.json is read; write the stage")
        return None, precision, "ds_config.json"
    if launcher.get("use_deepspeed") or (absent is not None and "zero_stage" in launcher):
        place = "accelerate's configuration"
        return ds_config_of(_accelerate_settings(launcher), place), precision, place
    if absent is not None:
        draft.leave_stage_open(_not_here(absent, command))
    return None, precision, "ds_config.json"


def _not_here(path: str, command: TrainerCommand) -> str:
    if is_unset(path):
        return f"{path}, which {command.place} reads, has no value in the script; set it, or write the stage"
    return (
        f"{path}, which {command.place} names, is not there below {command.folder.absolute()}; put it there, or write "
        "the stage and what is offloaded"
    )


@cache
def _packages() -> Mapping[str, Any]:
    packages: Mapping[str, Any] = json.loads(Path(__file__).with_name("packaged_configs.json").read_text("utf-8"))
    return packages


def _packaged(kind: str, family: str, path: str) -> dict[str, Any] | None:
    """Return a configuration that a trainer brings with it, by the last part of its path; None for any other."""
    values = _packages()[kind].get(family, {}).get(PurePath(path).name)
    return None if values is None else dict(values)


def is_trl(command: TrainerCommand) -> bool:
    """Return whether a command is TRL's own, which starts `accelerate launch`."""
    return PurePath(command.trainer).name == "trl"


def as_trl_launches(command: TrainerCommand) -> TrainerCommand:
    """Return a command of TRL, which hands its arguments to `accelerate launch`, with the machines and processes that
    they say (trl/cli)."""
    options = ScriptOptions(command.arguments, command.place)
    values = _accelerate_values(command, options) or {}
    nodes = options.whole("num_machines") or whole_or_none(values, "num_machines") or 1
    processes = options.whole("num_processes") or whole_or_none(values, "num_processes")
    devices = processes // nodes if processes else None
    return replace(command, nodes=nodes, devices_per_node=devices or command.devices_per_node)


def _accelerate_values(command: TrainerCommand, options: ScriptOptions) -> dict[str, Any] | None:
    """Return what the file of accelerate says that a command names, one that TRL brings with it included; nothing where
    it names none, None where the file is not here."""
    path = _accelerate_path(command, options)
    if path is None:
        return {}
    text = None if is_unset(path) else file_text(command, path)
    if text is not None:
        return read_mapping(text, path, "accelerate's configuration")
    return None if is_unset(path) else _packaged("accelerate", command.family, path)


def _accelerate_path(command: TrainerCommand, options: ScriptOptions) -> str | None:
    of_trl = options.path("accelerate_config") if is_trl(command) else None
    path = of_trl or (command.launcher_options.get("config_file") if command.launcher == "accelerate" else None)
    return path if isinstance(path, str) else None


def _accelerate(command: TrainerCommand, options: ScriptOptions) -> tuple[Mapping[str, Any], str | None]:
    """Return what `accelerate launch` says: its options over those of its file, DeepSpeed's beside the others; and the
    path of that file where it is not here."""
    stated: dict[str, Any] = dict(command.launcher_options)
    of_trl = is_trl(command)
    if not of_trl and command.launcher != "accelerate":
        return stated, None
    if of_trl:
        options.take("accelerate_config")
    values = _accelerate_values(command, options)
    if values is None:
        return _with_kind(stated, command), _accelerate_path(command, options)
    below = values.get("deepspeed_config")
    return _with_kind({**values, **(below if isinstance(below, dict) else {}), **stated}, command), None


def _with_kind(values: Mapping[str, Any], command: TrainerCommand) -> dict[str, Any]:
    """Return what accelerate says with `use_deepspeed` as its file or its options decide it. Raises NoVerdict for a
    kind of training that is not read."""
    kind = str(values.get("distributed_type", "")).upper()
    for name, chosen in (("use_deepspeed", "DEEPSPEED"), ("use_fsdp", "FSDP"), ("use_megatron_lm", "MEGATRON_LM")):
        kind = chosen if true_or_false(values.get(name) or False) else kind
    if kind in NOT_READ:
        raise not_read(NOT_READ[kind], command.place)
    return {**values, "use_deepspeed": kind == "DEEPSPEED"}


def _accelerate_settings(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ds_config that accelerate makes of its own options (its utils/dataclasses.py DeepSpeedPlugin)."""
    stage = str(section.get("zero_stage", 2))
    zero: dict[str, Any] = {"stage": int(stage) if stage in ("0", "1", "2", "3") else stage}
    for name, key in (("offload_optimizer", "offload_optimizer_device"), ("offload_param", "offload_param_device")):
        zero[name] = {"device": str(section.get(key) or "none")}
    if true_or_false(section.get("zero3_save_16bit_model", False)):
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    settings: dict[str, Any] = {"zero_optimization": zero, "gradient_clipping": "auto"}
    return settings


def read_fsdp(command: TrainerCommand, options: ScriptOptions, draft: RecipeDraft) -> bool:
    """Read the Trainer's own split by FSDP's full_shard, and return whether there is one. Raises NoVerdict for another
    kind of FSDP."""
    words = " ".join(options.values("fsdp") or ()).replace(",", " ").split()
    if not words or true_or_false(words[0]) is False:
        return False
    if not {"full_shard"} <= set(words) <= {"full_shard", "auto_wrap"}:
        raise not_read(FSDP, command.place)
    draft.layout["zero_stage"] = 3
    options.take(*OF_FSDP)
    reason = "the recipe splits by DeepSpeed's ZeRO 3, which keeps about as much as FSDP's full_shard"
    draft.leave_out(options.written(*OF_FSDP), reason)
    return True
