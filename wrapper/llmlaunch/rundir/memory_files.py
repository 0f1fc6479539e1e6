"""All files that say what an attempt used: rank records, the probes' files and the monitors', read for one account.

`collect` reads them once and whole. Who watches a run reads them again and again, what is new alone; the account is
made by the same functions, so both show the same peak.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from . import file_names
from .attempt import Attempt
from .files import MOST_APPENDED_BYTES, LogTail, bounded_lines
from .monitor_samples import add_lines
from .peak_account import MemoryEvidence, node_summary, rank_summaries
from .probe_files import largest_peaks, read_probe_file
from .rank_records import RankFile, latest_by_rank, read_rank_file, with_copies
from .regular_files import open_regular
from .summary import RECORDS, AttemptSummary, counted_files, file_states, whole_summary

if TYPE_CHECKING:
    from pathlib import Path

    from .attempt_files import RankRecord
    from .probe_files import ProbeFile
    from .summary import RankSummary


WHOLE_BYTES = 2**20  # of a monitor's file, some hours of eight GPUs: up to there every line is read
WATCHED_BYTES = 2**18  # of a monitor's file that is met while it grows: its lines are cumulative, the last are enough
LONGEST_LINE = 4 * 2**20


def attempt_summary(run_directory: Path, attempt: str) -> AttemptSummary:
    """Return the summary that the job wrote, where it is still whole, else a new one."""
    return whole_summary(run_directory, attempt) or summarize(run_directory, attempt)


def summarize(run_directory: Path, name: str) -> AttemptSummary:
    """Return the account of an attempt. Never raises for what the files hold; those that cannot be read are in
    `damaged`."""
    # Sizes first: what is written while we read is then known to be new.
    sizes = dict(counted_files(run_directory, name))
    attempt = Attempt(run_directory, name)
    damaged: dict[str, int] = {}
    evidence = MemoryEvidence(run=attempt.run)
    evidence.ranks = with_copies(_rank_records(attempt, damaged), attempt.status)
    evidence.probes = largest_peaks(_probe_files(attempt, damaged))
    for file in sorted(file_states(run_directory / file_names.PEAKS, ".jsonl")):
        _read_monitor(evidence, run_directory / file_names.PEAKS / file, name, damaged)
    progress = attempt.progress
    step = progress.get("step")
    return AttemptSummary(
        attempt=name,
        ranks=tuple(rank_summaries(evidence)),
        nodes=tuple(node_summary(node) for _, node in sorted(evidence.nodes.items())),
        step=step,
        steps_run=None if step is None else max(step - attempt.from_step, 0),
        step_seconds=progress.get("step_seconds"),
        tokens_per_second=progress.get("tokens_per_second"),
        files=sizes,
        damaged=damaged,
    )


def _rank_records(attempt: Attempt, damaged: dict[str, int]) -> list[RankRecord]:
    records: list[RankRecord] = []
    for name in sorted(file_states(attempt.folder / file_names.RANKS, RECORDS)):
        file = _rank_file(attempt.folder / file_names.RANKS / name)
        records += file.records
        _count(damaged, f"{file_names.ATTEMPTS}/{attempt.name}/{file_names.RANKS}/{name}", file.lost)
    return latest_by_rank(records)


def _rank_file(path: Path) -> RankFile:
    """The records of a file; of one that cannot be read, or belongs to no rank, one is lost."""
    try:
        file = read_rank_file(path)
    except (OSError, ValueError):
        return RankFile(lost=1)
    return file._replace(lost=file.lost + len(file.unnumbered))


def _probe_files(attempt: Attempt, damaged: dict[str, int]) -> list[ProbeFile]:
    folder = f"{file_names.ATTEMPTS}/{attempt.name}/{file_names.PROBES}"
    files = []
    for name in sorted(file_states(attempt.run_directory / folder, RECORDS)):
        file = read_probe_file(attempt.run_directory / folder / name)
        if file is not None:
            files.append(file)
            _count(damaged, f"{folder}/{name}", file.damaged)
    return files


def _read_monitor(evidence: MemoryEvidence, path: Path, attempt: str, damaged: dict[str, int]) -> None:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MOST_APPENDED_BYTES:
                raise OSError("larger than any monitor's file")
            lost = add_lines(evidence.nodes, bounded_lines(file), attempt, path.stem, thin=size > WHOLE_BYTES)
    except OSError:
        lost = 1
    _count(damaged, f"{file_names.PEAKS}/{path.name}", lost)


def _count(damaged: dict[str, int], name: str, lost: int) -> None:
    if lost:
        damaged[name] = lost


class MemoryWatch:
    """The account of an attempt that goes on. Each `refresh` reads what was written since the one before: the new lines
    of monitors (of a file met for the first time the last 256 KiB), and the small files that were replaced."""

    def __init__(self, run_directory: Path, attempt: str) -> None:
        self.attempt = Attempt(run_directory, attempt)
        self.evidence = MemoryEvidence()
        self._tails: dict[str, LogTail] = {}
        self._ranks: dict[str, tuple[tuple[int, int, int], RankFile]] = {}
        self._probes: dict[str, tuple[tuple[int, int, int], ProbeFile | None]] = {}

    @property
    def files(self) -> int:
        return len(self._tails)

    def refresh(self) -> list[RankSummary]:
        run_directory, name = self.attempt.run_directory, self.attempt.name
        if not self.attempt.began:  # the job is about to write down which layout it runs
            self.attempt = Attempt(run_directory, name)
        for file in sorted(file_states(run_directory / file_names.PEAKS, ".jsonl")):
            path = run_directory / file_names.PEAKS / file
            if file not in self._tails:
                self._tails[file] = LogTail(path, WATCHED_BYTES, LONGEST_LINE, skips=True)
            add_lines(self.evidence.nodes, self._tails[file].lines(), name, path.stem)
        files = self._small_files(self._ranks, file_names.RANKS, _rank_file)
        self.evidence.run = self.attempt.run
        self.evidence.ranks = latest_by_rank(record for file in files for record in file.records)
        self.evidence.probes = largest_peaks(self._small_files(self._probes, file_names.PROBES, read_probe_file))
        return rank_summaries(self.evidence)

    def _small_files(self, cache: dict[str, tuple[tuple[int, int, int], Any]], folder: str, read: Any) -> list[Any]:
        """Return what `read` makes of each file of a folder of the attempt; a file is opened when it has changed."""
        states = file_states(self.attempt.folder / folder, RECORDS)
        for name, state in sorted(states.items()):
            signature = (state.st_ino, state.st_size, state.st_mtime_ns)
            if name not in cache or cache[name][0] != signature:
                cache[name] = (signature, read(self.attempt.folder / folder / name))
        return [content for name, (_, content) in sorted(cache.items()) if content is not None and name in states]
