"""What a Megatron-LM namespace trains, for how long and on which data, as a recipe writes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from llmlaunch.command_lines.recipe_draft import NO_DATA, RecipeDraft, assume_steps
from llmlaunch.frameworks.megatron.flags.table import read_section
from llmlaunch.frameworks.megatron.flags.training import read_warmup
from llmlaunch.frameworks.megatron.namespace import Namespace
from llmlaunch.recipe.datasets import WITHOUT_MODEL, TokenizerType


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
