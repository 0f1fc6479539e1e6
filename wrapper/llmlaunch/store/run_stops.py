"""How long a run had its devices, and how often it was stopped that nobody planned to stop: what `calibration.stops`
learns from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmlaunch.calibration.records import accelerator_of
from llmlaunch.causes.kinds import kinds_where
from llmlaunch.rundir.summary import AttemptSummary
from llmlaunch.rundir.values import count_above_zero, text_or_none, time_or_none
from llmlaunch.store.run_outcome import AttemptCauses, AttemptOutcome
from llmlaunch.units import HOUR

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
