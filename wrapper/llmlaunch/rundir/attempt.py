"""One attempt of a run, read from the small files in its folder (docs/run-directory.md).

Jobs end in crashes and on full disks, and anyone may have written these files. A file that is missing, torn or of the
wrong kind counts as absent; the others still count.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from . import file_names
from .attempt_files import AttemptStart, NextStep, Progress, Status
from .files import read_object, read_text
from .rank_records import rank_records, with_copies
from .run_file import RunFile, read_run_file
from .schema import read_as, sound
from .summary import whole_summary
from .values import is_fallback, is_for_fewer_nodes

if TYPE_CHECKING:
    from pathlib import Path

    from .attempt_files import RankRecord
    from .summary import AttemptSummary

    Record = dict[str, Any]

T = TypeVar("T")
__all__ = ["STAYS", "Attempt", "rank_records", "read_or_note", "with_copies"]

STAYS = ("fallback", "again", "rollback", "restart")
"""What a verdict says comes next where that is in the same allocation."""

_SIGNAL_BYTES = 4096
_MOST_SKIPPED = 100_000


class Attempt:
    """One attempt. Each file is read on first use and then kept. `problems` names the files that exist but cannot be
    read."""

    def __init__(self, run_directory: Path, name: str) -> None:
        self.run_directory = run_directory
        self.name = name
        self.folder = file_names.attempt_folder(run_directory, name)
        self.problems: list[str] = []
        self.unnumbered: list[str] = []  # rank records without a rank

    @cached_property
    def began(self) -> AttemptStart:
        """attempt.json; empty if it is absent."""
        return self._read(AttemptStart, file_names.ATTEMPT) or AttemptStart()

    @cached_property
    def progress(self) -> Progress:
        """progress.json; empty before the first step."""
        return self._read(Progress, file_names.PROGRESS) or Progress()

    @cached_property
    def verdict(self) -> Status | None:
        """The attempt's own status.json."""
        return self._read(Status, file_names.STATUS)

    @cached_property
    def status(self) -> Status:
        """The verdict, or else the run's status.json if it describes this attempt; empty if there is neither."""
        if self.verdict:
            return self.verdict
        newest = sound(Status, read_object(self.run_directory / file_names.STATUS)) or Status()
        return newest if newest.get("attempt") == self.name else Status()

    @cached_property
    def layout(self) -> str:
        """The folder of the layout that the attempt runs: a fallback layout or one for fewer nodes. It is empty for the
        planned layout, and also if the file names no known layout."""
        known = is_fallback(self.layout_named) or is_for_fewer_nodes(self.layout_named)
        return self.layout_named if known else ""

    @property
    def layout_named(self) -> str:
        """The layout's name in attempt.json, whatever it is."""
        return self.began.get("layout", "")

    @cached_property
    def run(self) -> RunFile:
        """The run.json of the attempt's layout; empty if it cannot be read."""
        return read_run_file(self.run_directory, self.layout)

    @property
    def nodes(self) -> list[str]:
        """The nodes in attempt.json, in the order of their node ranks."""
        return self.began.get("nodes", [])

    @property
    def from_step(self) -> int:
        """The step of the checkpoint from which the attempt started; 0 without a checkpoint."""
        return self.began.get("from_step") or 0

    @property
    def is_fallback(self) -> bool:
        """Whether it continued in the allocation of the attempt before it without counting as a restart, such as after
        running out of memory."""
        return self.began.get("fallback", False)

    @property
    def follow_up(self) -> str:
        """What comes next according to the verdict, such as `end`, `again` or `fallback`; empty without a verdict."""
        following = (self.verdict or Status()).get("next") or NextStep()
        return following.get("action", "")

    @property
    def was_retried(self) -> bool:
        """Whether the attempt never began, for lack of a port or a container, and was started again at once."""
        return self.follow_up == "again"

    @property
    def was_rolled_back(self) -> bool:
        """Whether the loss went bad and the next attempt went back to a checkpoint from before that."""
        return self.follow_up == "rollback"

    @property
    def stays(self) -> bool:
        """Whether the next attempt follows in the same allocation, according to the verdict."""
        return self.follow_up in STAYS

    @property
    def skips(self) -> tuple[tuple[int, int], ...]:
        """The ranges of steps whose batches the attempt skips after a rollback, as first and last step."""
        pairs = [(pair[0], pair[1]) for pair in self.began.get("skips", []) if len(pair) == 2]
        return tuple((first, last) for first, last in pairs if 0 <= last - first < _MOST_SKIPPED)

    @property
    def was_rollback(self) -> bool:
        """Whether the attempt started from an older checkpoint than the last, because the loss had gone bad."""
        return self.began.get("rollback") is not None

    @cached_property
    def summary(self) -> AttemptSummary | None:
        """The summary that the job wrote of the attempt, or None if it wrote none or if more is known by now."""
        return whole_summary(self.run_directory, self.name)

    @cached_property
    def ranks(self) -> list[RankRecord]:
        """The rank records, ordered by rank. A record that is torn or missing is replaced by its copy in status.json.

        If the verdict repeats every record that the summary counted, thousands of small files need not be opened.
        """
        copies = with_copies([], self.verdict or Status())
        if self.summary is not None and self.summary.ranks_of_files <= {str(copy["rank"]) for copy in copies}:
            return copies
        return with_copies(rank_records(self.folder, self.problems, self.unnumbered), self.status)

    @property
    def done(self) -> list[str]:
        return sorted(path.name for path in (self.folder / file_names.DONE).glob("[!.]*"))

    @property
    def cause_files(self) -> list[Path]:
        """The files in which nodes wrote what ended their trainers. A hidden file there was written before the
        training."""
        return sorted((self.folder / file_names.CAUSES).glob("[!.]*.json"))

    @property
    def stop_signal(self) -> str:
        """The signal that asked the attempt to save and stop; empty if there was none. The previous version wrote a
        file for each node."""
        earlier = sorted((self.folder / file_names.EARLIER_STOP_SIGNALS).glob("*"))
        return self.began.get("stop_signal") or next(filter(None, map(_first_text, earlier)), "")

    @property
    def has_failed_node(self) -> bool:
        """Whether a node has reported what ended its trainers. Signals that the other nodes get afterwards come from
        srun, which ends the step."""
        return self.status.get("state") == "failed" or any(self.cause_files)

    @cached_property
    def started_at(self) -> float | None:
        """The time at which the first rank started, in unix seconds; None before that."""
        times = (rank.get("started_at") for rank in self.ranks)
        return min((time for time in times if time is not None), default=None)

    def forget_verdict(self) -> None:
        """Forget the verdict, for an attempt that is judged again."""
        self.__dict__.update(verdict=None, status=Status())

    def _read(self, kind: type[T], name: str) -> T | None:
        return read_or_note(kind, self.folder / name, self.problems)


def read_or_note(kind: type[T], path: Path, problems: list[str] | None) -> T | None:
    """Return the object of `kind` in `path`, or None if there is none. If the file exists but cannot be read,
    `problems` gets a sentence about it."""
    try:
        return read_as(kind, path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        if problems is not None:
            problems.append(f"{path}: {error}")
        return None


def _first_text(path: Path) -> str:
    try:
        return read_text(path, _SIGNAL_BYTES).strip()[:80]
    except OSError:
        return ""
