"""Fields of Megatron-Bridge's ConfigContainer as a recipe of Bridge's or a command's overrides set them, and the words
of Megatron-LM that mean the same: the inverse of settings.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from llmlaunch.command_lines.recipe_draft import RecipeDraft
from llmlaunch.frameworks.bridge.recipe_source import UNREAD, Fields, flat
from llmlaunch.frameworks.megatron.flags.row import Parsed
from llmlaunch.frameworks.megatron.flags.table import bridge_fields
from llmlaunch.frameworks.megatron.parser import NEWEST, ParserFlag, core_parser, dest_of

RECIPES = Path(__file__).with_name("recipes.json")
PRECISION, OVERLAP = "mixed_precision", "comm_overlap"
ADAPTERS = ("peft.class", "peft.dim", "peft.target_modules")
OTHER_FIELDS = (
    *(PRECISION, *ADAPTERS, "tokenizer.use_tokenizer_vocab_size", "tokenizer.vocab_size", "dataset.class", "perf"),
    *("dataset.enable_offline_packing", "dataset.skip_getting_attention_mask_from_dataset", "model.cuda_graph_scope"),
)
"""Fields that are read and of which no flag of Megatron-LM says the same."""
SAVES = "checkpoint.save_interval"
HOST_SECTIONS = ("checkpoint", "logger", "rng", "validation", "rerun_state_machine")
HOST_FIELDS = (
    *("dataset.split", "dataset.random_seed", "tokenizer.tokenizer_model", "model.pipeline_dtype"),
    *("mixed_precision.pipeline_dtype", "model.apply_rope_fusion", "ddp.check_for_nan_in_grad", "model.autocast_dtype"),
)
"""What of a recipe changes neither memory nor what is learned, and an override says where it matters."""
NUMBERS, STAGES = "NullTokenizer", "model.pipeline_model_parallel_layout"
BUFFERS = ("overlap_grad_reduce", "overlap_param_gather")


@cache
def row_fields() -> Mapping[str, tuple[str, ...]]:
    """Return the flags of Megatron-LM that set each field of Bridge's."""
    rows: dict[str, tuple[str, ...]] = {}
    for flag, fields in bridge_fields().items():
        for name, _ in fields:
            rows[name] = (*rows.get(name, ()), flag)
    return rows


@cache
def known_recipes() -> Mapping[str, Any]:
    """Return the table of Bridge's recipes (tests/support/bridge_recipes.py makes it). `as` in a recipe names another,
    whose fields it has where it has none of its own."""
    table: Mapping[str, Any] = json.loads(RECIPES.read_text(encoding="utf-8"))
    return table


def plain_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of some fields that are read, by their dotted names. What is UNREAD is left out, the stages alone
    are not; what is switched off is, unless a flag says that it is off."""
    values = flat(Fields({**fields}))
    kept = {
        name: value
        for name, value in values.items()
        if _is_read(name) and value is not None and (value != UNREAD or name == STAGES)
    }
    return {name: value for name, value in kept.items() if value is not False or _means_off(name)}


def _is_read(name: str) -> bool:
    section, _, field = name.partition(".")
    if (section in HOST_SECTIONS and name != SAVES) or name in HOST_FIELDS:
        return False
    targets = (f"{place}.{field}" for place in ("model", "ddp", "optimizer"))
    within = section in (PRECISION, OVERLAP) and any(each in row_fields() for each in targets)
    return name in row_fields() or name in OTHER_FIELDS or within


def _means_off(name: str) -> bool:
    if name.partition(".")[0] in (PRECISION, OVERLAP):
        return True
    return any(each == name and value is False for fields in bridge_fields().values() for each, value in fields)


def resolved(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields as Bridge has them once it has filled in what one says of others: the number formats
    (training/mixed_precision.py), the distributed optimizer (training/config.py), the overlap
    (training/comm_overlap.py) and the length (scripts/training/recipe_runner.py, Megatron-Bridge 0.6)."""
    values = dict(fields)
    stated = values.get(PRECISION)
    formats = known_recipes()["precisions"].get(stated, {}) if isinstance(stated, str) else {}
    for name, value in {**formats, **values}.items():
        section, _, field = name.partition(".")
        if section in (PRECISION, OVERLAP) and field:
            targets = (f"{place}.{field}" for place in ("model", "ddp", "optimizer"))
            values |= {each: value for each in targets if each in row_fields()}
    shards = [f"{place}.use_distributed_optimizer" for place in ("ddp", "optimizer")]
    values |= dict.fromkeys(shards, True) if any(values.get(name) for name in shards) else {}
    overlaps = any(name.startswith(f"{OVERLAP}.") for name in values)
    if overlaps and values.get(shards[0]):
        values |= {f"ddp.{name}": values.get(f"{OVERLAP}.{name}", True) for name in BUFFERS}
    if "dataset.seq_length" in values:
        values["model.seq_length"] = values["dataset.seq_length"]
    graphs = values.pop("model.cuda_graph_scope", None)  # its earlier name
    if isinstance(graphs, list) and values.get("model.cuda_graph_impl") not in (None, "none"):
        values.setdefault("model.cuda_graph_modules", graphs)
    tensor = values.get("model.tensor_model_parallel_size", 1)
    if (isinstance(tensor, int) and tensor < 2) or not values.get("model.sequence_parallel"):
        values.pop("model.tp_comm_overlap", None)
    if not values.get("tokenizer.use_tokenizer_vocab_size") or values.get("tokenizer.tokenizer_type") != NUMBERS:
        values.pop("tokenizer.vocab_size", None)  # the model's own number counts (training/setup.py)
    if values.get("dataset.skip_getting_attention_mask_from_dataset", True):
        values["dataset.create_attention_mask"] = False
    return values


def megatron_words(fields: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the words of Megatron-LM's command line that set these fields, a flag each."""
    flags = core_parser(NEWEST).flags
    for name, row in bridge_fields().items():
        if not row or name not in flags or row[0][0] not in fields:
            continue
        constants = {each: value for each, value in row if not isinstance(value, Parsed) and not callable(value)}
        if any(fields.get(each, value) != value for each, value in constants.items()):
            continue
        valued = next((each for each, _ in row if each not in constants), None)
        value = True if valued is None else fields.get(valued)
        flag = flags[name]
        if flag.values == 0:
            if (constants and valued is None) or value is (flag.sets == "True"):
                yield (name,)
        elif value is not None and value is not False and value != [] and value != UNREAD:
            yield (name, *_words(value, flag))


def bridge_arguments(draft: RecipeDraft, stated: Container[str] | None = None) -> Callable[[Sequence[str]], list[str]]:
    """Return a function that turns a flag of Megatron-LM with its values into `backend.extra_args` of Bridge. A field
    that the recipe decides cannot be one of those, and is unread if it is among `stated`."""

    def argument(group: Sequence[str]) -> list[str]:
        flag, *values = group
        known = core_parser(NEWEST).flags.get(flag)
        name = next((name for name, _ in bridge_fields().get(flag, ())), f"model.{dest_of(flag)}")
        on = field_text(known.sets == "True") if known is not None and known.values == 0 else " ".join(values)
        if name not in row_fields():
            return [f"{name}={on}"]
        if stated is None or name in stated:
            draft.leave_out((f"{name}={on}",), "no key of a recipe says it")
        return []

    return argument


def field_text(value: Any) -> str:
    """Return a value as `backend.extra_args` has it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _words(value: Any, flag: ParserFlag) -> list[str]:
    if isinstance(value, (list, tuple)):
        if flag.values == 1:
            tuples = flag.type == "tuple_type"
            return [",".join(map(str, value)) if tuples else json.dumps(list(value), separators=(",", ":"))]
        return [str(each) for each in value]
    return [str(value)]
