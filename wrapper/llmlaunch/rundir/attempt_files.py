"""All that a run directory holds of what one attempt used, read once (docs/run-directory.md).

Jobs end in crashes and on full disks: what cannot be read is counted by file and left out, and the rest still counts.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .files import MOST_APPENDED_BYTES, bounded_lines, open_regular, read_object
from .identifiers import is_fallback
from .monitor_samples import take_lines
from .probe_files import FOLDER as PROBES
from .probe_files import ProbeReport, read_probe_files
from .rank_records import sound_rank

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from .monitor_samples import NodePeaks

    Record = Mapping[str, Any]

__all__ = ["AttemptFiles", "counted_files", "read_attempt"]

WHOLE_BYTES = 2**20  # of a monitor's file, some hours of eight GPUs: up to there every line is read


@dataclass
class AttemptFiles:
    """`described` is the run.json of the layout that the attempt ran, empty where that cannot be read. `sizes` are
    those of the files read, `damaged` the numbers of their lines that could not be, both by path in the run directory;
    of files replaced whole, one damaged file is one line."""

    described: Record = field(default_factory=dict)
    began: Record = field(default_factory=dict)
    progress: Record = field(default_factory=dict)
    ranks: list[Record] = field(default_factory=list)
    probes: ProbeReport = field(default_factory=ProbeReport)
    nodes: dict[str, NodePeaks] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    damaged: dict[str, int] = field(default_factory=dict)


def read_attempt(run_directory: Path, attempt: str, spools: Sequence[Path] = ()) -> AttemptFiles:
    """`spools` are folders laid out as the run directory is, with what a node could not write there."""
    own = run_directory / "attempts" / attempt
    # Sizes first: what is written while we read is then known to be new.
    files = AttemptFiles(sizes=dict(counted_files(run_directory, attempt)))
    files.began = read_object(own / "attempt.json") or {}
    files.progress = read_object(own / "progress.json") or {}
    files.described = _described(run_directory, files.began)
    _read_ranks(files, run_directory, attempt)
    _read_probes(files, run_directory, attempt, spools)
    for place in (run_directory, *spools):
        for name in _names(place / "peaks", ".jsonl"):
            _read_monitor(files, place, "peaks/" + name, attempt)
    return files


def counted_files(run_directory: Path, attempt: str) -> Iterator[tuple[str, int]]:
    """Path in the run directory and size of every file that says what an attempt used and may still change."""
    own = "attempts/" + attempt
    with contextlib.suppress(OSError):  # no step was ever seen
        yield own + "/progress.json", (run_directory / own / "progress.json").stat().st_size
    for folder, suffix in ((own + "/ranks", ".json"), (own + "/" + PROBES, ".json"), ("peaks", ".jsonl")):
        for name, size in sorted(_sizes(run_directory / folder, suffix)):
            yield folder + "/" + name, size


def _sizes(folder: Path, suffix: str) -> Iterator[tuple[str, int]]:
    """One listing and one question for each file: run directories lie on network file systems."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(suffix) and not entry.name.startswith("."):
                    yield entry.name, entry.stat().st_size
    except OSError:
        return


def _names(folder: Path, suffix: str) -> list[str]:
    return sorted(name for name, _ in _sizes(folder, suffix))


def _read_ranks(files: AttemptFiles, run_directory: Path, attempt: str) -> None:
    """Each rank's own record; of one that is torn or gone, the copy in status.json."""
    found = {}
    for name in _names(run_directory / "attempts" / attempt / "ranks", ".json"):
        path = f"attempts/{attempt}/ranks/{name}"
        record = read_object(run_directory / path)
        if record is None or not _is_rank(record):
            files.damaged[path] = 1
        else:
            found[record["rank"]] = sound_rank(record)
    verdict = read_object(run_directory / "attempts" / attempt / "status.json")
    status = verdict or read_object(run_directory / "status.json") or {}
    copies = status.get("ranks") if status.get("attempt") == attempt else None
    for copy in copies if isinstance(copies, list) else ():
        if isinstance(copy, dict) and _is_rank(copy):
            found.setdefault(copy["rank"], sound_rank(copy))
    files.ranks = [found[rank] for rank in sorted(found)]


def _is_rank(record: Record) -> bool:
    return type(record.get("rank")) is int and record["rank"] >= 0


def _read_probes(files: AttemptFiles, run_directory: Path, attempt: str, spools: Sequence[Path]) -> None:
    folder = f"attempts/{attempt}/{PROBES}"
    paths = {}
    for place in (run_directory, *spools):
        paths.update({place / folder / name: folder + "/" + name for name in _names(place / folder, ".json")})
    files.probes = read_probe_files(paths)
    for path in files.probes.damaged:
        files.damaged[paths[path]] = 1


def _read_monitor(files: AttemptFiles, place: Path, name: str, attempt: str) -> None:
    path = place / name
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MOST_APPENDED_BYTES:
                raise OSError("larger than any monitor's file")
            damaged = take_lines(files.nodes, bounded_lines(file), attempt, path.stem, thin=size > WHOLE_BYTES)
    except OSError:
        damaged = 1
    if damaged:
        files.damaged[name] = files.damaged.get(name, 0) + damaged


def _described(run_directory: Path, began: Record) -> Record:
    layout = began.get("layout")
    folder = run_directory / str(layout) if is_fallback(layout) else run_directory
    return read_object(folder / "run.json") or {}
