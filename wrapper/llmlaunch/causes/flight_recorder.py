"""PyTorch's flight recorder, `attempts/<attempt>/flight/rank_<rank>`: what the collectives of each rank were doing.

Keys and their meaning are those of torch 2.13 (format 2.10), torch/csrc/distributed/c10d/FlightRecorder.hpp and
FlightRecorderDetail.hpp. It writes pickles, and JSON where a program asks for it.

Anybody may have written these files. A pickle refers to one list any number of times, so that a few hundred bytes can
stand for more text than any memory holds; and lists may be nested without end. Text is therefore taken only where a
text is expected, nothing is walked deeper than the form requires, and what is read is counted, not what is stored.
"""

from __future__ import annotations

import functools
import re
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from ..rundir import file_names
from ..rundir.files import parse_json
from ..rundir.plain_pickle import load_plain
from ..rundir.regular_files import read_bytes
from ..rundir.values import byte_count, objects_in

if TYPE_CHECKING:
    from pathlib import Path


MOST_BYTES = 16 * 2**20  # of a file; 2,000 collectives with their stacks have 0.3 MiB
MOST_CHARACTERS = MOST_BYTES  # that are read of a file's values, however often it refers to one of them
MOST_ENTRIES = 20_000  # the newest; PyTorch's ring keeps 2,000 unless TORCH_FR_BUFFER_SIZE says otherwise
MOST_GROUPS = 10_000
MOST_MEMBERS = 1_000_000  # of a group
MOST_OPERATIONS = 2_000_000  # of all files together
READ_SECONDS = 20.0  # for all files; one of 2,000 collectives takes 0.1 s
_LONGEST_NAME = 200  # characters
_LONGEST_SIZES = 80
_FILE = re.compile(r"rank_(\d{1,7})", re.ASCII)
_PEERS = re.compile(r"(send|recv) (\d{1,7})(?:->|<-)(\d{1,7})", re.ASCII)
_RANK = re.compile(r"\d{1,7}", re.ASCII)
_COALESCED = "coalesced"
_FIRST_RECORD = 0


class Operation(NamedTuple):
    """One collective, send or recv of one rank. `group` tells process groups apart, and is the same on all their ranks;
    `number` counts the collectives of a group from 1, and its sends and recvs by themselves. `peer` is the other rank
    of a send or recv. `state` is scheduled (by the program), started (by the device) or completed."""

    group: str
    number: int
    name: str  # all_reduce, send ...
    state: str
    sizes: str
    peer: int | None = None

    @property
    def is_between_two(self) -> bool:
        return self.peer is not None


class Dump(NamedTuple):
    """What one rank remembers, oldest first. `members` are the ranks of each group, where PyTorch noted them, `labels`
    what programs call the groups. `is_whole`: it remembers all since it started."""

    rank: int
    operations: list[Operation]
    members: dict[str, tuple[int, ...]]
    labels: dict[str, str]
    is_whole: bool


class _Group(NamedTuple):
    """`key` tells the group apart from others of its name, `ranks` are its global ranks in ascending order."""

    key: str
    ranks: tuple[int, ...] = ()


class _Reading:
    """The texts of one file, and how many characters of them may still be read."""

    def __init__(self) -> None:
        self._left = MOST_CHARACTERS

    def text(self, value: object, longest: int = _LONGEST_NAME) -> str:
        """Return a text, of a longer one its beginning; empty for any other value. Raises ValueError beyond
        MOST_CHARACTERS."""
        text = value[:longest] if isinstance(value, str) else ""
        self._left -= len(text)
        if self._left < 0:
            raise ValueError(f"not read: its entries refer to more than {MOST_CHARACTERS:,} characters")
        return text


def read_dumps(folder: Path, problems: list[str]) -> tuple[dict[int, Dump], list[int]]:
    """Return the dumps of an attempt's folder by rank, and the ranks whose file was not looked into for want of time
    or of memory. `problems` gets a sentence for each that cannot be read."""
    dumps: dict[int, Dump] = {}
    unread: list[int] = []
    until = time.monotonic() + READ_SECONDS
    operations = 0
    for rank, path in sorted(_files(folder)):
        if time.monotonic() > until or operations > MOST_OPERATIONS:
            unread.append(rank)
            continue
        try:
            dumps[rank] = dump_of(read_bytes(path, MOST_BYTES), rank)
            operations += len(dumps[rank].operations)
        except (OSError, ValueError, RecursionError, MemoryError) as error:
            problems.append(f"{file_names.FLIGHT}/{path.name}: {str(error) or type(error).__name__}")
            unread.append(rank)
    return dumps, unread


def _files(folder: Path) -> list[tuple[int, Path]]:
    try:
        matches = [(_FILE.fullmatch(path.name), path) for path in folder.iterdir()]
    except OSError:
        return []
    return [(int(match[1]), path) for match, path in matches if match is not None]


def dump_of(content: bytes, rank: int) -> Dump:
    """Return what the file of a rank holds: of more than MOST_ENTRIES the newest, as PyTorch's own ring does.

    Raises ValueError where it is no dump of the flight recorder, or is larger than anything that is read.
    """
    record = parse_json(content) if content[:1] == b"{" else load_plain(content)
    if not isinstance(record, dict) or not isinstance(record.get("entries"), list):
        raise ValueError("is no dump of PyTorch's flight recorder")
    reading = _Reading()
    entries = objects_in(record["entries"][-MOST_ENTRIES:])
    groups = _groups(record.get("pg_config"), reading)
    operations, labels = _operations(entries, groups, reading)
    first = byte_count(entries[0].get("record_id")) if entries else _FIRST_RECORD
    return Dump(
        rank,
        operations,
        members={group.key: group.ranks for group in groups.values() if group.ranks},
        labels=labels,
        is_whole=first == _FIRST_RECORD and len(record["entries"]) <= MOST_ENTRIES,
    )


def _groups(config: object, reading: _Reading) -> dict[str, _Group]:
    """Map each group's name to what tells it apart and its ranks. Groups made by `split_group` share one name, so that
    the ranks belong to it. gloo notes no ranks."""
    groups: dict[str, _Group] = {}
    items = config.items() if isinstance(config, dict) else ()
    if len(items) > MOST_GROUPS:
        raise ValueError(f"not read: it has more than {MOST_GROUPS:,} process groups")
    for key, group in items:
        name = reading.text(str(key) if isinstance(key, int) else key)
        listed = reading.text(group.get("ranks"), MOST_CHARACTERS) if isinstance(group, dict) else ""
        numbers = _ranks_in(listed)
        # interned: the dumps of all ranks compare it again and again, and of 16,000 ranks it has 100,000 characters
        groups[name] = _Group(sys.intern(f"{name} {numbers}" if numbers else name), numbers)
    return groups


@functools.lru_cache(maxsize=64)
def _ranks_in(text: str) -> tuple[int, ...]:
    """Return the ranks of a group, ascending. Thousands of dumps name the same large groups, and share what is read."""
    numbers = _RANK.findall(text)
    if len(numbers) > MOST_MEMBERS:
        raise ValueError(f"not read: a process group has more than {MOST_MEMBERS:,} ranks")
    return tuple(sorted(map(int, numbers)))


def _names(entry: dict[str, Any], reading: _Reading) -> tuple[str, str]:
    """Return the group's name and the description that the program gave it."""
    names = entry.get("process_group")
    if not isinstance(names, (list, tuple)) or len(names) < 2:
        return "", ""
    return reading.text(names[0]), reading.text(names[1])


def _operations(
    entries: list[dict[str, Any]], groups: dict[str, _Group], reading: _Reading
) -> tuple[list[Operation], dict[str, str]]:
    """Return the operations, oldest first, and what programs call their groups.

    They are read from the last on: an operation of a batch has no state of its own, it is that of the `coalesced` entry
    after it, which has the same number.
    """
    operations: list[Operation] = []
    labels: dict[str, str] = {}
    batches: dict[tuple[str, bool, int], str] = {}
    for entry in reversed(entries):
        group_name, description = _names(entry, reading)
        group = groups.get(group_name) or _Group(group_name)
        labels.setdefault(group.key, description if description and description != "undefined" else group_name)
        backend, _, name = reading.text(entry.get("profiling_name")).partition(":")
        is_p2p = entry.get("is_p2p") is True
        number = byte_count(entry.get("p2p_seq_id" if is_p2p else "collective_seq_id"))
        if number is None or not name:
            continue
        state = reading.text(entry.get("state"))
        if backend == "gloo" and entry.get("retired") is True:
            state = "completed"  # it has no events of a device; what it has waited for is retired
        if name == _COALESCED:
            batches[group.key, is_p2p, number] = state
        state = batches.get((group.key, is_p2p, number), state)
        peers = _PEERS.fullmatch(name)
        if is_p2p and peers is None:
            continue  # the end of a batch
        peer = None if peers is None else _global_rank(int(peers[3]), group.ranks)
        name = name if peers is None else peers[1]
        sizes = reading.text(_sizes(entry.get("input_sizes")), _LONGEST_SIZES)
        operations.append(Operation(group.key, number, name, state, sizes, peer))
    operations.reverse()
    return operations, labels


def _global_rank(rank: int, ranks: tuple[int, ...]) -> int:
    return ranks[rank] if rank < len(ranks) else rank


def _sizes(shapes: object) -> str:
    """Return `[[4096, 8], [16]]` for the shapes of an operation's tensors; of many only the first, and nothing for what
    is no list of lists of whole numbers."""
    words: list[str] = []
    shown = 0
    for shape in shapes if isinstance(shapes, list) else ():
        if not isinstance(shape, (list, tuple)):
            return ""
        numbers = [byte_count(number) for number in shape[:_LONGEST_SIZES]]
        if None in numbers:
            return ""
        words.append(str(numbers))
        shown += len(words[-1])
        if shown > _LONGEST_SIZES:
            break
    return f"[{', '.join(words)}]" if isinstance(shapes, list) else ""
