"""The bounds of restarts that look at more than a count: failures within an hour, GPU-hours that were lost, and two
attempts that died at the same step."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from ..causes.kinds import kind_of
from ..causes.suspects import signs_against
from ..rundir.values import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..rundir.attempt import Attempt
    from ..rundir.attempt_files import Status
    from ..rundir.run_file import RestartPolicy, RunFile


HOUR_SECONDS = 3600.0


class Bounds(NamedTuple):
    """What has been used of the bounds: failures of the last hour, hours of all devices whose steps no checkpoint has,
    and the step after which the last two attempts died in the same way (None where they did not)."""

    failures_of_hour: int = 0
    lost_gpu_hours: float = 0.0
    same_step: int | None = None

    def reached(self, policy: RestartPolicy) -> str:
        """Return which bound of run.json's `restart` another restart would exceed; empty where none."""
        if self.same_step is not None:
            return (
                f"two attempts in a row died after step {self.same_step} in the same way, and no node is to blame: "
                "it is the data or the program (a bad sample, a batch that gives NaN)"
            )
        most = policy.get("per_hour") or None
        if most is not None and self.failures_of_hour > most:
            return f"{counted(self.failures_of_hour, 'failure')} within an hour (restart.per_hour: {most})"
        hours = policy.get("lost_gpu_hours")
        if hours is not None and self.lost_gpu_hours > hours:
            return f"{self.lost_gpu_hours:.1f} GPU-hours are lost (restart.lost_gpu_hours: {hours:g})"
        return ""


class _Past(NamedTuple):
    """An attempt that has ended. `failed`: a restart followed, or follows; not where it was stopped, or went on with
    another layout."""

    seconds: float
    ended_at: float
    from_step: int
    last_step: int | None
    failed: bool
    cause: Mapping[str, Any]


def bounds_of(
    attempts: Sequence[Attempt], run: RunFile, saved_step: int, now: float, verdict: Status | None = None
) -> Bounds:
    """Return what the `attempts`, the oldest first, have used. `saved_step` is that of the last checkpoint, `verdict`
    the state and cause of the last attempt, where no file holds them yet."""
    most_nodes = run.get("nodes") or 1
    devices = run.get("devices_per_node") or 1
    begun = [attempt for attempt in attempts if not attempt.was_retried]
    statuses = [attempt.status for attempt in begun]
    if verdict is not None and statuses:
        statuses[-1] = {**verdict, "ended_at": now}
    past = [_past(attempt, status) for attempt, status in zip(begun, statuses)]
    starts = [*(attempt.from_step for attempt in begun[1:]), saved_step]
    nodes = [min(len(attempt.nodes) or most_nodes, most_nodes) for attempt in begun]  # spare ones are not counted
    lost = sum(count * _lost_seconds(attempt, start) for count, attempt, start in zip(nodes, past, starts))
    recent = [attempt for attempt in past if attempt.failed and attempt.ended_at > now - HOUR_SECONDS]
    return Bounds(len(recent), lost * devices / HOUR_SECONDS, _same_step(past))


def _past(attempt: Attempt, status: Status) -> _Past:
    """One that was killed without a verdict ended with its last step, as far as anybody knows."""
    began, step = attempt.began.get("started_at"), attempt.progress.get("step")
    ended = status.get("ended_at") or attempt.progress.get("at") or began or 0.0
    return _Past(
        seconds=0.0 if began is None else max(0.0, ended - began),
        ended_at=ended,
        from_step=attempt.from_step,
        last_step=status.get("step") if step is None else step,
        failed=status.get("state") in ("failed", None) and (status.get("next") or {}).get("action") != "fallback",
        cause=status.get("cause") or {},
    )


def _lost_seconds(attempt: _Past, kept_step: int) -> float:
    """The share of its time whose steps the next one could not go on from; all of it where it made none."""
    steps = (attempt.last_step or 0) - attempt.from_step
    share = min(1.0, max(0.0, (kept_step - attempt.from_step) / steps)) if steps > 0 else 0.0
    return attempt.seconds * (1.0 - share)


def _same_step(past: Sequence[_Past]) -> int | None:
    if len(past) < 2 or not past[-1].failed or not past[-2].failed:
        return None
    same = past[-1].last_step == past[-2].last_step and _are_alike(past[-2].cause, past[-1].cause)
    return past[-1].last_step if same else None


def _are_alike(before: Mapping[str, Any], last: Mapping[str, Any]) -> bool:
    """Whether both ended in the same way, and not on one node that others wait for."""
    kind = last.get("kind")
    if not kind_of(last).repeats or before.get("kind") != kind:
        return False
    if kind == "crash" and (before.get("consequence") or last.get("consequence")):
        return False  # ended from outside
    if kind != "crash":
        return not signs_against(before).keys() & signs_against(last).keys()
    return _form(before) == _form(last)


def _form(cause: Mapping[str, Any]) -> str:
    """`ValueError` of `ValueError: bad sample 17`, `rank # was ended by SIGBUS`."""
    return re.sub(r"\d+", "#", str(cause.get("line")).partition(":")[0])
