"""What a Megatron-LM namespace trains, for how long and on which data, as a recipe writes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from llmlaunch.frameworks.megatron.flags.table import read_section
from llmlaunch.frameworks.megatron.flags.training import read_warmup
from llmlaunch.frameworks.megatron.namespace import Namespace
from llmlaunch.recipe.datasets import WITHOUT_MODEL, TokenizerType

__all__ = ["missing_data", "missing_training", "read_data", "read_training"]


def missing_training(space: Namespace) -> Iterator[str]:
    """Yield a sentence for each length or size of the batch that these values do not tell."""
    if not space.get("seq_length"):
        yield "training.sequence_length: --seq-length is not given; write training.sequence_length"
    if not space.get("global_batch_size"):
        yield "training.global_batch_size: --global-batch-size is not given; write training.global_batch_size"
    if not space.get("train_iters"):
        yield "training.steps: neither --train-iters nor --train-samples is given; write training.steps"


def read_training(space: Namespace) -> tuple[dict[str, Any], list[str]]:
    """Return the mapping `training:` and notes."""
    return read_section(space, "training"), [*_length_notes(space), *_warmup_notes(space)]


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


def missing_data(space: Namespace) -> Iterator[str]:
    """Yield a sentence where these values do not tell what is trained on."""
    if space.get("mock_data") or space.get("data_path") or space.get("train_data_path"):
        return
    file = space.get("data_args_path") or space.get("per_split_data_args_path")
    if file:
        yield f"data: stands in {ascii(file)[1:-1]}, which is not read; write data.path or data.blend"
    else:
        yield "data: no --data-path is given; write data.path, data.blend or data: {mock: true}"


def read_data(space: Namespace) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the mapping `data:`, or None where these values do not tell its source, and notes."""
    data, kind = read_section(space, "data"), space.get("tokenizer_type")
    if space.get("mock_data"):
        return data, []
    notes = []
    if kind is not None and kind not in (*WITHOUT_MODEL, *get_args(TokenizerType)):
        notes.append(
            f"data.tokenizer_type: {ascii(kind)[1:-1]} is none that a recipe names; the tokens are read as numbers"
        )
    return data if "path" in data or "blend" in data else None, notes
