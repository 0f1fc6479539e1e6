"""How often what breaks things is repeated: once in `make test`, twenty times in `make soak`, with its variants."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")
REPEATS = int(os.environ.get("LLMLAUNCH_FAULT_REPEATS", "1"))


def in_soak(*variants: T) -> tuple[T, ...]:
    """The variants of a fault, where faults are repeated; else none of them."""
    return variants if REPEATS > 1 else ()
