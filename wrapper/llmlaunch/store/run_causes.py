"""What ended the attempts of a run, from its directory: the cause, those of all nodes, and the nodes at fault."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmlaunch.causes.attempt_cause import cause_of, causes_of_nodes
from llmlaunch.causes.cause import nodes_at_fault
from llmlaunch.rundir.attempt import Attempt
from llmlaunch.rundir.files import read_object
from llmlaunch.rundir.values import time_or_none
from llmlaunch.store.run_outcome import AttemptOutcome
from llmlaunch.store.sick_nodes import Failure

__all__ = ["AttemptCauses", "attempt_causes", "failures_of"]

Record = Mapping[str, Any]


@dataclass(frozen=True)
class AttemptCauses:
    """`first` is what ended the attempt, None where nothing did; `nodes` what ended the trainers of each node."""

    attempt: str
    first: Record | None
    nodes: tuple[Record, ...]


def attempt_causes(directory: Path, attempt: AttemptOutcome, said: str) -> AttemptCauses:
    """The verdict's own cause, else what the files say, together with `said`: the scheduler's word on the job. Nothing
    ended an attempt that did not fail, but its preflight may have found nodes unfit."""
    files = Attempt(directory, attempt.name)
    if attempt.state in ("succeeded", "stopped", "running"):
        return AttemptCauses(attempt.name, None, tuple(_found_by_preflight(files)))
    ranks = [dict(rank) for rank in attempt.ranks]
    own = (files.verdict or {}).get("cause")
    first = own if isinstance(own, dict) else cause_of(directory, attempt.name, ranks, attempt.exit_code or 1, said)
    return AttemptCauses(attempt.name, first, tuple(causes_of_nodes(directory, attempt.name, ranks)))


def failures_of(directory: Path, run_id: str, cluster: str | None, found: Sequence[AttemptCauses]) -> list[Failure]:
    """Every node at fault, once an attempt. The cluster is the attempt's own word, else the submission's."""
    failures = []
    for one in found:
        attempt = Attempt(directory, one.attempt)
        sick: dict[str, Record] = {}
        for cause in (*([one.first] if one.first else []), *one.nodes):
            sick.update({node: cause for node in nodes_at_fault(dict(cause)) if node not in sick})
        failures += [
            Failure(
                cluster=attempt.cluster or cluster or "",
                node=node,
                run_id=run_id,
                attempt=one.attempt,
                kind=str(cause.get("kind")),
                reason=str(cause.get("line") or ""),
                since=time_or_none(cause.get("at")) or _last_change(attempt.folder),
            )
            for node, cause in sick.items()
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
