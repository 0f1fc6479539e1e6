"""Rows of a file, a folder or the Hugging Face hub: tokenized once, and put together to micro-batches.

A sample is a row, or a sequence packed of several. Its number in the whole job and the seed decide which: each epoch is
a permutation of all samples, so that a resumed run goes on where it stopped, and runs on any number of ranks learn from
the same samples.
"""

from __future__ import annotations

import argparse
import bisect
import hashlib
import json
import math
import os
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from chat import FORMATS, RowReader, UnusableError, first_line, open_tokenizer
from data import VALIDATION, WHOLE, Batch, Share, check_vocabulary, generator, share_of, training_share
from group import refuse, report
from parallel import RankSplit

IGNORED = -100  # torch's default of what a cross-entropy leaves out
SUFFIXES = {".jsonl": "json", ".json": "json", ".ndjson": "json", ".parquet": "parquet"}
TRAINING_NAMES, VALIDATION_NAMES, TEST_NAMES = ("training", "train"), ("validation", "valid", "val"), ("test",)
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")  # a configuration after the colon
READING = timedelta(hours=12)  # the watchdog has its own limit, watchdog.first_step_seconds
ROWS_PER_WORKER = 5000  # fewer are tokenized sooner by one process
MOST_WORKERS = 8
Result = TypeVar("Result")
CALLS = count()  # of first_of_node, the same on all ranks


def add_rows(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=FORMATS, help="what the rows of --data are; without it, plain text")
    parser.add_argument("--packed", action="store_true", help="several rows in a sequence, each by itself")
    parser.add_argument("--chat-template", metavar="FILE", help="Jinja template instead of the tokenizer's own")


@dataclass
class TokenizedRows:
    """Tokenized rows of which something is learned, in the order they are stored in. `raw` are those of the file."""

    raw: Any
    read: Any
    numbers: np.ndarray
    lengths: np.ndarray
    learned: np.ndarray  # tokens that are targets

    def tokens(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        row = self.read[int(self.numbers[place])]
        return row["ids"], row["learned"]

    def row(self, place: int) -> dict[str, Any]:
        return dict(self.raw[int(self.numbers[place])])


@dataclass
class JobRows:
    """What `--data` and `--validation-data` name."""

    training: TokenizedRows
    validation: TokenizedRows | None
    reader: RowReader


def open_data(args: argparse.Namespace) -> JobRows | None:
    """The rows of a job, None where it has plain text. Ends the job where they cannot be trained with."""
    if args.format is None or (args.format == "text" and len(args.data) == 1 and is_text(args.data[0])):
        return None
    if len(args.data) > 1 or len(args.validation_data or [""]) > 1:
        refuse(f"--format {args.format}: name one source of rows; a blend is of plain text")
    reader = RowReader(open_tokenizer(args), args.format)
    name = args.data[0]
    source = opened(name, args, reader, TRAINING_NAMES)
    assert source is not None
    other, share = None, WHOLE
    if args.validation_data:
        other = opened(args.validation_data[0], args, reader, VALIDATION_NAMES)
    elif args.split is not None:
        other, share = source, share_of(args.split, VALIDATION)
    elif not Path(name).is_file():
        other = opened(name, args, reader, VALIDATION_NAMES, needed=False)
    training = shared(name, source, training_share(args.split))
    validation = None if other is None or share[0] == share[1] else shared(name, other, share)
    if args.evaluation_interval and validation is None:
        refuse("--evaluation-interval: there are no validation rows; name some, or a share of the data for them")
    say_what_is_read(args, training, source[1])
    return JobRows(training, validation, reader)


def is_text(name: str) -> bool:
    """Whether a source is plain text: what is there and has no file of rows."""
    path = Path(name)
    if path.is_dir():
        return not files_in(path)
    if path.exists() or Path(f"{name}.idx").exists():
        return path.suffix not in SUFFIXES
    return not HUB_NAME.fullmatch(name)


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file())


def files_of(name: str, roles: tuple[str, ...]) -> list[Path]:
    """The files that a path names: of a folder those called by their role, or all where training has none of its own.
    Raises UnusableError."""
    path = Path(name)
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise UnusableError(f"is no file of rows: its name must end in {', '.join(SUFFIXES)}")
        return [path]
    files = files_in(path)
    named = [file for role in roles for file in files if file.name.split(".")[0] == role]
    if not named and roles is TRAINING_NAMES:
        others = (*TEST_NAMES, *VALIDATION_NAMES)
        named = [file for file in files if file.name.split(".")[0] not in others]
    if not named and roles is TRAINING_NAMES:
        raise UnusableError(f"holds no file of rows ({', '.join(SUFFIXES)})")
    if len({SUFFIXES[file.suffix] for file in named}) > 1:
        raise UnusableError("holds files of JSON and of Parquet; name one of them")
    return named


def load(name: str, roles: tuple[str, ...]) -> Any:
    """The rows as they are stored, None where there are none of this role. Raises UnusableError."""
    try:
        import datasets
    except ImportError:
        raise UnusableError("rows are read with the package datasets, which is not installed") from None
    datasets.disable_progress_bars()
    try:
        if Path(name).exists():
            files = files_of(name, roles)
            if not files:
                return None
            paths = [str(file.resolve()) for file in files]
            return datasets.load_dataset(SUFFIXES[files[0].suffix], data_files=paths, split="train")
        if not HUB_NAME.fullmatch(name) or Path(name).suffix in SUFFIXES:
            raise UnusableError("there is no such file or folder")
        repository, _, configuration = name.partition(":")
        parts = datasets.load_dataset(repository, configuration or None)
        return next((parts[role] for role in roles if role in parts), None)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        place = "" if Path(name).exists() else " from the Hugging Face hub"
        raise UnusableError(f"cannot be loaded{place}: {first_line(error.__cause__ or error)}") from None


def opened(
    name: str, args: argparse.Namespace, reader: RowReader, roles: tuple[str, ...], needed: bool = True
) -> tuple[Any, Any] | None:
    """The rows as they are stored and tokenized."""

    def work() -> tuple[Any, Any] | None:
        raw = load(name, roles)
        if raw is None and needed and roles is VALIDATION_NAMES:
            raw = load(name, TRAINING_NAMES)
        if raw is None:
            if needed:
                raise UnusableError(f"has no part called {' or '.join(roles)}")
            return None
        try:
            return raw, tokenized(raw, reader, args.sequence_length)
        except OSError as error:
            raise UnusableError(
                f"its tokens cannot be kept: {error}; name another folder in HF_DATASETS_CACHE"
            ) from None

    return first_of_node(name, work)


def first_of_node(name: str, work: Callable[[], Result]) -> Result:
    """The result of `work` on every rank, which reads what the first wrote into the cache of `datasets`.

    Rank 0 works first, then the first rank of every other node, whose work is already done where the nodes share a
    disk. Where one fails all end with its words.
    """
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    first = rank - int(os.environ.get("LOCAL_RANK", "0"))
    call = next(CALLS)

    def key(of: int) -> str:
        return f"rows {call} of {of}"

    for earlier in dict.fromkeys((0, first)):
        if earlier == rank:
            break
        store.wait([key(earlier)], READING)
        words = store.get(key(earlier)).decode()
        if words:
            refuse(words)
    words = f"--data {name}: rank {rank} failed to read it; why is above"
    try:
        result = work()
        words = ""
    except UnusableError as error:
        words = f"--data {name}: {error}"
    finally:
        if rank == first and dist.get_backend() != "fake":
            store.set(key(rank), words)
    if words:
        refuse(words)
    return result


def tokenized(raw: Any, reader: RowReader, most: int) -> Any:
    """Every row's tokens, at most so many of each; `datasets` keeps them in a file that is named by all they come
    from. Raises UnusableError."""
    from datasets import Features, Value

    try:
        from datasets import List
    except ImportError:  # before datasets 4
        from datasets import Sequence as List

    def tokens_of(row: dict[str, Any], number: int) -> dict[str, Any]:
        read = reader.read(row, number)
        learned = read.learned[:most]
        return {
            "ids": read.ids[:most],
            "learned": learned,
            "length": len(learned),
            "count": sum(learned[1:]),  # nothing comes before the first
            "cut": len(read.ids) > most,
        }

    if len(raw) >= 2 * ROWS_PER_WORKER:
        report(f"tokenizing {len(raw)} rows")
    return raw.map(
        tokens_of,
        with_indices=True,
        remove_columns=raw.column_names,
        features=Features(
            {
                **{"ids": List(Value("int32")), "learned": List(Value("bool"))},
                **{"length": Value("int32"), "count": Value("int32"), "cut": Value("bool")},
            }
        ),
        new_fingerprint=digest(raw, reader, most),
        # the same on all ranks: a file is named by it, too
        num_proc=min(MOST_WORKERS, len(raw) // ROWS_PER_WORKER) if len(raw) >= 2 * ROWS_PER_WORKER else None,
    ).with_format("numpy")


def digest(raw: Any, reader: RowReader, most: int) -> str:
    """Of all that tokens depend on. `datasets` would hash the tokenizer as it is pickled, which changes when it is
    used."""
    tokenizer = reader.tokenizer
    words = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(sorted(tokenizer.get_vocab().items()))
    parts = [raw._fingerprint, reader.kind, most, words, repr(tokenizer), tokenizer.chat_template]
    code = b"".join(Path(__file__).with_name(name).read_bytes() for name in ("chat.py", "rows.py"))
    return hashlib.sha256(json.dumps(parts, default=str).encode() + code).hexdigest()[:32]


def shared(name: str, source: tuple[Any, Any], share: Share) -> TokenizedRows:
    """A share of the rows. All ranks must have the same."""
    raw, read = source
    first, last = (round(end * len(read)) for end in share)
    table = read.data.slice(first, last - first)
    learned, lengths = (table.column(name).to_numpy().astype(np.int64) for name in ("count", "length"))
    kept = np.flatnonzero(learned)
    refuse_unlike(name, len(kept), int(lengths[kept].sum()), int(learned.sum()))
    if not len(kept):
        refuse(f"{name}: none of its {last - first} rows has a token to learn within sequence_length")
    return TokenizedRows(raw, read, kept + first, lengths[kept], learned[kept])


def refuse_unlike(name: str, *figures: int) -> None:
    """Ends the job where another rank has other rows: each node may have a file of its own."""
    extremes = torch.tensor([*figures, *(-figure for figure in figures)], dtype=torch.int64)
    extremes = extremes.to(get_accelerator().current_device_name())
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    highest, lowest = extremes[: len(figures)], -extremes[len(figures) :]
    if not torch.equal(highest, lowest):
        refuse(
            f"{name}: has other rows on another node: {highest.tolist()} rows, tokens and targets at most, "
            f"{lowest.tolist()} at least; copy the same file to all"
        )


def say_what_is_read(args: argparse.Namespace, rows: TokenizedRows, read: Any) -> None:
    first, last = (round(end * len(read)) for end in training_share(args.split))
    cut = int(np.count_nonzero(read.data.slice(first, last - first).column("cut").to_numpy(zero_copy_only=False)))
    unlearned = last - first - len(rows.numbers)
    words = [f"rows: {len(rows.numbers)} with {int(rows.lengths.sum())} tokens, {int(rows.learned.sum())} learned"]
    if cut:
        words.append(f"{cut} cut at sequence_length, {args.sequence_length} tokens")
    if unlearned:
        words.append(f"{unlearned} left out, which have no token to learn")
    report("; ".join(words))


def packs(lengths: np.ndarray, most: int) -> list[list[int]]:
    """Places of rows that share a sequence of `most` tokens: the longest rows first, each where the least room is
    left (best fit decreasing, Ding et al. 2024)."""
    found: list[list[int]] = []
    rooms: dict[int, deque[list[int]]] = {}
    sizes: list[int] = []  # the rooms there are, in order
    for place in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[place])
        index = bisect.bisect_left(sizes, length)
        if index == len(sizes):
            room = most
            pack: list[int] = []
            found.append(pack)
        else:
            room = sizes[index]
            pack = rooms[room].popleft()
            if not rooms[room]:
                sizes.pop(index)
        pack.append(place)
        left = room - length
        if left:
            waiting = rooms.setdefault(left, deque())
            if not waiting:
                bisect.insort(sizes, left)
            waiting.append(pack)
    return found


class RowBatches:
    """This rank's micro-batches. `together` of them on every rank share one mean of all their learned tokens; `once`
    they have each sample at most once."""

    def __init__(
        self,
        rows: TokenizedRows,
        args: argparse.Namespace,
        vocabulary: int,
        micro_batch_size: int,
        split: RankSplit,
        together: int,
        masked: bool = False,
        seed: int | None = None,
        once: bool = False,
    ) -> None:
        self.rows, self.split, self.vocabulary = rows, split, vocabulary
        self.name, self.most, self.packed = args.data[0], args.sequence_length, args.packed
        self.micro_batch_size, self.masked, self.once = micro_batch_size, masked, once
        self.seed = args.seed if seed is None else seed
        self.packs = packs(rows.lengths, self.most) if self.packed else None
        self.learned, self.lengths = rows.learned, rows.lengths
        if self.packs is not None:
            self.learned, self.lengths = (
                np.array([figures[pack].sum() for pack in self.packs]) for figures in (rows.learned, rows.lengths)
            )
        self.samples = len(self.lengths)
        whole = math.ceil(self.samples / (split.data * micro_batch_size))
        self.together = min(together, whole) if once else together
        # every piece of an MLP or of the loss must have its part (ulysses_sp.py TiledMLP.backward, 0.19.8)
        self.multiple = split.sequence * math.lcm(args.mlp_chunks, args.loss_tiles)
        # a rank alone takes the memory that the longest rows would
        self.whole = self.packed or bool(args.alone)
        self.orders: dict[int, np.ndarray] = {}
        self.weights: dict[int, float] = {}

    def __call__(self, number: int) -> Batch:
        first = (number * self.split.data + self.split.data_rank) * self.micro_batch_size
        samples = [self.sample(first + index) for index in range(self.micro_batch_size)]
        length = self.most
        if not self.whole:
            longest = max(int(self.lengths[sample]) for sample in samples)
            length = min(self.most, math.ceil(longest / self.multiple) * self.multiple)
        parts = [self.laid_out(sample, length) for sample in samples]
        inputs, targets, positions = (torch.from_numpy(np.stack(part)) for part in zip(*parts))
        for index in range(self.micro_batch_size):
            if self.once and first + index >= self.samples:
                targets[index] = IGNORED
        check_vocabulary(self.name, inputs, self.vocabulary)
        mask = None
        if self.masked and not self.packed:
            mask = torch.arange(length) < torch.tensor([[int(self.lengths[sample])] for sample in samples])
        return Batch(inputs, targets, self.weight(number // self.together), positions if self.packed else None, mask)

    def laid_out(self, sample: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Inputs, targets and positions of a sample: its rows one after the other, then padding, which nothing before
        it attends to."""
        inputs, targets = np.zeros(length, np.int64), np.full(length, IGNORED, np.int64)
        positions, start = np.arange(length), 0
        for place in [sample] if self.packs is None else self.packs[sample]:
            ids, learned = self.rows.tokens(place)
            end = start + len(ids)
            inputs[start:end] = ids
            targets[start : end - 1] = np.where(learned[1:], ids[1:], IGNORED)
            positions[end:] = np.arange(length - end)
            start = end
        return inputs, targets, positions

    def sample(self, number: int) -> int:
        epoch, place = divmod(number, self.samples)
        if epoch not in self.orders:
            order = torch.randperm(self.samples, generator=generator(self.seed, epoch)).numpy()
            self.orders = {**{e: o for e, o in self.orders.items() if e == epoch - 1}, epoch: order}
        return int(self.orders[epoch][place])

    def samples_of(self, step: int) -> list[int]:
        """Those of all ranks."""
        each = self.together * self.split.data * self.micro_batch_size
        last = (step + 1) * each
        if self.once:
            last = min(last, self.samples)
        return [self.sample(number) for number in range(step * each, last)]

    def weight(self, step: int) -> float:
        """By what the sum of a micro-batch's losses is multiplied, so that the average over micro-batches and ranks,
        which DeepSpeed takes, is the mean over all learned tokens of the step."""
        if step not in self.weights:
            learned = sum(int(self.learned[sample]) for sample in self.samples_of(step))
            self.weights = {step: self.together * self.split.data / learned}
        return self.weights[step]

    def tokens(self, step: int) -> int:
        """Those of a step, without padding."""
        return sum(int(self.lengths[sample]) for sample in self.samples_of(step))
