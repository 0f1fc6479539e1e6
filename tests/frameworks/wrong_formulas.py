"""Mistakes one could make in the memory formula, for tests that hold it to a trace: each must be noticed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

Patch = pytest.MonkeyPatch


def everywhere(patch: Patch, right: Callable[..., Any], wrong: Callable[..., Any]) -> None:
    """In every module of the formula that took this function by its name."""
    places = [
        (module, name)
        for path, module in list(sys.modules.items())
        if path.startswith(("llmlaunch.memory.", "llmlaunch.effects."))
        for name, value in vars(module).items()
        if value is right
    ]
    assert places
    for module, name in places:
        patch.setattr(module, name, wrong)


def left_out(right: Callable[..., Any]) -> Callable[[Patch], None]:
    """A term that is always zero."""
    return lambda patch: everywhere(patch, right, lambda job, rows: np.zeros(len(rows)))


def multiplied(right: Callable[..., Any], factor: float) -> Callable[[Patch], None]:
    return lambda patch: everywhere(patch, right, lambda job, rows: factor * right(job, rows))
