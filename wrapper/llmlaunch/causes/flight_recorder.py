"""PyTorch's flight recorder, `attempts/<attempt>/flight/rank_<rank>`: what the collectives of each rank were doing.

Keys and their meaning are those of torch 2.13 (format 2.10), torch/csrc/distributed/c10d/FlightRecorder.hpp and
FlightRecorderDetail.hpp. It writes pickles, and JSON where a program asks for it.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from ..rundir import file_names
from ..rundir.files import parse_json, read_bytes
from ..rundir.plain_pickle import load_plain
from ..rundir.values import objects_in, whole_number

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Dump", "Operation", "dump_of", "read_dumps"]

MOST_BYTES = 16 * 2**20  # of a file; 2,000 collectives with their stacks have 0.3 MiB
READ_SECONDS = 30.0  # for all files; one of 2,000 collectives takes 0.1 s
_FILE = re.compile(r"rank_(\d{1,7})")
_PEERS = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")
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


def read_dumps(folder: Path, problems: list[str]) -> tuple[dict[int, Dump], list[int]]:
    """Return the dumps of an attempt's folder by rank, and the ranks whose file was not looked into for want of time.
    `problems` gets a sentence for each that cannot be read."""
    dumps: dict[int, Dump] = {}
    unread: list[int] = []
    until = time.monotonic() + READ_SECONDS
    for rank, path in sorted(_files(folder)):
        if time.monotonic() > until:
            unread.append(rank)
            continue
        try:
            dumps[rank] = dump_of(read_bytes(path, MOST_BYTES), rank)
        except (OSError, ValueError) as error:
            problems.append(f"{file_names.FLIGHT}/{path.name}: {error}")
    return dumps, unread


def _files(folder: Path) -> list[tuple[int, Path]]:
    try:
        matches = [(_FILE.fullmatch(path.name), path) for path in folder.iterdir()]
    except OSError:
        return []
    return [(int(match[1]), path) for match, path in matches if match is not None]


def dump_of(content: bytes, rank: int) -> Dump:
    """Return what the file of a rank holds. Raises ValueError where it is no dump of the flight recorder."""
    record = parse_json(content) if content[:1] == b"{" else load_plain(content)
    if not isinstance(record, dict) or not isinstance(record.get("entries"), list):
        raise ValueError("is no dump of PyTorch's flight recorder")
    entries = objects_in(record["entries"])
    groups = _groups(record.get("pg_config"))
    operations = _operations(entries, groups)
    first = whole_number(entries[0].get("record_id")) if entries else _FIRST_RECORD
    return Dump(
        rank,
        operations,
        members={key: ranks for key, ranks in groups.values() if ranks},
        labels={_group_key(entry, groups): _label(entry) for entry in entries},
        is_whole=first == _FIRST_RECORD,
    )


def _groups(config: object) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Map each group's name to what tells it apart and its ranks. Groups made by `split_group` share one name, so that
    the ranks belong to it. gloo notes no ranks."""
    groups = {}
    for name, group in config.items() if isinstance(config, dict) else ():
        ranks = str(group.get("ranks")) if isinstance(group, dict) else ""
        numbers = tuple(int(digits) for digits in re.findall(r"\d{1,7}", ranks))
        groups[str(name)] = (f"{name} {numbers}" if numbers else str(name), numbers)
    return groups


def _names(entry: dict[str, Any]) -> tuple[str, str]:
    """Return the group's name and the description that the program gave it."""
    names = entry.get("process_group")
    pair = [str(name) for name in names[:2]] if isinstance(names, (list, tuple)) else []
    return (pair[0], pair[1]) if len(pair) == 2 else ("", "")


def _label(entry: dict[str, Any]) -> str:
    name, description = _names(entry)
    return description if description and description != "undefined" else name


def _group_key(entry: dict[str, Any], groups: dict[str, tuple[str, tuple[int, ...]]]) -> str:
    name = _names(entry)[0]
    return groups.get(name, (name, ()))[0]


def _operations(entries: list[dict[str, Any]], groups: dict[str, tuple[str, tuple[int, ...]]]) -> list[Operation]:
    """Read them from the last on: an operation of a batch has no state of its own, it is that of the `coalesced` entry
    after it, which has the same number."""
    operations: list[Operation] = []
    batches: dict[tuple[str, bool, int], str] = {}
    for entry in reversed(entries):
        backend, _, name = str(entry.get("profiling_name")).partition(":")
        group, is_p2p = _group_key(entry, groups), bool(entry.get("is_p2p"))
        number = whole_number(entry.get("p2p_seq_id" if is_p2p else "collective_seq_id"))
        if number is None or not name:
            continue
        state = str(entry.get("state"))
        if backend == "gloo" and entry.get("retired") is True:
            state = "completed"  # it has no events of a device; what it has waited for is retired
        if name == _COALESCED:
            batches[group, is_p2p, number] = state
        state = batches.get((group, is_p2p, number), state)
        peers = _PEERS.fullmatch(name)
        if is_p2p and peers is None:
            continue  # the end of a batch
        ranks = groups.get(_names(entry)[0], ("", ()))[1]
        peer = None if peers is None else _global_rank(int(peers[3]), ranks)
        name = name if peers is None else peers[1]
        operations.append(Operation(group, number, name, state, _sizes(entry), peer))
    operations.reverse()
    return operations


def _global_rank(rank: int, ranks: tuple[int, ...]) -> int:
    return sorted(ranks)[rank] if rank < len(ranks) else rank


def _sizes(entry: dict[str, Any]) -> str:
    sizes = entry.get("input_sizes")
    return str(sizes)[:80] if isinstance(sizes, list) else ""
