"""One attempt of a run, as the small files of its folder tell (docs/run-directory.md).

Jobs end in crashes and on full disks, and anybody may have written these files: what is missing, torn or of the wrong
kind counts as absent, and the rest still counts.
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
    """Each file is read when it is first asked for, and then kept; `problems` names those that are there and cannot be
    read."""

    def __init__(self, run_directory: Path, name: str) -> None:
        self.run_directory = run_directory
        self.name = name
        self.folder = file_names.attempt_folder(run_directory, name)
        self.problems: list[str] = []
        self.unnumbered: list[str] = []  # rank records without a number

    @cached_property
    def began(self) -> AttemptStart:
        """attempt.json; empty where it is absent."""
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
        """The verdict, else the run's status.json where that is of this attempt; empty where there is none."""
        if self.verdict:
            return self.verdict
        newest = sound(Status, read_object(self.run_directory / file_names.STATUS)) or Status()
        return newest if newest.get("attempt") == self.name else Status()

    @cached_property
    def layout(self) -> str:
        """The folder of the layout that it runs, a fallback or one for fewer nodes; "" is the planned one, also where
        the file names none of them."""
        known = is_fallback(self.layout_named) or is_for_fewer_nodes(self.layout_named)
        return self.layout_named if known else ""

    @property
    def layout_named(self) -> str:
        """What attempt.json calls the layout, whatever that is."""
        return self.began.get("layout", "")

    @cached_property
    def run(self) -> RunFile:
        """The run.json of that layout; empty where it cannot be read."""
        return read_run_file(self.run_directory, self.layout)

    @property
    def nodes(self) -> list[str]:
        """The nodes of attempt.json, in the order of node ranks."""
        return self.began.get("nodes", [])

    @property
    def from_step(self) -> int:
        """The step of the checkpoint that it began with; 0 without one."""
        return self.began.get("from_step") or 0

    @property
    def is_fallback(self) -> bool:
        """Whether it was started in the allocation of the attempt before, which ran out of memory."""
        return self.began.get("fallback", False)

    @property
    def follow_up(self) -> str:
        """What its verdict says comes next: `end`, `again`, `fallback` ...; empty where it has none."""
        following = (self.verdict or Status()).get("next") or NextStep()
        return following.get("action", "")

    @property
    def was_retried(self) -> bool:
        """Whether it never began, for want of a port or a container, and was started again at once."""
        return self.follow_up == "again"

    @property
    def was_rolled_back(self) -> bool:
        """Whether its loss went bad, and the next attempt went back to a checkpoint from before that."""
        return self.follow_up == "rollback"

    @property
    def stays(self) -> bool:
        """Whether its verdict has the next attempt follow in the same allocation."""
        return self.follow_up in STAYS

    @property
    def skips(self) -> tuple[tuple[int, int], ...]:
        """The ranges of steps whose batches it leaves out after a rollback, first and last included."""
        pairs = [(pair[0], pair[1]) for pair in self.began.get("skips", []) if len(pair) == 2]
        return tuple((first, last) for first, last in pairs if 0 <= last - first < _MOST_SKIPPED)

    @property
    def was_rollback(self) -> bool:
        """Whether it began with an older checkpoint than the last, since the loss had gone bad."""
        return self.began.get("rollback") is not None

    @cached_property
    def summary(self) -> AttemptSummary | None:
        """The account that the job wrote of the attempt; None where it did not, or where there is more to know."""
        return whole_summary(self.run_directory, self.name)

    @cached_property
    def ranks(self) -> list[RankRecord]:
        """The rank records, by rank; for each that is torn or gone its copy in status.json.

        Where the verdict repeats every record that the summary counted, thousands of small files stay closed.
        """
        copies = with_copies([], self.verdict or Status())
        if self.summary is not None and self.summary.ranks_of_files <= {str(copy["rank"]) for copy in copies}:
            return copies
        return with_copies(rank_records(self.folder, self.problems, self.unnumbered), self.status)

    @property
    def done(self) -> list[str]:
        """The nodes whose trainers all ended with 0."""
        return sorted(path.name for path in (self.folder / file_names.DONE).glob("[!.]*"))

    @property
    def cause_files(self) -> list[Path]:
        """What nodes wrote of their trainers' end. A hidden file there was written before the training."""
        return sorted((self.folder / file_names.CAUSES).glob("[!.]*.json"))

    @property
    def stop_signal(self) -> str:
        """The signal that told it to save and stop; empty without one. The version before had a file for each node."""
        earlier = sorted((self.folder / file_names.EARLIER_STOP_SIGNALS).glob("*"))
        return self.began.get("stop_signal") or next(filter(None, map(_first_text, earlier)), "")

    @property
    def has_failed_node(self) -> bool:
        """Whether a node has said what ended its trainers: what the others are told from then on is srun ending the
        step."""
        return self.status.get("state") == "failed" or any(self.cause_files)

    @cached_property
    def started_at(self) -> float | None:
        """When its first rank was started, in unix seconds; None before."""
        times = (rank.get("started_at") for rank in self.ranks)
        return min((time for time in times if time is not None), default=None)

    def forget_verdict(self) -> None:
        """For an attempt that is judged once more: what was said of it before does not count."""
        self.__dict__.update(verdict=None, status=Status())

    def _read(self, kind: type[T], name: str) -> T | None:
        return read_or_note(kind, self.folder / name, self.problems)


def read_or_note(kind: type[T], path: Path, problems: list[str] | None) -> T | None:
    """Return the object of `kind` in `path`, None where there is none. `problems` gets a sentence for one that cannot
    be read."""
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
