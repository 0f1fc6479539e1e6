"""Goodput: the share of the allocated time in which a run made steps that count in the end (docs/watching.md).

Allocated is the time from each attempt's start to its end, or to the start of the next one where that followed in the
same allocation; what lies between other attempts is the queue's, and given apart. A step that was trained again after a
stop counts once, one whose batch was left out after a rollback not at all. Steps count at the usual pace of their
layout, so that what a slow node costs is no goodput. The parts add up to the allocated time. In the share an hour of an
attempt weighs as much as it has nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .attempt import Attempt

    Record = dict[str, Any]


_STATES = ("succeeded", "failed", "stopped")
# A job that stays in its allocation rests ten minutes at most. After a longer gap it went to the queue all the same: it
# was told of its time limit meanwhile.
_LONGEST_REST_SECONDS = 900.0


class AttemptFacts(NamedTuple):
    """What the files of an attempt say; times in unix seconds, None where nothing is known."""

    started_at: float
    from_step: int = 0
    state: str | None = None  # None while it runs, and where its node died
    cause: str | None = None  # the kind
    ended_at: float | None = None
    first_step: int | None = None  # the first one that was logged
    first_step_at: float | None = None
    to_step: int | None = None  # the last one that was logged
    last_step_at: float | None = None
    step_seconds: float = 0.0  # the median
    saved_step: int | None = None
    stays: bool = False  # the next attempt follows in the same allocation
    skips: tuple[tuple[int, int], ...] = ()  # ranges of steps whose batches are left out, the last included
    layout: str = ""
    nodes: int = 1

    @property
    def end(self) -> float:
        """When it ended, or was last heard of."""
        last = max(self.started_at, self.last_step_at or 0.0, self.first_step_at or 0.0)
        return last if self.ended_at is None else max(self.started_at, self.ended_at)

    @property
    def steps(self) -> int:
        return 0 if self.to_step is None else max(self.to_step - self.from_step, 0)

    def trained(self, steps: int) -> int:
        """How many of its first `steps` were trained, and not left out."""
        first, last = self.from_step + 1, self.from_step + steps
        skipped = {step for low, high in self.skips for step in range(max(low, first), min(high, last) + 1)}
        return steps - len(skipped)


class AttemptTime(NamedTuple):
    """How the seconds of one attempt were spent; they add up to `allocated_seconds`."""

    allocated_seconds: float
    startup_seconds: float  # to the first step
    useful_seconds: float
    repeated_seconds: float  # steps that were trained again, or are not saved
    other_seconds: float  # between its steps: saves, evaluations, steps slower than the median
    end_seconds: float  # after the last step
    steps: int
    repeated_steps: int


class Goodput(NamedTuple):
    """The time of a run. `stops` are by cause: what each cost of steps and of the attempt that it ended."""

    attempts: tuple[AttemptTime, ...]
    nodes: tuple[int, ...]  # of each attempt
    stops: tuple[Record, ...]  # cause, stops, repeated_steps, seconds; the costliest first
    startup_seconds: float
    end_seconds: float
    queue_seconds: float

    @property
    def allocated_seconds(self) -> float:
        return sum(attempt.allocated_seconds for attempt in self.attempts)

    @property
    def useful_seconds(self) -> float:
        return sum(attempt.useful_seconds for attempt in self.attempts)

    @property
    def other_seconds(self) -> float:
        return sum(attempt.other_seconds for attempt in self.attempts)

    @property
    def share(self) -> float | None:
        """The goodput; None before the first step."""
        pairs = [*zip(self.nodes, self.attempts)]
        allocated = sum(nodes * attempt.allocated_seconds for nodes, attempt in pairs)
        useful = sum(nodes * attempt.useful_seconds for nodes, attempt in pairs)
        return useful / allocated if allocated > 0 and any(attempt.steps for attempt in self.attempts) else None

    def as_json(self) -> Record:
        return {
            "share": self.share,
            "allocated_seconds": self.allocated_seconds,
            "useful_seconds": self.useful_seconds,
            "useful_steps": sum(attempt.steps - attempt.repeated_steps for attempt in self.attempts),
            "startup_seconds": self.startup_seconds,
            "stops": list(self.stops),
            "other_seconds": self.other_seconds,
            "end_seconds": self.end_seconds,
            "queue_seconds": self.queue_seconds,
        }


def goodput_of(attempts: Iterable[Attempt]) -> Goodput:
    """Return the goodput of a run by the files of its attempts; those that never began to train are left out."""
    return goodput([attempt_facts(attempt) for attempt in attempts if attempt.began.get("started_at")])


def attempt_facts(attempt: Attempt) -> AttemptFacts:
    progress, status = attempt.progress, attempt.status
    steps = [step for step in (progress.get("step"), status.get("step")) if step is not None]
    state, cause = status.get("state"), status.get("cause")
    return AttemptFacts(
        started_at=attempt.began.get("started_at") or 0.0,
        from_step=attempt.from_step,
        state=state if state in _STATES else None,
        cause=None if cause is None else cause["kind"] or None,
        ended_at=status.get("ended_at"),
        first_step=progress.get("first_step"),
        first_step_at=progress.get("first_step_at"),
        to_step=max(steps, default=None),
        last_step_at=progress.get("at"),
        step_seconds=progress.get("step_seconds") or 0.0,
        saved_step=status.get("saved_step"),
        stays=attempt.stays,
        skips=attempt.skips,
        layout=attempt.layout,
        nodes=len(attempt.nodes) or 1,
    )


def goodput(attempts: Sequence[AttemptFacts]) -> Goodput:
    """Return the goodput of attempts, the oldest first."""
    times: list[AttemptTime] = []
    stops: dict[str, Record] = {}
    startup = end = queue = 0.0
    paces = _usual_paces(attempts)
    for index, attempt in enumerate(attempts):
        following = attempts[index + 1 :]
        if attempt.stays and following and following[0].started_at - attempt.end <= _LONGEST_REST_SECONDS:
            attempt = attempt._replace(ended_at=max(attempt.end, following[0].started_at))
        later_from = min((later.from_step for later in following), default=None)
        time = _attempt_time(attempt, later_from, paces.get(attempt.layout, 0.0))
        times.append(time)
        failed = attempt.state == "failed" or (attempt.state is None and bool(following))
        lost = time.repeated_seconds + (time.end_seconds if failed else 0.0)
        if failed and not time.steps:  # it ended before it trained
            lost += time.startup_seconds
        else:
            startup += time.startup_seconds
        end += 0.0 if failed else time.end_seconds
        queue += max(following[0].started_at - attempt.end, 0.0) if following else 0.0
        if failed or following or time.repeated_steps:
            _add_stop(stops, attempt, time.repeated_steps, lost)
    ordered = sorted(stops.values(), key=lambda stop: (-stop["seconds"], stop["cause"]))
    nodes = tuple(attempt.nodes for attempt in attempts)
    return Goodput(tuple(times), nodes, tuple(ordered), startup, end, queue)


def _usual_paces(attempts: Sequence[AttemptFacts]) -> dict[str, float]:
    """Return by layout the seconds of a step that half of its steps, attempt by attempt, did not exceed."""
    paces: dict[str, float] = {}
    for layout in {attempt.layout for attempt in attempts}:
        timed = sorted((a.step_seconds, a.steps) for a in attempts if a.layout == layout and a.steps and a.step_seconds)
        half = sum(steps for _, steps in timed) / 2.0
        for seconds, steps in timed:
            half -= steps
            if half <= 0.0:
                paces[layout] = seconds
                break
    return paces


def _attempt_time(attempt: AttemptFacts, later_from: int | None, usual_pace: float) -> AttemptTime:
    """Split the time of an attempt; `later_from` is the earliest step at which a later attempt began, `usual_pace` the
    seconds of a step."""
    allocated, steps = attempt.end - attempt.started_at, attempt.trained(attempt.steps)
    if not steps:
        return AttemptTime(allocated, allocated, 0.0, 0.0, 0.0, 0.0, 0, 0)
    last = min(max(attempt.last_step_at or attempt.end, attempt.started_at), attempt.end) - attempt.started_at
    startup = min(max(_startup_seconds(attempt, last), 0.0), last)
    trained = last - startup
    pace = min(usual_pace, trained / steps)  # steps cannot have taken longer than there was time
    repeated = steps - attempt.trained(_kept_steps(attempt, later_from))
    useful_seconds, repeated_seconds = (steps - repeated) * pace, repeated * pace
    other = max(trained - useful_seconds - repeated_seconds, 0.0)
    return AttemptTime(allocated, startup, useful_seconds, repeated_seconds, other, allocated - last, steps, repeated)


def _startup_seconds(attempt: AttemptFacts, last: float) -> float:
    """Return the seconds before the first step began; where its line was not timed, all that the steps leave over."""
    if attempt.first_step_at is None:
        return last - attempt.steps * attempt.step_seconds
    logged = max((attempt.first_step or 0) - attempt.from_step, 1)  # a line may stand for several steps
    return attempt.first_step_at - attempt.started_at - logged * attempt.step_seconds


def _kept_steps(attempt: AttemptFacts, later_from: int | None) -> int:
    """Return how many of its steps count in the end: no later attempt made them again, and a failed last one saved
    them."""
    next_start = later_from
    if next_start is None:
        next_start = (attempt.saved_step or 0) if attempt.state == "failed" else attempt.from_step + attempt.steps
    return min(max(next_start - attempt.from_step, 0), attempt.steps)


def _add_stop(stops: dict[str, Record], attempt: AttemptFacts, repeated_steps: int, seconds: float) -> None:
    cause = attempt.cause or attempt.state or "unknown"
    stop = stops.setdefault(cause, {"cause": cause, "stops": 0, "repeated_steps": 0, "seconds": 0.0})
    stop["stops"] += 1
    stop["repeated_steps"] += repeated_steps
    stop["seconds"] += seconds
