"""The model that a Megatron-LM namespace describes, as a recipe writes it: a preset, a preset with a few keys changed,
or all its sizes; and what it trains, for how long and on which data."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, get_args

from llmlaunch.command_lines.recipe_draft import NO_DATA, RecipeDraft, assume_steps
from llmlaunch.errors import UserError
from llmlaunch.families.hub_ids import hub_model, load_preset, preset_names
from llmlaunch.families.lookup import find_model
from llmlaunch.frameworks.megatron.flags.attention import INDEXER_SIZES, SPARSE, VARIANT
from llmlaunch.frameworks.megatron.flags.model import SIZES
from llmlaunch.frameworks.megatron.flags.table import read_section
from llmlaunch.frameworks.megatron.flags.training import read_warmup
from llmlaunch.frameworks.megatron.namespace import Namespace
from llmlaunch.frameworks.megatron.parser import dest_of
from llmlaunch.models.sections import Mamba
from llmlaunch.models.shape import (
    CLAMPED,
    SQUARED,
    Indexer,
    MlaShape,
    ModelShape,
    MoeShape,
    RopeScaling,
    SlidingWindow,
)
from llmlaunch.recipe.datasets import WITHOUT_MODEL, TokenizerType

# Rows of the embedding that a tokenizer asks for, by its type or name: len(tokenizer), as build_tokenizer reads it. The
# first that fits decides.
TOKENIZERS: tuple[tuple[str, int], ...] = (
    (r"GPT2BPETokenizer|(^|/)gpt2(-\w+)?/?$", 50257),
    (r"llama[-_ ]?3", 128256),
    (r"codellama", 32016),
    (r"llama[-_ ]?2", 32000),
    (r"mi[sx]tral-8x7b|mistral-7b(-instruct)?(-v0\.1)?/?$", 32000),
    (r"gpt-neox-20b", 50277),
)
# What is assumed by the type of the tokenizer (Llama 2's own model; DEFAULT_TIKTOKEN_MAX_VOCAB of core/tokenizers/text/
# libraries/tiktoken_tokenizer.py, core 0.19), and of any other.
USUAL_TOKENS, MOST_USUAL = {"Llama2Tokenizer": 32000, "TikTokenizer": 2**17}, 128256
FEW_CHANGES = 4
NOT_COMPLETED = ("rope_scaling", "sliding_window", "indexer", "linear_attention", "mamba")  # by a base
PARTS = (Indexer, Mamba, MlaShape, MoeShape, RopeScaling, SlidingWindow)


def read_model(space: Namespace, draft: RecipeDraft) -> str | dict[str, Any] | None:
    """Return the recipe's key `model`, a preset or a mapping; None where sizes are missing. The draft lacks each size
    that these values do not say, and gets notes."""
    absent = [flag for flag in SIZES if not space.get(dest_of(flag)) and flag != "--ffn-hidden-size"]  # has a default
    if absent and any(sentence.startswith("model: ") for sentence in draft.missing):
        return None
    if absent:
        flags = ", ".join(absent)
        draft.lack("model", f"{flags} {'are' if len(absent) > 1 else 'is'} not given; add the model's sizes")
        return None
    shape = read_section(space, "model")
    if space.get(VARIANT) == SPARSE:
        shape.setdefault("indexer", {})  # without its sizes the recipe would be of a model with ordinary attention
        _lack_of_indexer(space, draft)
    padded = space.get("padded_vocab_size")
    vocabulary, note = _vocabulary(space)
    if vocabulary is not None:
        shape["vocab_size"] = vocabulary
    elif not padded:
        key = "model.vocab_size"
        draft.lack(key, f"only the tokenizer says how many tokens there are; add --vocab-size, or --set {key}=N")
        draft.stand_in(key, *_assumed_vocabulary(space, shape))
    draft.notes += [note] if note else []
    longest = (
        {"max_position_embeddings": space["max_position_embeddings"]} if space.get("max_position_embeddings") else {}
    )
    return _named(shape, longest, int(padded) if padded else None, int(space.get("tensor_model_parallel_size") or 1))


def _assumed_vocabulary(space: Namespace, shape: Mapping[str, Any]) -> tuple[int, str]:
    """Return how many tokens are assumed where nothing says their number, and the sentence for the person."""
    alike = (name for name, preset in _presets().items() if _has_sizes(preset, shape))
    name, kind = next(alike, None), str(space.get("tokenizer_type"))
    if name is not None:
        tokens, why = _presets()[name].vocab_size, f"as {name} has, whose sizes these are"
    else:
        tokens = USUAL_TOKENS.get(kind, MOST_USUAL)
        why = f"usual of {kind}" if kind in USUAL_TOKENS else "as Llama 3 has"
    return tokens, f"the vocabulary is not known; {tokens:,} tokens are assumed, {why}"


def _has_sizes(preset: ModelShape, shape: Mapping[str, Any]) -> bool:
    return all(getattr(preset, key) == shape[key] for key in map(dest_of, SIZES))


def _lack_of_indexer(space: Namespace, draft: RecipeDraft) -> None:
    """Name each size of sparse attention that these values do not say: Megatron has no default for any
    (transformer_config.py, core 0.19)."""
    for flag, key in INDEXER_SIZES.items():
        if not space.get(dest_of(flag)):
            draft.lack(key, f"{flag} is not given; add it, or --set {key}=N")


def _vocabulary(space: Namespace) -> tuple[int | None, str | None]:
    """Return the tokens before padding, and where they are taken from if not from --vocab-size."""
    kind, name = space.get("tokenizer_type"), str(space.get("tokenizer_model") or "")
    size, extra = space.get("vocab_size"), space.get("extra_vocab_size")
    if size:
        return int(size) + int(extra or 0), None
    if space.get("padded_vocab_size"):
        return None, None
    hub = hub_model(name)
    if hub is not None:
        rows = int(hub.changes.get("vocab_size", load_preset(hub.preset).vocab_size))
        return rows, f"model.vocab_size: {rows}, as the model {name} has; the script names no number"
    for pattern, tokens in TOKENIZERS:
        if re.search(pattern, name, re.IGNORECASE) or re.search(pattern, str(kind or "")):
            source = name or str(kind)
            return (
                tokens,
                f"model.vocab_size: {tokens}, as {ascii(source)[1:-1]} has tokens; the script names no number",
            )
    return None, None


def _named(shape: dict[str, Any], longest: dict[str, int], padded: int | None, tensor: int) -> str | dict[str, Any]:
    """Return the preset that this shape is, or a preset with the few keys that differ, or the shape itself."""
    if "vocab_size" not in shape and padded is None:
        return shape
    for name, preset in _presets().items():
        if not _has_sizes(preset, shape):
            continue
        own = shape | longest
        if "vocab_size" not in own:
            matches = padded is not None and preset.padded_vocab_size(tensor) == padded
            own["vocab_size"] = preset.vocab_size if matches else padded
        changed = _over_preset(preset, own)
        if changed is not None:
            return {"base": name} | changed if changed else name
    return shape if "vocab_size" in shape else {**shape, "vocab_size": padded}


@functools.cache
def _presets() -> Mapping[str, ModelShape]:
    return {name: load_preset(name) for name in preset_names()}


def _over_preset(preset: ModelShape, shape: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what must be written over a preset to make it this shape; None where that is much."""
    try:
        wanted = find_model({"max_position_embeddings": preset.max_position_embeddings, **shape})
    except UserError:
        return None
    modules = wanted.mtp_num_layers > 0
    changed = _differences(_comparable(preset, modules), _comparable(wanted, modules))
    for name in NOT_COMPLETED:
        if name in changed:
            changed[name] = _comparable(wanted, modules)[name]
    if changed.get("activation") not in (CLAMPED, SQUARED):
        changed.pop("activation", None)
    parts = any(
        value is None or isinstance(value, Mapping) != isinstance(getattr(preset, key), PARTS)
        for key, value in changed.items()
    )
    if len(changed) > FEW_CHANGES or parts:
        return None
    if not changed:
        return {}
    try:
        again = find_model({"base": preset.name, **changed})
    except UserError:
        return None
    return changed if _comparable(again, modules) == _comparable(wanted, modules) else None


def _comparable(shape: ModelShape, modules: bool) -> dict[str, Any]:
    """The keys of a shape that a recipe may write, plain; without `modules` also without their layers."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(shape)))
    (values["moe"] or {}).pop("grouped_gemm", None)
    if not modules:
        (values["mamba"] or {}).pop("mtp_pattern", None)
    return {key: value for key, value in values.items() if key not in ("name", "family")}


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _differences(before[key], value)
        if isinstance(value, Mapping) and isinstance(before.get(key), Mapping)
        else value
        for key, value in after.items()
        if value != before.get(key)
    }


def read_training(space: Namespace, draft: RecipeDraft) -> dict[str, Any]:
    """Return the mapping `training:`; the draft lacks each length and size of the batch that these values do not say,
    and gets notes."""
    for dest, key in (("seq_length", "sequence_length"), ("global_batch_size", "global_batch_size")):
        if not space.get(dest) and not any(each.startswith(f"training.{key}: ") for each in draft.missing):
            flag = f"--{dest.replace('_', '-')}"
            draft.lack(f"training.{key}", f"{flag} is not given; add it, or --set training.{key}=N")
    if not space.get("train_iters"):
        draft.lack("training.steps", "neither --train-iters nor --train-samples is given; --set training.steps=N")
        evaluated = space.get("eval_interval") if space.get("eval_iters") else 0
        assume_steps(draft, space.get("lr_warmup_iters"), space.get("save_interval"), evaluated)
    draft.notes += [*_length_notes(space), *_warmup_notes(space)]
    return read_section(space, "training")


def _length_notes(space: Namespace) -> Iterator[str]:
    if "train_iters" in space.converted:
        yield f"training.steps: {space['train_iters']} steps see the samples that --train-samples names"
    if space.get("rampup_batch_size"):
        yield "training.global_batch_size: is that after --rampup-batch-size, which stays an extra argument"


def _warmup_notes(space: Namespace) -> Iterator[str]:
    stated, kept = space.get("lr_warmup_iters") or 0, read_warmup(space)
    if stated != kept:
        steps = space["train_iters"]
        yield f"training.warmup_steps: {stated} of {steps} steps leave none after the warm-up; {kept} here"


def read_data(space: Namespace, draft: RecipeDraft) -> dict[str, Any] | None:
    """Return the mapping `data:`; None where these values do not say its source, which the draft then lacks."""
    data, kind = read_section(space, "data"), space.get("tokenizer_type")
    if space.get("mock_data"):
        return data
    if kind is not None and kind not in (*WITHOUT_MODEL, *get_args(TokenizerType)):
        draft.notes.append(
            f"data.tokenizer_type: {ascii(kind)[1:-1]} is none that a recipe names; the tokens are read as numbers"
        )
    if "path" in data or "blend" in data:
        return data
    file = space.get("data_args_path") or space.get("per_split_data_args_path")
    if file:
        draft.lack("data", f"is in {ascii(file)[1:-1]}, which is not read; --set data.path=PREFIX")
    elif not (space.get("data_path") or space.get("train_data_path")):
        draft.lack("data", "no --data-path is given; add it, or --set data.path=PREFIX")
    draft.stand_in("data", {"mock": True}, NO_DATA)
    return None
