"""What the nodes of an attempt wrote about their ranks: `ranks/<node>.jsonl`, one file per node
(docs/run-directory.md).

A node appends a record when a rank starts and another when it ends; the last record of a rank counts. Runs of earlier
versions have one file per rank, `ranks/<rank>.json`, which was replaced each time; these are read as well.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from . import file_names
from .attempt_files import RankRecord
from .files import appended_records, object_in
from .schema import sound

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from .attempt_files import Status

    Record = dict[str, Any]


FEW_FILES, READERS = 64, 16
BY_LAUNCHER = "RANK"
"""The `source` of an observed rank that its launcher gave its number; that goes before any guess."""


class RankFile(NamedTuple):
    """The records in one file, those of each rank in the order they were written. `lost` is the number of lines that
    could not be read. `unnumbered` are records whose rank is not a whole number."""

    records: tuple[RankRecord, ...] = ()
    lost: int = 0
    unnumbered: tuple[Record, ...] = ()


def rank_files(attempt_folder: Path) -> list[Path]:
    """Return all files of rank records in an attempt, ordered by name."""
    return sorted((attempt_folder / file_names.RANKS).glob("[!.]*.json*"))


def read_rank_file(path: Path) -> RankFile:
    """Return the content of a file of rank records. Raises OSError, and ValueError if a file for one rank is torn."""
    lines, lost = ([object_in(path)], 0) if path.suffix == ".json" else appended_records(path)
    records = [(sound(RankRecord, line), line) for line in lines]
    return RankFile(
        tuple(record for record, _ in records if record is not None),
        lost,
        tuple(line for record, line in records if record is None),
    )


def rank_records(
    attempt_folder: Path, problems: list[str] | None = None, unnumbered: list[str] | None = None
) -> list[RankRecord]:
    """Return the last sound record of each rank, ordered by rank. `problems` gets a sentence for each file that cannot
    be read completely, `unnumbered` one for each record whose rank is not a whole number."""
    records: list[RankRecord] = []
    paths = rank_files(attempt_folder)
    for path, file in zip(paths, _read_at_once(paths)):
        if isinstance(file, FileNotFoundError):
            continue
        if isinstance(file, Exception):
            if problems is not None:
                problems.append(f"{path}: {file}")
            continue
        records += file.records
        if file.lost and problems is not None:
            problems.append(f"{path}: {file.lost} of its lines cannot be read")
        if unnumbered is not None:
            unnumbered += [
                f"a rank record cannot be read: its rank is {str(record.get('rank'))[:60]!r}, no number"
                for record in file.unnumbered
            ]
    return latest_by_rank(records)


def _read_at_once(paths: Sequence[Path]) -> list[RankFile | OSError | ValueError]:
    """Read many files in threads, because each read waits a millisecond for the server of a shared file system."""

    def read(path: Path) -> RankFile | OSError | ValueError:
        try:
            return read_rank_file(path)
        except (OSError, ValueError) as error:
            return error

    if len(paths) < FEW_FILES:
        return [read(path) for path in paths]
    with ThreadPoolExecutor(READERS) as readers:
        return list(readers.map(read, paths))


def node_rank_records(attempt_folder: Path, node: str) -> list[RankRecord]:
    """Return the last sound record of each rank of one node, ordered by rank. Only the file of that node is read."""
    try:
        file = read_rank_file(attempt_folder / file_names.RANKS / f"{node}.jsonl")
    except OSError:
        return []
    return [record for record in latest_by_rank(file.records) if record.get("node") == node]


def latest_by_rank(records: Iterable[RankRecord]) -> list[RankRecord]:
    """Return one record per rank, ordered by rank. Among the records of one node it is the last. Among several nodes it
    is the one whose rank was set by its launcher, or else the one started last."""
    latest: dict[int, RankRecord] = {}
    for record in records:
        known = latest.get(record["rank"])
        if known is None or known.get("node") == record.get("node") or _precedence(record) >= _precedence(known):
            latest[record["rank"]] = record
    return [latest[rank] for rank in sorted(latest)]


def _precedence(record: RankRecord) -> tuple[bool, float]:
    return record.get("source") == BY_LAUNCHER, record.get("started_at") or 0.0


def with_copies(records: Sequence[RankRecord], status: Status) -> list[RankRecord]:
    """Return the rank records, ordered by rank, with the copy in status.json for each record that is missing."""
    ranks = {record["rank"] for record in records}
    copies = (copy for copy in status.get("ranks", []) if copy["rank"] not in ranks)
    return sorted([*records, *copies], key=lambda record: record["rank"])
