"""Words of a Megatron-LM command line, read by the stored parser of a version into values by `dest`.

The tables of `parsers/` say which flags there are, how many words each takes and of which type. Flags that only
earlier versions had are read from the older tables and from EARLIER. Megatron's own parser takes no abbreviations
(allow_abbrev=False), so neither does this one.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

from llmlaunch.command_lines.command import UnreadWords, is_optional, is_unset, option_values
from llmlaunch.documents.literals import literal_in
from llmlaunch.errors import UserError
from llmlaunch.frameworks.megatron.parser import KNOWN_VERSIONS, NEWEST, ParserFlag, core_parser
from llmlaunch.frozen import frozen


@frozen
class EarlierFlag:
    """How a flag was parsed, under today's `dest`, and what else it sets."""

    parsed: ParserFlag
    sets: Mapping[str, object]


def _earlier(dest: str, kind: str | None = None, sets: str | None = None, **also: object) -> EarlierFlag:
    return EarlierFlag(ParserFlag(dest, 0 if sets else 1, sets=sets, type=kind), also)


EARLIER: Mapping[str, EarlierFlag] = {
    "--checkpoint-num-layers": _earlier("recompute_num_layers", "int"),
    "--activations-checkpoint-method": EarlierFlag(
        ParserFlag("recompute_method", 1, ("uniform", "block"), type="str"), {"recompute_granularity": "full"}
    ),
    "--activations-checkpoint-num-layers": _earlier("recompute_num_layers", "int"),
    "--fp8-hybrid": _earlier("fp8", sets="hybrid"),
    "--fp8-e4m3": _earlier("fp8", sets="e4m3"),
    "--intermediate-size": _earlier("ffn_hidden_size", "int"),
    "--no-query-key-layer-scaling": _earlier("apply_query_key_layer_scaling", sets="False"),
    "--layernorm-epsilon": _earlier("layernorm_epsilon", "float"),
    "--use-rms-norm": _earlier("normalization", sets="RMSNorm"),
    "--qk-nope-head-dim": _earlier("qk_head_dim", "int"),  # Pai-Megatron-Patch
    "--qk-rope-head-dim": _earlier("qk_pos_emb_head_dim", "int"),
    "--num-mtp-predictor": _earlier("mtp_num_layers", "int"),
    "--expert-parallel-size": _earlier("expert_model_parallel_size", "int"),
}
"""Megatron-LM 2.x: megatron/arguments.py of v2.0 to v3.0; core 0.1 to 0.8: megatron/arguments.py,
training/arguments.py."""

EARLIER_NEUTRAL: Mapping[str, str] = {
    "log_batch_size_to_tensorboard": "written by the host",
    "log_learning_rate_to_tensorboard": "written by the host",
    "no_log_learnig_rate_to_tensorboard": "written by the host",
    "transformer_timers": "written by the host",
    "data_impl": "which tokens are read, and how the host reads them",
    "mmap_warmup": "which tokens are read, and how the host reads them",
    "no_async_tensor_model_parallel_allreduce": "when a gradient travels, not where it is kept",
}
"""Those that change no GPU memory, by `dest`, with the reason (Megatron-LM 2.x to core 0.12,
megatron/training/arguments.py)."""


Value = object
Values = Mapping[str, Value]

MOST_DIGITS = 18
MOST_LENGTH = 4096
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_NEGATIVE = re.compile(r"-\d+(\.\d*)?([eE][-+]?\d+)?|-\.\d+")
_WHOLE = re.compile(rf"[-+]?\d(_?\d){{0,{MOST_DIGITS - 1}}}")  # as int() takes it
_LIST = re.compile(r"\s*[\[(].*[\])]\s*", re.DOTALL)


@dataclass
class MegatronWords:
    """What the words of a command line say. `values` are those it sets, by `dest`, and `words` how it wrote each of
    them; `unknown` are flags of no parser with the words after them. An argument that holds a variable without a value
    is in `unset` instead, by `dest`."""

    values: dict[str, Value] = field(default_factory=dict)
    words: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unknown: list[tuple[str, ...]] = field(default_factory=list)
    unset: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unread: list[UnreadWords] = field(default_factory=list)


def read_words(arguments: Sequence[str], version: str = NEWEST, place: str = "the command line") -> MegatronWords:
    """Return what these arguments of a Megatron-LM trainer say.

    Raises UserError for a value that Megatron's parser would refuse, and for words no recipe may hold.
    """
    for word in arguments:
        if _CONTROL.search(word) or len(word) > MOST_LENGTH:
            raise UserError(f"{place}: {_shown(word)}: holds control characters or is very long; write it in one line")
    result = MegatronWords()
    flags = _flags_of(version)
    for flag, words in _groups(arguments, result):
        equals = "=" in flag
        name, _, inside = flag.partition("=")
        flag_type = flags.get(name)
        if flag_type is None:
            result.unknown.append((flag, *words))
            continue
        if equals and flag_type.values == 0:
            raise UserError(f"{place}: {name}: takes no value, not {_shown(inside)}; remove it")
        values, beyond = ([inside], words) if equals else option_values(words, flag_type.values)
        _check_count(flag_type, len(values), f"{place}: {name}")
        _take(result, name, flag_type, values, place)
        if beyond:
            result.unread.append(UnreadWords(tuple(beyond), f"stand after {name}, which does not take them"))
    return result


def default_values(version: str = NEWEST) -> dict[str, Value]:
    """Return what the parser of a version puts under each `dest` that a command line does not set."""
    return {
        flag.dest: None if flag.default is None else typed_value(flag.dest, flag.default, version)
        for flag in core_parser(version).flags.values()
    }


def typed_value(dest: str, value: Value, version: str = NEWEST) -> Value:
    """Return a value of the namespace as its parser types it, which may be text such as a log holds.

    Raises ValueError for what is no such value.
    """
    if not isinstance(value, str):
        return _of_its_type(_by_dest(version).get(dest), value)
    if value == "None":
        return None
    flag = _by_dest(version).get(dest)
    if value in ("True", "False"):
        if flag is not None and flag.values in ("*", "+"):
            raise ValueError("is no list")
        return value == "True"
    if flag is None:  # worked out by validate_args, or a fork's own
        return int(value) if _WHOLE.fullmatch(value) else value
    if flag.values == 0:
        return value not in ("", "0")
    if flag.values in ("*", "+") and _LIST.fullmatch(value):
        items = literal_in(value)
        return [_typed(flag, str(item)) for item in items] if isinstance(items, (list, tuple)) else [value]
    return _typed(flag, value)


def _of_its_type(flag: ParserFlag | None, value: Value) -> Value:
    """Return a value that a log printed as a number, a list or a mapping. Raises ValueError where the flag takes no
    such value."""
    if isinstance(value, (dict, set, frozenset)):
        raise ValueError("is no value of an argument")
    if flag is None or value is None:
        return value
    if flag.values == 0:
        return bool(value)
    if flag.values != 1 and isinstance(value, (list, tuple)):
        return [_of_its_type(replace(flag, values=1), item) for item in value]
    if flag.type not in ("int", "float"):
        if flag.values != 1:
            raise ValueError("is no list")
        return value
    if not _is_finite(value) or (flag.type == "int" and value != int(value)):
        raise ValueError("is no whole number" if flag.type == "int" else "is no finite number")
    return int(value) if flag.type == "int" and flag.values == 1 else value


def _is_finite(value: Any) -> TypeGuard[int | float]:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and abs(value) <= sys.float_info.max


@functools.cache
def _flags_of(version: str) -> Mapping[str, ParserFlag]:
    """All flags that are read: those of this version, then of the others, then EARLIER."""
    flags = {name: earlier.parsed for name, earlier in EARLIER.items()}
    for each in (*(other for other in KNOWN_VERSIONS if other != version), version):
        flags |= core_parser(each).flags
    return flags


@functools.cache
def _by_dest(version: str) -> Mapping[str, ParserFlag]:
    """The flag that gives each `dest` its type: one that takes words, where there is one."""
    flags = sorted(_flags_of(version).items(), key=lambda item: item[1].values != 0)
    return {flag.dest: flag for _, flag in flags}


def _groups(arguments: Sequence[str], result: MegatronWords) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag with the words up to the next flag. A negative number is a value, as argparse has it."""
    flag, words = None, list[str]()
    for word in (*arguments, None):
        if word is None or (word.startswith("-") and word != "-" and not _NEGATIVE.fullmatch(word)):
            if flag is not None:
                yield flag, words
            elif words := [each for each in words if not is_optional(each)]:
                result.unread.append(UnreadWords(tuple(words), "stand before the first flag"))
            flag, words = word, []
        else:
            words.append(word)


def _check_count(flag: ParserFlag, available: int, where: str) -> None:
    if isinstance(flag.values, int) and available < flag.values:
        raise UserError(f"{where}: needs {flag.values} value{'s' * (flag.values > 1)}; add it, or remove the flag")
    if flag.values == "+" and not available:
        raise UserError(f"{where}: needs at least one value; add it, or remove the flag")


def _take(result: MegatronWords, name: str, flag: ParserFlag, words: list[str], place: str) -> None:
    dest = flag.dest
    if dest in result.words and result.words[dest] != (name, *words):
        result.unread.append(UnreadWords(result.words[dest], f"{' '.join((name, *words))} stands after it and wins"))
    if any(map(is_unset, words)):
        result.unset[dest] = (name, *words)
        result.values.pop(dest, None)  # of the same flag before it, which this one replaces
        return
    try:
        value: Value = _value_of(name, flag, words)
    except ValueError as error:
        shown = " ".join(map(_shown, words))
        raise UserError(f"{place}: {name}: {shown} {error}; correct it") from None
    result.unset.pop(dest, None)
    result.values[dest] = value
    result.words[dest] = (name, *words)
    if name in EARLIER:
        result.values |= EARLIER[name].sets


def _value_of(name: str, flag: ParserFlag, words: list[str]) -> Value:
    if flag.values == 0:
        if flag.sets == "None":  # a pair of flags, with and without `no`
            return not name.startswith("--no-")
        return {"True": True, "False": False}.get(str(flag.sets), flag.sets)
    if flag.values == 1:
        return _typed(flag, words[0])
    return [_typed(flag, word) for word in words]


def _typed(flag: ParserFlag, word: str) -> Value:
    if flag.type == "int":
        if not _WHOLE.fullmatch(word.strip()):
            raise ValueError("is no whole number")
        return int(word)
    if flag.type == "float":
        number = float(word) if len(word) <= 64 and _ascii_number(word) else math.nan
        if not math.isfinite(number):
            raise ValueError("is no finite number")
        return number
    return word


def _ascii_number(word: str) -> bool:
    return re.fullmatch(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*", word) is not None


def _shown(word: str) -> str:
    text = ascii(word)
    return text if len(text) <= 60 else f"{text[:57]}..."
