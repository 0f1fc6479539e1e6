"""A run directory read back (docs/run-directory.md): only files, no scheduler, no store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmlaunch.errors import UserError
from llmlaunch.rundir.files import object_in, read_run_id
from llmlaunch.rundir.identifiers import is_fallback
from llmlaunch.rundir.rank_records import sound_rank
from llmlaunch.rundir.summarize import whole_summary
from llmlaunch.rundir.summary import AttemptSummary
from llmlaunch.rundir.values import time_or_none

__all__ = ["Attempt", "RunFiles", "read_run"]

SCHEMA = 1

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Attempt:
    """One start of the job. `ranks` are the rank records by global rank, `done` the nodes whose marker exists, `layout`
    the folder of the layout it ran ("" = the planned one), `status` its own verdict, None while it has none, `cluster`
    what SLURM calls itself there, `summary` the job's own account of it where no file says more by now."""

    name: str
    ranks: tuple[Record, ...]
    done: tuple[str, ...]
    layout: str = ""
    status: Record | None = None
    cluster: str | None = None
    summary: AttemptSummary | None = None


@dataclass(frozen=True)
class RunFiles:
    """What a run directory says so far. `run_id`, `submission` and `status` are None before they are written.

    `attempts` are in the order they were started. `run` describes the planned layout, `fallbacks` those of other
    layouts that an attempt ran, by their folder. `problems` names files that are there but cannot be read, which
    happens to runs that ended in a crash or on a full disk; what else is there still counts.
    """

    directory: Path
    run: Record
    run_id: str | None
    submission: Record | None
    status: Record | None
    attempts: tuple[Attempt, ...]
    peaks: tuple[Path, ...]
    problems: tuple[str, ...] = ()
    fallbacks: Mapping[str, Record] = field(default_factory=dict)
    refused: Record | None = None
    """What the scheduler said when it did not take the job; None where it took one, or was not asked."""

    def run_of(self, attempt: str) -> Record | None:
        """The description (run.json) of the layout that an attempt ran: what it is to be compared with. None where that
        layout's cannot be read. An attempt that is not known ran the planned layout."""
        layout = next((one.layout for one in self.attempts if one.name == attempt), "")
        return self.fallbacks.get(layout) if layout else self.run


def read_run(directory: Path) -> RunFiles:
    """Raises UserError where `directory` is no run directory or one of a newer llmlaunch."""
    if not directory.is_dir():
        raise UserError(f"{directory}: is no folder; name a run directory, as `llmlaunch render -o` writes it")
    problems: list[str] = []
    run = _described(directory)
    attempts = _attempts(directory / "attempts", problems)
    submission = _optional(directory / "submission.json", problems)
    return RunFiles(
        directory=directory,
        run=run,
        run_id=read_run_id(directory),
        submission=submission,
        refused=_optional(directory / "refused.json", problems) if submission is None else None,
        status=_optional(directory / "status.json", problems),
        attempts=attempts,
        peaks=tuple(sorted((directory / "peaks").glob("*.jsonl"))),
        fallbacks=_fallbacks(directory, attempts, problems),
        problems=tuple(problems),
    )


def _described(directory: Path) -> Record:
    path = directory / "run.json"
    try:
        run = object_in(path)
    except FileNotFoundError:
        raise UserError(f"{directory}: holds no run.json, so it is no run directory") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}; render the run again") from error
    if run.get("schema") != SCHEMA:
        raise UserError(
            f"{path}: schema {run.get('schema')!r}, but this llmlaunch reads {SCHEMA}; use the version that rendered it"
        )
    return run


def _attempts(folder: Path, problems: list[str]) -> tuple[Attempt, ...]:
    folders = [path for path in folder.glob("*") if path.is_dir()]
    read = [(path, _attempt(path, problems)) for path in folders]
    return tuple(attempt for _, attempt in sorted(read, key=lambda pair: _started(*pair)))


def _attempt(folder: Path, problems: list[str]) -> Attempt:
    began, status = (_optional(folder / name, problems) for name in ("attempt.json", "status.json"))
    summary = whole_summary(folder.parents[1], folder.name)
    copies = _copies(status, summary) if status is not None and summary is not None else None
    if copies is None:
        records = [_optional(path, problems) for path in (folder / "ranks").glob("*.json")]
        copies = [sound_rank(record) for record in records if record is not None]
    ranks = sorted(copies, key=_rank_of)
    done = sorted(path.name for path in (folder / "done").glob("*"))
    layout, cluster = (str((began or {}).get(name) or "") for name in ("layout", "cluster"))
    return Attempt(folder.name, tuple(ranks), tuple(done), layout, status, cluster or None, summary)


def _copies(status: Record, summary: AttemptSummary) -> list[Record] | None:
    """The rank records as the verdict repeats them, so that thousands of small files stay closed; None where one of
    the files that the summary saw has no copy."""
    listed = status.get("ranks")
    copies: list[Record] = (
        [sound_rank(copy) for copy in listed if isinstance(copy, dict)] if isinstance(listed, list) else []
    )
    folder = f"attempts/{summary.attempt}/ranks/"
    wanted = {name[len(folder) : -len(".json")] for name in summary.files if name.startswith(folder)}
    return copies if wanted <= {str(copy.get("rank")) for copy in copies} else None


def _fallbacks(directory: Path, attempts: tuple[Attempt, ...], problems: list[str]) -> dict[str, Record]:
    """Descriptions of the fallback layouts that were run. A name that is none of ours is a problem, never a path."""
    found: dict[str, Record] = {}
    for layout in sorted({attempt.layout for attempt in attempts if attempt.layout}):
        if not is_fallback(layout):
            problems.append(f"{directory}: an attempt names the layout {layout!r}, which is no fallback/NUMBER")
            continue
        described = _optional(directory / layout / "run.json", problems)
        if described is not None:
            found[layout] = described
    return found


def _rank_of(record: Record) -> int:
    rank = record.get("rank", -1)
    if type(rank) is not int:
        raise UserError(f"a rank record cannot be read: its rank is {str(rank)[:60]!r}, no whole number")
    return rank


def _started(folder: Path, attempt: Attempt) -> tuple[float, str]:
    """Unix seconds of the first rank's start; of the folder's last change where no rank has started."""
    starts = [at for at in (time_or_none(rank.get("started_at")) for rank in attempt.ranks) if at is not None]
    return (min(starts) if starts else folder.stat().st_mtime, attempt.name)


def _optional(path: Path, problems: list[str]) -> Record | None:
    try:
        return object_in(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        problems.append(f"{path}: {error}")
        return None
