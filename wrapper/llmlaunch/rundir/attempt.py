"""One attempt of a run, as the small files of its folder tell (docs/run-directory.md).

Jobs end in crashes and on full disks, and anybody may have written these files: what is missing, torn or of the wrong
kind counts as absent, and the rest still counts.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from . import file_names
from .files import object_in, read_object, read_text
from .rank_records import is_rank_record, rank_records, sound_rank, with_copies
from .summary import whole_summary
from .values import byte_count, is_fallback, is_for_fewer_nodes, is_host, objects_in, text_or_none, time_or_none

if TYPE_CHECKING:
    from pathlib import Path

    from .summary import AttemptSummary

    Record = dict[str, Any]

__all__ = ["STAYS", "Attempt", "is_rank_record", "object_or_problem", "rank_records", "sound_rank", "with_copies"]

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
    def began(self) -> Record:
        """attempt.json; empty where it is absent."""
        return self._object(file_names.ATTEMPT) or {}

    @cached_property
    def progress(self) -> Record:
        """progress.json; empty before the first step."""
        return self._object(file_names.PROGRESS) or {}

    @cached_property
    def verdict(self) -> Record | None:
        """The attempt's own status.json."""
        return self._object(file_names.STATUS)

    @cached_property
    def status(self) -> Record:
        """The verdict, else the run's status.json where that is of this attempt; empty where there is none."""
        if self.verdict:
            return self.verdict
        newest = read_object(self.run_directory / file_names.STATUS) or {}
        return newest if newest.get("attempt") == self.name else {}

    @cached_property
    def layout(self) -> str:
        """The folder of the layout that it runs, a fallback or one for fewer nodes; "" is the planned one, also where
        the file names none of them."""
        known = is_fallback(self.layout_named) or is_for_fewer_nodes(self.layout_named)
        return self.layout_named if known else ""

    @property
    def layout_named(self) -> str:
        """What attempt.json calls the layout, whatever that is."""
        return str(self.began.get("layout") or "")

    @cached_property
    def run(self) -> Record:
        """The run.json of that layout; empty where it cannot be read."""
        return read_object(self.run_directory / self.layout / file_names.RUN) or {}

    @property
    def nodes(self) -> list[str]:
        """The nodes of attempt.json, in the order of node ranks."""
        nodes = self.began.get("nodes")
        return [node for node in nodes if is_host(node)] if isinstance(nodes, list) else []

    @property
    def cluster(self) -> str | None:
        """What SLURM calls itself there."""
        return text_or_none(self.began.get("cluster"))

    @property
    def from_step(self) -> int:
        """The step of the checkpoint that it began with; 0 without one."""
        return byte_count(self.began.get("from_step")) or 0

    @property
    def skipped_steps(self) -> tuple[int, ...]:
        """The steps of newer checkpoints that it did not begin with, because they are damaged; the newest first."""
        steps = (byte_count(skipped.get("step")) for skipped in objects_in(self.began.get("skipped")))
        return tuple(step for step in steps if step is not None)

    @property
    def is_fallback(self) -> bool:
        """Whether it was started in the allocation of the attempt before, which ran out of memory."""
        return bool(self.began.get("fallback"))

    @property
    def was_retried(self) -> bool:
        """Whether it never began, for want of a port or a container, and was started again at once."""
        following = (self.verdict or {}).get("next")
        return isinstance(following, dict) and following.get("action") == "again"

    @property
    def was_rolled_back(self) -> bool:
        """Whether its loss went bad, and the next attempt went back to a checkpoint from before that."""
        following = (self.verdict or {}).get("next")
        return isinstance(following, dict) and following.get("action") == "rollback"

    @property
    def stays(self) -> bool:
        """Whether its verdict has the next attempt follow in the same allocation."""
        following = (self.verdict or {}).get("next")
        return isinstance(following, dict) and following.get("action") in STAYS

    @property
    def skips(self) -> tuple[tuple[int, int], ...]:
        """The ranges of steps whose batches it leaves out after a rollback, first and last included."""
        ranges = self.began.get("skips")
        pairs = [pair for pair in ranges if isinstance(pair, list)] if isinstance(ranges, list) else []
        sound = [(byte_count(pair[0]), byte_count(pair[1])) for pair in pairs if len(pair) == 2]
        return tuple((a, b) for a, b in sound if a is not None and b is not None and 0 <= b - a < _MOST_SKIPPED)

    @property
    def was_rollback(self) -> bool:
        """Whether it began with an older checkpoint than the last, since the loss had gone bad."""
        return isinstance(self.began.get("rollback"), dict)

    @cached_property
    def summary(self) -> AttemptSummary | None:
        """The account that the job wrote of the attempt; None where it did not, or where there is more to know."""
        return whole_summary(self.run_directory, self.name)

    @cached_property
    def ranks(self) -> list[Record]:
        """The rank records, by rank; for each that is torn or gone its copy in status.json.

        Where the verdict repeats every record that the summary counted, thousands of small files stay closed.
        """
        copies = with_copies([], self.verdict or {})
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
    def stop_signals(self) -> dict[str, str]:
        """By node the signal that told it to save and stop."""
        return {path.name: _first_text(path) for path in sorted((self.folder / file_names.STOP_SIGNALS).glob("*"))}

    @property
    def has_failed_node(self) -> bool:
        """Whether a node has said what ended its trainers: what the others are told from then on is srun ending the
        step."""
        return self.status.get("state") == "failed" or any(self.cause_files)

    @cached_property
    def started_at(self) -> float | None:
        """When its first rank was started, in unix seconds; None before."""
        times = [time_or_none(rank.get("started_at")) for rank in self.ranks]
        return min((time for time in times if time is not None), default=None)

    def forget_verdict(self) -> None:
        """For an attempt that is judged once more: what was said of it before does not count."""
        self.__dict__.update(verdict=None, status={})

    def _object(self, name: str) -> Record | None:
        return object_or_problem(self.folder / name, self.problems)


def object_or_problem(path: Path, problems: list[str] | None) -> Record | None:
    """Return the JSON object in `path`, None where there is none. `problems` gets a sentence for one that
    cannot be read."""
    try:
        return object_in(path)
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
