"""The outcome of each attempt in a run directory: its state, whether it is over, what ended it, and the nodes at
fault."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmlaunch.calibration.records import accelerator_of
from llmlaunch.causes.attempt_cause import cause_of, causes_of_nodes
from llmlaunch.causes.kinds import kinds_where
from llmlaunch.causes.suspects import ENOUGH_SIGNS, signs_against
from llmlaunch.rundir.attempt import Attempt, with_copies
from llmlaunch.rundir.attempt_files import RankRecord, Status
from llmlaunch.rundir.files import read_object
from llmlaunch.rundir.run import RunFiles
from llmlaunch.rundir.submission_files import SubmissionFile
from llmlaunch.rundir.summary import AttemptSummary
from llmlaunch.rundir.values import count_above_zero, text_or_none, time_or_none
from llmlaunch.store.sick_nodes import Failure
from llmlaunch.units import HOUR

Record = Mapping[str, Any]

# what an attempt's verdict may say comes next -> the state of the run until that has begun
GOES_ON = {
    "fallback": "running",
    "again": "running",
    "restart": "running",
    "rollback": "running",
    "requeue": "submitted",
    "chain": "submitted",
}


@dataclass(frozen=True)
class AttemptOutcome:
    """The outcome of one attempt. `over` is false if it may still be running and its peaks may still rise. `next` is
    what follows according to its verdict: "end", or how the job continues."""

    name: str
    ranks: tuple[RankRecord, ...]
    state: str
    over: bool
    why: str | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    next: str = "end"

    @property
    def started_at(self) -> float | None:
        times = [time for rank in self.ranks if (time := rank.get("started_at")) is not None]
        return min(times, default=None)


@dataclass(frozen=True)
class LauncherWord:
    """A launcher's report that the job is over, with the time (unix seconds) and the reason."""

    state: str
    said_at: float
    why: str = ""


def attempt_outcomes(files: RunFiles, word: LauncherWord | None) -> list[AttemptOutcome]:
    """Return the outcomes of all attempts, oldest first. If a launcher reports that the job is over, so is the newest
    attempt, unless it began later, because a killed job writes no status.json."""
    outcomes = []
    for number, attempt in enumerate(files.attempts, start=1):
        status = _verdict(files, attempt.name, attempt.verdict)
        ranks = tuple(attempt.ranks)
        if status is not None:
            outcomes.append(_judged(attempt.name, ranks, status))
        elif number < len(files.attempts) or _without_folder(files):  # a later attempt began; this left no verdict
            outcomes.append(AttemptOutcome(attempt.name, ranks, _guessed(ranks, attempt.done, files.run), over=True))
        else:
            running = AttemptOutcome(attempt.name, ranks, "running", over=False)
            known_over = word is not None and (running.started_at or 0.0) <= word.said_at
            outcomes.append(replace(running, state=word.state, over=True) if word and known_over else running)
    newest = _without_folder(files)
    if newest is not None and files.status is not None:
        outcomes.append(_judged(newest, tuple(with_copies([], files.status)), files.status))
    return outcomes


def _verdict(files: RunFiles, name: str, own: Status | None) -> Status | None:
    """Return the attempt's own status.json, or else the run's if it describes this attempt."""
    return own if own is not None or (files.status or Status()).get("attempt") != name else files.status


def _without_folder(files: RunFiles) -> str | None:
    """Return the attempt that the run's status.json names, if that attempt left no folder."""
    newest = (files.status or Status()).get("attempt")
    return newest if newest not in {"", *(attempt.name for attempt in files.attempts)} else None


def run_state(outcomes: list[AttemptOutcome], submission: SubmissionFile | None, word: LauncherWord | None) -> str:
    """Return the state of the run: that of its newest attempt, unless the job continues after it or was submitted again
    since."""
    if not outcomes:
        return word.state if word else "submitted"
    newest = outcomes[-1]
    again = None if submission is None else submission.get("submitted_at")
    if newest.ended_at is not None and again is not None and again > newest.ended_at:
        return word.state if word and word.said_at >= again else "submitted"
    if newest.over and newest.next in GOES_ON:
        return word.state if word and word.said_at >= (newest.ended_at or 0.0) else GOES_ON[newest.next]
    return newest.state


def launched_by(files: RunFiles, outcomes: list[AttemptOutcome]) -> tuple[str | None, str | None, str | None]:
    """Return launcher, job id and cluster, from submission.json or else from the attempt's name (a bare `sbatch`)."""
    if files.submission is not None:
        submission = files.submission
        return submission.get("launcher"), submission.get("job_id"), submission.get("cluster")
    if not outcomes:
        return None, None, None
    job_id = outcomes[-1].name.rpartition(".")[0] or outcomes[-1].name
    return "local" if job_id.startswith("local-") else "slurm", job_id, None


def _judged(name: str, ranks: tuple[RankRecord, ...], status: Status) -> AttemptOutcome:
    verdict, code = status.get("state", ""), status.get("exit_code")
    state = verdict if verdict in ("succeeded", "stopped") else "failed"
    return AttemptOutcome(
        name,
        ranks,
        state,
        over=True,
        why=None if state == "succeeded" else status.get("why") or None,
        ended_at=status.get("ended_at"),
        exit_code=code if code is not None and abs(code) < 2**31 else None,
        next=(status.get("next") or {}).get("action") or "end",
    )


def _guessed(ranks: tuple[RankRecord, ...], done: Sequence[str], run: Record) -> str:
    well = all(rank.get("exit_code") == 0 and rank.get("signal") is None for rank in ranks)
    return "succeeded" if ranks and well and len(done) == run.get("nodes") else "failed"


@dataclass(frozen=True)
class AttemptCauses:
    """The causes in one attempt. `first` is what ended it, or None if nothing did; `nodes` is what ended the trainers
    of each node."""

    attempt: str
    first: Record | None
    nodes: tuple[Record, ...]


def attempt_causes(directory: Path, attempt: AttemptOutcome, reason: str) -> AttemptCauses:
    """Return the cause in the verdict, or else what the files and `reason`, the scheduler's report on the job, show. An
    attempt that did not fail has no cause, but its preflight may have found unfit nodes."""
    files = Attempt(directory, attempt.name)
    if attempt.state in ("succeeded", "stopped", "running"):
        return AttemptCauses(attempt.name, None, tuple(_found_by_preflight(files)))
    own = None if files.verdict is None else files.verdict.get("cause")
    try:
        first = own or cause_of(files, attempt.ranks, attempt.exit_code or 1, reason)
        return AttemptCauses(attempt.name, first, tuple(causes_of_nodes(files, attempt.ranks)))
    except Exception:  # an unexpected file; the run itself is shown and stored anyway
        return AttemptCauses(attempt.name, own, ())


def failures_of(directory: Path, run_id: str, cluster: str | None, causes: Sequence[AttemptCauses]) -> list[Failure]:
    """Return every node with a sign against it, once per attempt. The cluster is the attempt's, or else the
    submission's."""
    failures = []
    for of_attempt in causes:
        attempt = Attempt(directory, of_attempt.attempt)
        first: dict[str, Record] = {}  # the cause with the first sign against a node
        signs: dict[str, dict[str, int]] = {}  # by node and kind of cause
        for cause in (*([of_attempt.first] if of_attempt.first else []), *of_attempt.nodes):
            for node, count in signs_against(cause).items():
                first.setdefault(node, cause)
                signs.setdefault(node, {})[str(cause.get("kind"))] = count
        failures += [
            Failure(
                cluster=attempt.began.get("cluster") or cluster or "",
                node=node,
                run_id=run_id,
                attempt=of_attempt.attempt,
                kind=str(cause.get("kind")),
                reason=str(cause.get("line") or ""),
                since=time_or_none(cause.get("at")) or _last_change(attempt.folder),
                signs=min(ENOUGH_SIGNS, sum(signs[node].values())),
            )
            for node, cause in first.items()
        ]
    return failures


def _found_by_preflight(attempt: Attempt) -> list[Record]:
    causes = map(read_object, attempt.cause_files)
    return [cause for cause in causes if cause is not None and cause.get("kind") == "preflight"]


def _last_change(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return time.time()


UNPLANNED = kinds_where(interrupts=True)
"""Causes of an attempt that had made steps and that nobody planned to end. Not among them: what the plan, the recipe or
the scheduler is the reason of."""


def stop_columns(
    run: Mapping[str, Any],
    outcomes: Sequence[AttemptOutcome],
    summaries: Sequence[AttemptSummary],
    causes: Mapping[str, AttemptCauses],
) -> dict[str, Any]:
    """Return `accelerator`, `device_hours` and `unplanned_stops` of a run's row in the store, from its run.json and its
    attempts that are over. Attempts that made no step count for neither: what ends those is most often the job's own
    fault. Hours are None where the run does not say how many devices it has."""
    measurement = run.get("measurement")
    described = measurement if isinstance(measurement, dict) else {}
    devices = count_above_zero(described.get("world_size"))
    if text_or_none(described.get("gpu")) is None or devices is None:
        return {"accelerator": None, "device_hours": None, "unplanned_stops": None}
    stepped = {summary.attempt for summary in summaries if summary.steps_run}
    seconds, stops = 0.0, 0
    for place, attempt in enumerate(outcomes):
        if attempt.name not in stepped or not attempt.over:
            continue
        seconds += _lasted(attempt, outcomes[place + 1 :])
        of_attempt = causes.get(attempt.name)
        first = None if of_attempt is None else of_attempt.first
        stops += attempt.state == "failed" and first is not None and str(first.get("kind")) in UNPLANNED
    accelerator = accelerator_of(described)
    return {"accelerator": accelerator, "device_hours": seconds * devices / HOUR, "unplanned_stops": stops}


def _lasted(attempt: AttemptOutcome, later: Sequence[AttemptOutcome]) -> float:
    """Return the seconds of an attempt: to its own end, else to the last end of a rank; 0 where neither is known. The
    next attempt began later than this one ended."""
    ends = [time_or_none(rank.get("ended_at")) for rank in attempt.ranks]
    ended = attempt.ended_at or max((end for end in ends if end is not None), default=None)
    limits = [after.started_at for after in later if after.started_at is not None]
    ended = min(limits) if ended is None and limits else ended
    return 0.0 if ended is None or attempt.started_at is None else max(ended - attempt.started_at, 0.0)
