"""What arguments whose memory nobody knows do to a verdict.

An argument that decides memory outright (an optimizer, a library, a configuration) leaves no verdict, whatever the
room. Any other counts only where it could matter. A single argument that is no technique (techniques have recipe keys)
changes at most the number format of what a step adds to the model states: fp32 in place of bf16 doubles it, fp8 halves
it. So a plan stays safe where what a step adds fits a second time, and stays unsafe where half of it is not enough to
fit. No argument that the formula prices changes more than that, except the scores of unfused attention
(tests/unit/planner/test_own_arguments.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from llmlaunch.calibration.margins import Margin
from llmlaunch.frameworks.classed_arguments import LESS_OF_STATES, ClassedArgument, ClassedArguments
from llmlaunch.memory.estimator import Estimate, RankEstimate
from llmlaunch.memory.peak import MODEL_STATES, OUTSIDE_TORCH
from llmlaunch.units import gib
from llmlaunch.verdicts import SAFE, TIGHT, UNKNOWN, UNSAFE

SPARED_SHARE = 0.5  # of what a step adds


def step_bytes(rank: RankEstimate) -> int:
    """Return the bytes of a rank that a step adds to its model states and to what torch does not hold."""
    outside = sum(rank.terms.get(name, 0) for name in OUTSIDE_TORCH)
    return max(rank.device_bytes - _state_bytes(rank) - outside, 0)


def verdict_with_arguments(
    verdict: str, arguments: ClassedArguments, estimate: Estimate, limit: Margin
) -> tuple[str, str]:
    """Return the verdict on a plan that was judged `verdict` by its bytes, with arguments of the person's own; and the
    reason where it is UNKNOWN, else "". `limit` is that of the recipe, not of a wider search."""
    if arguments.deciding:
        return UNKNOWN, f"what decides the memory was not read: {_named(arguments.deciding)}"
    if verdict == SAFE and arguments.costing and _most_bytes(estimate, arguments) > limit.limit_bytes:
        return TIGHT, ""
    too_much = estimate.worst.device_bytes - limit.most_bytes
    if (
        verdict == UNSAFE
        and arguments.sparing
        and too_much > 0
        and _least_bytes(estimate, arguments) <= limit.most_bytes
    ):
        return UNKNOWN, (
            f"{gib(too_much)} GiB too much without arguments that may need less, and what they do to GPU memory is not "
            f"known: {_named(arguments.sparing)}"
        )
    return verdict, ""


def argument_notes(verdict: str, arguments: ClassedArguments, estimate: Estimate) -> tuple[str, ...]:
    """Return the note on unknown arguments that change nothing about a safe plan."""
    if verdict != SAFE or not arguments.costing:
        return ()
    more = gib(most_more_bytes(estimate, arguments))
    return (
        f"{_named(arguments.costing)}: needs at most {more} GiB more, which fits: as much again as a step adds to "
        "the model states",
    )


def most_more_bytes(estimate: Estimate, arguments: ClassedArguments) -> int:
    """Return the most that unknown arguments may need beyond what the fullest rank was priced with."""
    return max(_most_bytes(estimate, arguments) - estimate.worst.device_bytes, 0)


def _most_bytes(estimate: Estimate, arguments: ClassedArguments) -> int:
    times = max(argument.flag_class.times for argument in arguments.costing)
    return max(rank.device_bytes + int(times * step_bytes(rank)) for rank in estimate.ranks)


def _least_bytes(estimate: Estimate, arguments: ClassedArguments) -> int:
    """Return what the fullest rank needs at least; of narrower model states nobody can say how little is left."""
    narrower = any(argument.flag_class.effect == LESS_OF_STATES for argument in arguments.sparing)
    return max(
        rank.device_bytes - int(SPARED_SHARE * step_bytes(rank)) - (_state_bytes(rank) if narrower else 0)
        for rank in estimate.ranks
    )


def _state_bytes(rank: RankEstimate) -> int:
    return sum(rank.terms.get(name, 0) for name in MODEL_STATES)


def _named(arguments: Sequence[ClassedArgument]) -> str:
    return ", ".join(f"{argument.text} ({argument.flag_class.why})" for argument in arguments)
