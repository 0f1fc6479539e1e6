"""What a trace of a rank is held to: lasting bytes exactly, the peak within 3 %."""

from __future__ import annotations

import pytest
from traced_cases import Case
from traced_runs import Trace

__all__ = ["GRADIENT_BYTES", "check_peak", "check_what_lasts"]

PEAK_TOLERANCE = 0.03
PARAMETER_BYTES, GRADIENT_BYTES, STATE_BYTES = 2, 4, 4  # bf16, fp32 accumulation, fp32 master and moments


def check_what_lasts(case: Case, traced: Trace) -> None:
    """Parameters, gradients and optimizer states, to the byte."""
    state, terms = traced["state"], case.estimate().terms
    assert state["padded_count"] == state["parameter_count"]  # of these cases
    assert terms["parameters"] == PARAMETER_BYTES * state["parameter_count"]
    assert terms["gradients"] == GRADIENT_BYTES * state["parameter_count"] == state["bytes"]["gradients"]
    assert terms["optimizer_states"] == STATE_BYTES * state["optimizer_state_count"]


def check_peak(case: Case, traced: Trace) -> None:
    """The most that torch handed out at once."""
    assert case.estimate().allocated_bytes == pytest.approx(traced["peak_bytes"], rel=PEAK_TOLERANCE)
