"""One line on what the order of the nodes is worth."""

from __future__ import annotations

from llmlaunch.planner.placement import ExpectedPlacement

__all__ = ["placement_text"]


def placement_text(found: ExpectedPlacement, step_seconds: float) -> str:
    """On the first nodes of the matrix; the job itself chooses among the nodes it gets."""
    among = f"on the first {len(found.nodes)} nodes of the measured matrix"
    share = found.gain_seconds / step_seconds
    if share < 0.0005:
        return f"Placement: no order of the nodes was found to be faster than SLURM's {among}"
    return (
        f"Placement: the best order of the nodes saves about {found.gain_seconds:.3g} s a step ({share:.1%} of it) "
        f"{among}; the job chooses its order when it starts"
    )
