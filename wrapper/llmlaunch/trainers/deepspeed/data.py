"""Tokens: made up, of text, of Python's own source, or of an indexed dataset.

Which tokens a sample has depends on the seed and on the sample's number in the whole job alone: so a resumed run goes
on where it stopped, and runs on any number of ranks learn from the same samples.
"""

from __future__ import annotations

import argparse
import bisect
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from transformers import AutoTokenizer

from group import refuse
from indexed import IndexedTokens
from parallel import RankSplit

# Tokens of text are held in memory, so that reading never disturbs a step.
TEXT_BYTES_PER_RANK = 64 * 2**20
PYTHON_SOURCE_BYTES = 8 * 2**20
BYTES = 256  # tokens there are where every byte is one

Share = tuple[float, float]  # where a part of the data begins and ends
WHOLE: Share = (0.0, 1.0)
TRAINING, VALIDATION = 0, 1  # places in --split
# From a generator of random numbers to the tokens of one sample: a sequence and the token after it.
Sample = Callable[[torch.Generator], torch.Tensor]


@dataclass
class Batch:
    """A micro-batch of this rank: inputs and targets [samples, positions].

    Of rows `targets` are IGNORED where nothing is learned, `weight` is by what the sum of their losses is multiplied to
    get their part of a step's mean, `positions` restart where several rows share a sequence, and `mask` is given where
    a model must know which inputs are padding.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    weight: float | None = None
    positions: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    tokens: torch.Tensor | None = None  # of which inputs and targets are parts: on a device, too

    def to(self, device: torch.device) -> Batch:
        if self.tokens is not None:
            return of_tokens(self.tokens.to(device))

        def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(device)

        return Batch(
            self.inputs.to(device), self.targets.to(device), self.weight, moved(self.positions), moved(self.mask)
        )


def of_tokens(tokens: torch.Tensor) -> Batch:
    """Every token but the first is a target."""
    return Batch(tokens[:, :-1], tokens[:, 1:], tokens=tokens)


# From the number of a micro-batch to what this rank learns from.
Batches = Callable[[int], Batch]


def training_share(split: str | None) -> Share:
    return share_of(split, TRAINING)


def share_of(split: str | None, place: int) -> Share:
    """Where a part of the data begins and ends, as shares of all of it."""
    if split is None:
        return WHOLE
    shares = [float(share) for share in split.split(",")]
    return sum(shares[:place]) / sum(shares), sum(shares[: place + 1]) / sum(shares)


def make_batches(
    args: argparse.Namespace,
    vocabulary: int,
    micro_batch_size: int,
    split: RankSplit,
    share: Share = WHOLE,
) -> Batches:
    """This rank's micro-batches of a `share` of the data; ranks that split a layer or a sequence have the same."""
    sample = open_source(args, vocabulary, split, share)

    def batch(number: int) -> Batch:
        first = (number * split.data + split.data_rank) * micro_batch_size
        samples = [sample(generator(args.seed, first + index)) for index in range(micro_batch_size)]
        tokens = torch.stack(samples).long()
        check_vocabulary(args.data[0], tokens, vocabulary)
        return of_tokens(tokens)

    return batch


def check_vocabulary(name: str, tokens: torch.Tensor, vocabulary: int) -> None:
    if int(tokens.max()) >= vocabulary:
        raise SystemExit(
            f"--data {name}: has token {int(tokens.max())}, the model only {vocabulary}: enlarge vocab_size"
        )


def generator(seed: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_000_007 + number)


def open_source(args: argparse.Namespace, vocabulary: int, split: RankSplit, share: Share = WHOLE) -> Sample:
    """The source `--data` names, or the blend of them. Ends the job where there is too little of one."""
    parts = blend_of(args.data)
    sources = [open_one(name, args, vocabulary, split, share) for _, name in parts]
    if len(sources) == 1:
        return sources[0]
    weights = torch.tensor([weight for weight, _ in parts])
    return lambda random: sources[int(torch.multinomial(weights, 1, generator=random))](random)


def blend_of(arguments: list[str]) -> list[tuple[float, str]]:
    """One source, or those of a blend with their weights: `WEIGHT SOURCE WEIGHT SOURCE ...`, as --data-path of
    Megatron-LM has it."""
    if len(arguments) == 1:
        return [(1.0, arguments[0])]
    try:
        parts = [(float(weight), name) for weight, name in zip(arguments[::2], arguments[1::2])]
    except ValueError:
        parts = []
    if len(arguments) % 2 or not parts or min(parts)[0] <= 0:
        refuse(f"--data {' '.join(arguments)}: name one source, or a weight above 0 before each of several")
    return parts


def open_one(name: str, args: argparse.Namespace, vocabulary: int, split: RankSplit, share: Share) -> Sample:
    length = args.sequence_length + 1
    if name == "mock":
        return lambda random: torch.randint(0, vocabulary, (length,), generator=random)
    if Path(f"{name}.idx").exists():
        indexed = IndexedTokens(Path(name))
        return windows(name, len(indexed), length, indexed.read, share)
    text = Text(text_files(name), PYTHON_SOURCE_BYTES if name == "python-source" else None)
    tokenizer = args.tokenizer
    if tokenizer is None and args.weights and name != "python-source":
        tokenizer = str(args.weights)
    if tokenizer is None:
        if vocabulary < BYTES:
            refuse(f"every byte is a token, and the model has {vocabulary}: enlarge vocab_size to {BYTES}")
        return windows(name, len(text), length, text.tokens, share)
    tokens = tokenized(text, tokenizer, split)
    return windows(name, len(tokens), length, lambda start, stop: tokens[start:stop], share)


def windows(
    name: str, total: int, length: int, read: Callable[[int, int], torch.Tensor], share: Share = WHOLE
) -> Sample:
    """Samples that begin anywhere in a `share` of `total` tokens. `read` returns the tokens from one number to
    another."""
    first, last = (round(end * total) for end in share)
    if last - first < length:
        part = "" if share == WHOLE else f", of which this share has {last - first}"
        refuse(
            f"{name}: has {total} tokens{part}, a sequence needs {length}: give more text, a larger share (data.split) "
            "or a shorter sequence_length"
        )

    def sample(random: torch.Generator) -> torch.Tensor:
        start = first + int(torch.randint(0, last - first - length + 1, (), generator=random))
        return read(start, start + length)

    return sample


def tokenized(text: Text, tokenizer: str, split: RankSplit) -> torch.Tensor:
    """The tokens of this rank's own part of the text: every rank tokenizes other text."""
    try:
        tokenize = AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        refuse(f"no tokenizer in {tokenizer}: {str(error).splitlines()[0]}")
    total = min(len(text), TEXT_BYTES_PER_RANK * split.data)
    share = text.read(total * split.data_rank // split.data, total * (split.data_rank + 1) // split.data)
    return torch.tensor(tokenize(share.decode("utf-8", "replace"))["input_ids"], dtype=torch.int32)


def text_files(source: str) -> list[Path]:
    """The files a data source names, in an order that is the same on every node."""
    if source == "python-source":
        library = Path(sysconfig.get_paths()["stdlib"])
        skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
        # Debian's own library links to a file in /etc, which a container may lack
        files = [p for p in library.rglob("*.py") if p.is_file() and not skip & set(p.relative_to(library).parts)]
    else:
        path = Path(source)
        files = [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]
    missing = [path for path in files if not path.is_file()]
    if missing:
        refuse(f"--data {source}: there is no such file, folder or indexed dataset ({source}.idx)")
    return sorted(files)


class Text:
    """Files one after the other, read where they are needed. `limit` bounds their bytes."""

    def __init__(self, files: list[Path], limit: int | None = None) -> None:
        self.files = files
        self.ends = list(accumulate(path.stat().st_size for path in files))
        self.limit = limit

    def __len__(self) -> int:
        total = self.ends[-1] if self.ends else 0
        return total if self.limit is None else min(total, self.limit)

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from `start` to `stop`."""
        parts = []
        index = bisect.bisect_right(self.ends, start)
        while start < stop:
            begin = self.ends[index - 1] if index else 0
            end = min(stop, self.ends[index])
            with self.files[index].open("rb") as stream:
                stream.seek(start - begin)
                parts.append(stream.read(end - start))
            start, index = end, index + 1
        return b"".join(parts)

    def tokens(self, start: int, stop: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.read(start, stop)), dtype=torch.uint8)
