"""Reading a run directory (docs/run-directory.md): its description, its submission and its attempts."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import file_names
from .attempt import Attempt, read_or_note
from .attempt_files import NextStep, Status
from .files import read_run_id
from .goodput import goodput_of
from .reached_steps import run_step
from .run_file import ProgressRules, RunFile, read_run_file
from .schema import read_as
from .submission_files import REFUSED, SubmissionFile, read_job_end
from .values import byte_count, is_attempt, is_fallback, is_for_fewer_nodes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from .goodput import Goodput

    Record = dict[str, Any]


SCHEMA = 1


class RunDirectoryError(Exception):
    """Raised for a folder that is not a run directory, or that this version cannot read. The message is for the
    user."""


@dataclass(frozen=True)
class RunFiles:
    """The present content of a run directory. `run_id`, `submission` and `status` are None before they are written.

    `attempts` are in the order in which they started. `run` describes the planned layout, and `fallbacks` the other
    layouts that an attempt ran, by folder. `problems` names files that exist but cannot be read, as happens after a
    crash or on a full disk; the other files still count. `refused` is the scheduler's message when it refused the job;
    it is None if the scheduler accepted a job or was not asked.
    """

    directory: Path
    run: RunFile
    run_id: str | None
    submission: SubmissionFile | None
    status: Status | None
    attempts: tuple[Attempt, ...]
    problems: tuple[str, ...] = ()
    fallbacks: Mapping[str, RunFile] = field(default_factory=dict)
    refused: str | None = None

    def run_of(self, name: str) -> RunFile | None:
        """Return the run.json of the layout that an attempt ran, with which the attempt is compared, or None if it
        cannot be read. An unknown attempt is taken to have run the planned layout."""
        layout = next((attempt.layout_named for attempt in self.attempts if attempt.name == name), "")
        return self.fallbacks.get(layout) if layout else self.run


def read_run(directory: Path) -> RunFiles:
    """Return the content of a run directory. Raises RunDirectoryError if `directory` is not a run directory or belongs
    to a newer llmlaunch, or if a rank record belongs to no rank."""
    if not directory.is_dir():
        raise RunDirectoryError(f"{directory}: is no folder; name a run directory, as `llmlaunch render -o` writes it")
    run = _description(directory)
    problems: list[str] = []
    attempts = _attempts(directory, problems)
    submission = read_or_note(SubmissionFile, directory / file_names.SUBMISSION, problems)
    return RunFiles(
        directory=directory,
        run=run,
        run_id=read_run_id(directory),
        submission=submission,
        refused=_refusal(directory) if submission is None else None,
        status=read_or_note(Status, directory / file_names.STATUS, problems),
        attempts=attempts,
        fallbacks=_fallbacks(directory, attempts, problems),
        problems=tuple(problems),
    )


def _refusal(directory: Path) -> str | None:
    end = read_job_end(directory)
    return end.get("reason", "") if end.get("phase") == REFUSED else None


def _description(directory: Path) -> RunFile:
    path = directory / file_names.RUN
    try:
        run = read_as(RunFile, path)
    except FileNotFoundError:
        raise RunDirectoryError(f"{directory}: holds no {file_names.RUN}, so it is no run directory") from None
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{path}: cannot be read: {error}; render the run again") from error
    if run.get("schema") != SCHEMA:
        raise RunDirectoryError(
            f"{path}: schema {run.get('schema')!r}, but this llmlaunch reads {SCHEMA}; use the version that rendered it"
        )
    return run


def _attempts(directory: Path, problems: list[str]) -> tuple[Attempt, ...]:
    """Return the attempts, ordered by the start of the first rank, or by the folder's last change if no rank has
    started."""
    folders = [path for path in (directory / file_names.ATTEMPTS).glob("*") if path.is_dir()]
    attempts = [Attempt(directory, path.name) for path in folders]
    started = {attempt.name: attempt.started_at or attempt.folder.stat().st_mtime for attempt in attempts}
    ordered = sorted(attempts, key=lambda attempt: (started[attempt.name], attempt.name))
    for attempt in ordered:
        _ = attempt.verdict, attempt.layout  # read here, so that `problems` is complete
        if attempt.unnumbered:
            raise RunDirectoryError(attempt.unnumbered[0])
        problems += attempt.problems
    return tuple(ordered)


def _fallbacks(directory: Path, attempts: tuple[Attempt, ...], problems: list[str]) -> dict[str, RunFile]:
    """Return the descriptions of the other layouts that were run. An unknown name is a problem and never used as a
    path."""
    descriptions: dict[str, RunFile] = {}
    for layout in sorted({attempt.layout_named for attempt in attempts if attempt.layout_named}):
        if not is_fallback(layout) and not is_for_fewer_nodes(layout):
            problems.append(
                f"{directory}: an attempt names the layout {layout!r}, which is no fallback/NUMBER or nodes/NUMBER"
            )
            continue
        description = read_or_note(RunFile, directory / layout / file_names.RUN, problems)
        if description is not None:
            descriptions[layout] = description
    return descriptions


def begun_attempts(run_directory: Path) -> list[Attempt]:
    """Return every attempt that wrote its attempt.json, ordered by the start time in it, oldest first."""
    attempts = [Attempt(run_directory, name) for name in attempts_in(run_directory)]
    return sorted(
        (attempt for attempt in attempts if attempt.began),
        key=lambda attempt: attempt.began.get("started_at") or 0.0,
    )


def next_layout(attempts: Sequence[Attempt]) -> str:
    """Return the folder of the layout that the next attempt runs: the layout of the latest of `attempts` on all nodes,
    or the one with which it would have continued had its allocation lasted. The planned layout is ""."""
    on_all = [attempt for attempt in attempts if not is_for_fewer_nodes(attempt.layout)]
    if not on_all:
        return ""
    after = on_all[-1].status.get("next") or NextStep()
    layout = after.get("layout", "") if after.get("action") == "fallback" else ""
    return layout if is_fallback(layout) else on_all[-1].layout


@dataclass(frozen=True)
class RunHistory:
    """How far a run has come: its attempts and their layouts, oldest first, the step reached out of all planned steps,
    and where its time went. It also has what its plan was judged by: the verdict with its stated risk, and the memory
    of a device."""

    attempts: tuple[str, ...]
    layouts: tuple[str, ...]
    step: int | None
    steps: int | None
    verdict: str | None = None
    stated_risk: float | None = None
    memory_bytes: int | None = None
    goodput: Goodput | None = None

    @property
    def chain(self) -> str:
        """The number of attempts, with their layouts if any was not the planned one: `3`, `2: planned > fallback/1`."""
        changes = [layout for n, layout in enumerate(self.layouts) if n == 0 or layout != self.layouts[n - 1]]
        count = str(len(self.attempts)) if self.attempts else "-"
        return f"{count}: {' > '.join(layout or 'planned' for layout in changes)}" if any(changes) else count


def run_history(run_directory: Path) -> RunHistory:
    """Return how far a run has come. Nothing is raised for files that are missing or torn."""
    ordered = attempts_in(run_directory)
    attempts = [Attempt(run_directory, name) for name in ordered]
    planned = [attempt.progress.get("steps") for attempt in attempts]
    run = read_run_file(run_directory)
    if all(steps is None for steps in planned):
        planned = [(run.get("progress") or ProgressRules()).get("steps")]
    return RunHistory(
        attempts=tuple(ordered),
        layouts=tuple(attempt.layout for attempt in attempts),
        step=run_step(attempts),
        steps=next((steps for steps in reversed(planned) if steps is not None), None),
        verdict=run.get("verdict"),
        stated_risk=run.get("stated_risk"),
        goodput=goodput_of(attempts),
        memory_bytes=byte_count(run.get("measurement", {}).get("gpu_memory_bytes")),
    )


def attempts_in(run_directory: Path) -> list[str]:
    """Return the names of the attempts that left a folder, oldest first."""
    names = (path.name for path in (run_directory / file_names.ATTEMPTS).glob("*"))
    return sorted(filter(is_attempt, names), key=attempt_order)


def attempt_order(attempt: str) -> tuple[int, ...]:
    """Return a sort key that orders attempts by their start: job ids and restart counts only rise."""
    return tuple(int(number) for number in re.findall(r"\d+", attempt))
