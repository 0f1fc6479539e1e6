"""What a recipe that was read of a Megatron-LM command line renders to, compared with that command line by `dest`.

What the recipe's keys do not say goes into `backend.extra_args`; what rendering changes or leaves out is unread, with
its reason; what it adds is said in the notes. So a round trip loses nothing silently, whichever flags come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmlaunch.command_lines.command import UnreadWords, is_unset
from llmlaunch.documents.secrets import is_secret_variable, known_secret
from llmlaunch.frameworks.argument import Argument, NodeVariable
from llmlaunch.frameworks.classed_arguments import NEUTRAL
from llmlaunch.frameworks.flag_classes import group_of
from llmlaunch.frameworks.megatron.arguments import planned_arguments
from llmlaunch.frameworks.megatron.extra_arguments import megatron_groups
from llmlaunch.frameworks.megatron.flags.row import HEADS, STAGES
from llmlaunch.frameworks.megatron.flags.table import column
from llmlaunch.frameworks.megatron.namespace import Namespace, namespace_of
from llmlaunch.frameworks.megatron.own_choices import is_own_choice
from llmlaunch.frameworks.megatron.parser import core_parser, dest_of
from llmlaunch.frameworks.megatron.words import MegatronWords, read_words
from llmlaunch.layout import RECOMPUTE_NAMES, Layout
from llmlaunch.recipe.types import Recipe

OF_DATA = ("split", "data_cache_path", "tokenizer_type", "tokenizer_model")
OF_TOKENIZER = ("tokenizer_model", "vocab_file", "merge_file", "vocab_extra_ids", "null_tokenizer_eod_id")
# What rendering leaves to the extra arguments where the recipe's key is absent, by `dest`.
OWN_WORD = ("lr_decay_style",)
# What takes sizes from elsewhere, which a plan cannot see, by `dest`.
ELSEWHERE = ("use_checkpoint_args",)
VOCABULARY = ("vocab_size", "padded_vocab_size", "make_vocab_size_divisible_by")
DIVISOR = 128


@dataclass
class Differences:
    """`extra_args` say what no key says; `unread` and `notes` are those of a Reading. `keys` has the key that each
    rendered argument follows from, by `dest`."""

    extra_args: list[str] = field(default_factory=list)
    keys: dict[str, str] = field(default_factory=dict)
    unread: list[UnreadWords] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def compared(
    original: Namespace, parsed: MegatronWords, document: Mapping[str, Any], recipe: Recipe, version: str
) -> Differences:
    """Return what rendering a recipe makes different from `original`. The recipe is the `document` with stand-ins for
    what it lacks, which are not compared. Raises UserError for a recipe that contradicts itself."""
    arguments, rendered = rendered_namespace(recipe, version)
    keys = {dest: each.reason.keys[0] for dest, each in arguments.items() if each.reason.keys}
    result = Differences(keys=keys)
    _vocabulary(original, rendered, parsed, recipe.model.vocab_size, result)
    added: list[str] = []
    if "data" not in document:
        groups = (parsed.words[dest] for dest in OF_DATA if dest in parsed.words)
        result.unread += [UnreadWords(group, "belongs to data, whose source is missing") for group in groups]
    idle = ((parsed.words[dest], reason) for dest, reason in original.idle.items() if dest in parsed.words)
    result.unread += [UnreadWords(group, reason, matters=False) for group, reason in idle]
    for dest in sorted(original.keys() | rendered.keys()):
        if "data" not in document and dest in OF_DATA:
            continue
        if dest in VOCABULARY or equal(original.get(dest), rendered.get(dest)):
            continue
        if dest in arguments and (_stands_in(arguments[dest], document) or _worked_out(arguments[dest])):
            continue
        group = parsed.words.get(dest)
        if dest in original.converted:
            group = (f"--{dest.replace('_', '-')}", str(original[dest]))
        if dest == "save_interval" and {"save", "load"} & parsed.unset.keys():
            result.unread.append(
                UnreadWords(parsed.words[dest], "belongs to training.checkpoint_path, which is missing")
            )
        elif dest in original.explicit and group is not None:
            _kept(dest, group, original, rendered, result)
        elif dest in rendered.explicit:
            added += [f"{_flag(dest, arguments)} ({column('added')[dest]})"] if dest in column("added") else []
    if added:
        result.notes.append(f"rendering adds {', '.join(added)}")
    for group in parsed.unknown:
        if any(map(is_unset, group)):
            continue
        _extra(group, result)
        longer = [flag for flag in core_parser(version).flags if flag.startswith(group[0].partition("=")[0])]
        if len(longer) == 1:
            result.notes.append(f"{group[0]}: Megatron takes no abbreviations; write {longer[0]} where that is meant")
    return result


def rendered_namespace(recipe: Recipe, version: str) -> tuple[dict[str, Argument], Namespace]:
    """Return the arguments that a recipe renders to with its layout pinned, by `dest`, and their namespace."""
    arguments = planned_arguments(recipe, pinned_layout(recipe))
    rendered_words = [
        "${" + word.name + "}" if isinstance(word, NodeVariable) else word for each in arguments for word in each.words
    ]
    parsed = read_words(rendered_words, version)
    flags = {each.flag: each for each in arguments}
    by_dest = {dest: flags[group[0]] for dest, group in (parsed.words | parsed.unset).items() if group[0] in flags}
    return by_dest, namespace_of(parsed.values, version, recipe.world_size)


def pinned_layout(recipe: Recipe) -> Layout:
    """Return the one layout that all pins of a recipe describe."""
    sizes = {name: int(value) for name, value in recipe.pins.items() if isinstance(value, (int, bool))}
    layout = Layout(**sizes, layers_by_stage=recipe.layers_by_stage or ())
    granularity = RECOMPUTE_NAMES.index(str(recipe.pins.get("recompute", "none")))
    data = recipe.world_size // (layout.tensor * layout.pipeline * layout.context)
    return Layout(**{**sizes, "recompute": granularity, "data": max(data, 1)}, layers_by_stage=layout.layers_by_stage)


def equal(value: object, other: object) -> bool:
    """Compare values of two namespaces; what is off, absent or empty is the same."""
    if isinstance(value, (list, tuple)) or isinstance(other, (list, tuple)):
        return _items(value) == _items(other)
    return value == other or (value in (None, False, "") and other in (None, False, ""))


def _items(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, (list, tuple)) else [] if value is None else [str(value)]


def _worked_out(each: Argument) -> bool:
    """Return whether the value of an argument is known on the node alone, where its keys decide it."""
    return any(isinstance(value, NodeVariable) for value in each.values)


def _stands_in(each: Argument, document: Mapping[str, Any]) -> bool:
    """Return whether an argument follows from keys that the document lacks alone."""
    sections = {key.partition(".")[0] for key in each.reason.keys}
    return bool(sections & {"model", "data"}) and not sections & document.keys()


def _kept(dest: str, group: tuple[str, ...], original: Namespace, rendered: Namespace, result: Differences) -> None:
    """Put an argument that no key says into the extra arguments, unless rendering decides it."""
    unused = dest in OF_TOKENIZER and rendered.get("tokenizer_type") == "NullTokenizer"
    choice, planned_by = column("companion").get(dest, ""), column("decides")
    if dest in OWN_WORD or is_own_choice(dest, group[1:]) or is_own_choice(choice, _items(original.get(choice))):
        _extra(group, result)
        return
    decided = (
        unused or dest in ELSEWHERE or dest in planned_by or dest in (STAGES, HEADS) or dest_of(group[0]) in planned_by
    )
    if dest in rendered.explicit or decided:
        value = rendered.get(dest)
        instead = (
            f"rendered as {value}" if dest in rendered.explicit else f"{planned_by.get(dest, 'the layout')} decides"
        )
        reason = column("unread")["tokenizer_model"] if unused else column("unread").get(dest, instead)
        known = group_of(megatron_groups(), dest, group[1:])
        neutral = known is not None and known.flag_class.kind == NEUTRAL
        result.unread.append(UnreadWords(group, reason, matters=not neutral))
    else:
        _extra(group, result)


def _extra(group: Sequence[str], result: Differences) -> None:
    name = group[0].lstrip("-").partition("=")[0]
    if any(known_secret(word) or is_secret_variable(name, word) for word in group[1:]):
        name = group[0].partition("=")[0]
        result.unread.append(UnreadWords((name,), "looks like a secret, which is never written", matters=False))
    else:
        result.extra_args += group


def _flag(dest: str, arguments: Mapping[str, Argument]) -> str:
    return arguments[dest].flag if dest in arguments else f"--{dest.replace('_', '-')}"


def _vocabulary(
    original: Namespace, rendered: Namespace, parsed: MegatronWords, tokens: int, result: Differences
) -> None:
    """Compare rows of the embedding, whichever arguments say them."""
    tensor = original.get("tensor_model_parallel_size") or 1
    multiple = (original.get("make_vocab_size_divisible_by") or DIVISOR) * tensor
    shown = rendered.get("padded_vocab_size") or _padded(tokens, DIVISOR * tensor)
    rows = original.get("padded_vocab_size") or _padded(original.get("vocab_size") or tokens, multiple)
    divisor = parsed.words.get("make_vocab_size_divisible_by")
    if rows == shown:
        return
    if divisor and rendered.get("vocab_size"):
        result.extra_args += divisor
    elif divisor:
        result.unread.append(UnreadWords(divisor, f"the embedding has {shown} rows instead of {rows}"))
    else:
        result.notes.append(f"the embedding is planned with {shown} rows instead of {rows}")


def _padded(tokens: int, multiple: int) -> int:
    return -(-tokens // multiple) * multiple
