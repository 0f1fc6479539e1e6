"""Transfers beside computation: what is not hidden, and what is hidden and yet slows the device down."""

from __future__ import annotations

import numpy as np

from llmlaunch.columns import FloatColumn
from llmlaunch.timing.constants import constant

__all__ = ["exposed"]


def exposed(seconds: FloatColumn, hiding: FloatColumn) -> FloatColumn:
    """Seconds a step is longer for transfers of `seconds` beside `hiding` seconds of computation: while it is hidden, a
    transfer takes a share of the device (`overlap_cost`): copies read and write the same memory, collectives occupy
    multiprocessors."""
    slowed = constant("overlap_cost") * seconds
    return np.maximum(seconds - (1.0 - constant("overlap_cost")) * hiding, slowed)
