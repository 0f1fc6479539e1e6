"""Whether all of a training step ran that allocates: a trace that skipped some of it shows too little, and looks fine.

Fake tensors have no values, and code that reads one goes where the invented value leads: a skipped optimizer step ends
as quietly as one that ran.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from failures import Dishonest

__all__ = ["STEP_PHASES", "Evidence", "insist"]

STEP_PHASES = ("forward", "backward", "optimizer step")


@dataclass(frozen=True)
class Evidence:
    """What was seen of a rank. `forwards` and `backwards` are passes by model chunk, `microbatches` those of each
    iteration; `stateless` counts the parameters that an optimizer was to step and keeps no state of."""

    microbatches: Sequence[int]
    forwards: Sequence[int]
    backwards: Sequence[int]
    steps: int
    skipped: int
    parameter_count: int
    optimizer_state_count: int
    stateless: int
    peak_phase: str
    peak_by_phase: Mapping[str, int]


def insist(evidence: Evidence) -> None:
    """Raises Dishonest with all that is wrong."""
    wrong = list(_wrong(evidence))
    if wrong:
        raise Dishonest("the trace is worth nothing: " + "; ".join(wrong))


def _wrong(seen: Evidence) -> Iterator[str]:
    if seen.parameter_count == 0:
        yield "the rank has no parameters"
    passes = sum(seen.microbatches)
    for direction, counts in (("forward", seen.forwards), ("backward", seen.backwards)):
        for chunk, count in enumerate(counts):
            if count != passes:
                yield f"{count} of {passes} {direction} passes ran through model chunk {chunk}"
    if seen.skipped:
        yield f"the optimizer skipped {seen.skipped} of {len(seen.microbatches)} steps, as after an overflow"
    if seen.steps != len(seen.microbatches):
        yield f"the optimizer stepped {seen.steps} times in {len(seen.microbatches)} iterations"
    if seen.optimizer_state_count == 0:
        yield "the optimizer keeps no states"
    elif seen.stateless:
        yield f"the optimizer keeps no state of {seen.stateless} of the tensors that it steps"
    for phase in STEP_PHASES:
        if not seen.peak_by_phase.get(phase):
            yield f"nothing was allocated in the phase {phase!r}"
    if not seen.peak_by_phase.get(seen.peak_phase):
        yield f"the phase of the peak, {seen.peak_phase!r}, never happened"
