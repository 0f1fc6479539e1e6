"""Tokens: made up, of text, or of Python's own source."""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoTokenizer

# Text is held in memory, one byte a token, so that reading it never disturbs a step.
TEXT_BYTES_PER_RANK = 64 * 2**20
PYTHON_SOURCE_BYTES = 8 * 2**20

Batches = Callable[[int], torch.Tensor]


def text_files(source: str) -> list[Path]:
    """The files a data source names, in an order that is the same on every node."""
    if source == "python-source":
        library = Path(sysconfig.get_paths()["stdlib"])
        skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
        files = [p for p in library.rglob("*.py") if not skip & set(p.relative_to(library).parts)]
    else:
        path = Path(source)
        files = [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]
    return sorted(files)


def read_share(files: list[Path], rank: int, ranks: int, limit_bytes: int) -> bytes:
    """This rank's own part of the text: ranks never see the same byte. `limit_bytes` bounds all of it."""
    ends = list(accumulate(path.stat().st_size for path in files))
    total = min(ends[-1] if ends else 0, limit_bytes)
    first, last = total * rank // ranks, total * (rank + 1) // ranks
    parts = []
    for index, path in enumerate(files):
        begin = ends[index - 1] if index else 0
        start, stop = max(first, begin), min(last, ends[index])
        if start < stop:
            with path.open("rb") as stream:
                stream.seek(start - begin)
                parts.append(stream.read(stop - start))
    return b"".join(parts)


def read_tokens(source: str, tokenizer: str | None, vocabulary: int) -> torch.Tensor:
    """This rank's tokens, one a byte or as the tokenizer says."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    limit = PYTHON_SOURCE_BYTES if source == "python-source" else TEXT_BYTES_PER_RANK * ranks
    text = read_share(text_files(source), rank, ranks, limit)
    if tokenizer is None:
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0)
        largest = 256
    else:
        words = AutoTokenizer.from_pretrained(tokenizer)
        tokens = torch.tensor(words(text.decode("utf-8", "replace"))["input_ids"], dtype=torch.int32)
        largest = len(words)
    if largest > vocabulary:
        raise SystemExit(f"the data has {largest} different tokens, the model only {vocabulary}: enlarge vocab_size")
    return tokens


def make_batches(args: argparse.Namespace, vocabulary: int, micro_batch_size: int) -> Batches:
    """A function from the number of a micro-batch to this rank's tokens, inputs and targets in one.

    The numbers depend on seed, rank and micro-batch alone, so a resumed run goes on where it stopped.
    """
    rank, length = dist.get_rank(), args.sequence_length + 1

    def generator(number: int) -> torch.Generator:
        return torch.Generator().manual_seed((args.seed * 1_000_003 + rank) * 1_000_003 + number)

    if args.data == "mock":
        return lambda number: torch.randint(0, vocabulary, (micro_batch_size, length), generator=generator(number))
    tokens = read_tokens(args.data, args.tokenizer, vocabulary)
    if len(tokens) < length:
        raise SystemExit(
            f"{args.data}: rank {rank} has {len(tokens)} tokens, a sequence needs {length}: give more text "
            "or a shorter sequence_length"
        )

    def batch(number: int) -> torch.Tensor:
        starts = torch.randint(0, len(tokens) - length + 1, (micro_batch_size,), generator=generator(number))
        return torch.stack([tokens[start : start + length] for start in starts.tolist()]).long()

    return batch
