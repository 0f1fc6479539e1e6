"""One line on what the order of the nodes is worth."""

from __future__ import annotations

from llmlaunch.planner.placement import ExpectedPlacement
from llmlaunch.rundir.messages import counted

__all__ = ["placement_text"]

LEAST_GAIN = 0.0005  # of a step: what is worth naming


def placement_text(expected: ExpectedPlacement) -> str:
    """On the first nodes of the matrix; the job itself chooses among the nodes it gets."""
    among = f"on the first {counted(len(expected.nodes), 'node')} of the measured matrix"
    before = expected.slurm_order_step_seconds
    share = expected.gain_seconds / before
    if share < LEAST_GAIN:
        return f"Placement: no order of the nodes was found to be faster than SLURM's {among}"
    return (
        f"Placement: the best order of the nodes saves about {expected.gain_seconds:.3g} s a step ({share:.1%} of the "
        f"{before:.3g} s in SLURM's order) {among}; the job chooses its order when it starts"
    )
