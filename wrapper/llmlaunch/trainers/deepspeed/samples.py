"""Answers of the trained model to rows, printed for a person to read beside those that the rows have."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from group import report
from parallel import RankSplit
from rows import JobRows

MOST_CHARACTERS = 4000  # of each text that is printed


def add_samples(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--samples",
        type=int,
        default=0,
        help="rows of the validation data, or else of the training's, that the trained model answers",
    )
    parser.add_argument("--sample-tokens", type=int, default=128, help="tokens of an answer at most")


def print_samples(engine: Any, args: argparse.Namespace, data: JobRows, split: RankSplit) -> None:
    """All ranks answer the same rows: where weights are split, each needs the others."""
    rows, reader = data.validation or data.training, data.reader
    count = min(args.samples, len(rows.numbers))
    engine.eval()
    for place in range(count):
        row = rows.row(place)
        prompt, reference = reader.asked(row)
        prompt = prompt[-args.sequence_length :]
        answer = generated(engine, prompt, reader.ends(row), args.sample_tokens, split)
        texts = {
            "prompt": reader.tokenizer.decode(prompt),
            "answer": reader.tokenizer.decode(answer, skip_special_tokens=True),
            "reference": reference,
        }
        report(f"sample {place + 1}/{count}")
        for name, text in texts.items():
            report(f"{name}: {shown(text)}")
    engine.train()


def shown(text: str) -> str:
    """In one line: text of a model never looks like a line of the trainer's."""
    text = text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + " ..."
    return json.dumps(text, ensure_ascii=False)


def generated(engine: Any, prompt: list[int], ends: list[int], most: int, split: RankSplit) -> list[int]:
    """The most likely tokens after a prompt."""
    model = engine.module
    room = getattr(model.config, "max_position_embeddings", None) or len(prompt) + most
    inputs = torch.tensor([prompt], device=engine.device)
    with torch.no_grad(), whole_sequences(split):
        tokens = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=max(1, min(most, room - len(prompt))),
            do_sample=False,
            use_cache=True,
            eos_token_id=ends or None,
            pad_token_id=ends[0] if ends else 0,
            synced_gpus=engine.zero_optimization_partition_weights(),
        )
    return list(tokens[0, len(prompt) :].tolist())


@contextmanager
def whole_sequences(split: RankSplit) -> Iterator[None]:
    """Attention as Transformers has it: each rank has all of a sequence (ulysses_sp.py `register_with_transformers`
    puts its own in place of it, 0.19.8)."""
    if split.sequence == 1:
        yield
        return
    exchanging = ALL_ATTENTION_FUNCTIONS["sdpa"]
    del ALL_ATTENTION_FUNCTIONS["sdpa"]  # the one below it appears
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = exchanging
