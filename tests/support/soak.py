"""How much the tests try: some in `make test`, all in `make soak`.

LLMLAUNCH_TESTS is `some`, `all`, or `record`, which also writes anew what the frameworks answer (`make answers`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

from hypothesis import settings

HOW_MUCH = os.environ.get("LLMLAUNCH_TESTS", "some")
SOAK = HOW_MUCH == "all"
RECORDING = HOW_MUCH == "record"
if HOW_MUCH not in ("some", "all", "record"):
    raise ValueError(f"LLMLAUNCH_TESTS is {HOW_MUCH!r}, not some, all or record")

T = TypeVar("T")


def examples(few: int, many: int = 200) -> settings:
    """Return settings that draw `few` examples, and `many` in `make soak`."""
    return settings(max_examples=many if SOAK else few, deadline=None)


def in_soak(*variants: T) -> tuple[T, ...]:
    """Return the variants in `make soak`, else none of them."""
    return variants if SOAK else ()


def share(cases: Iterable[T], chosen: Callable[[T], bool] | Collection[T]) -> list[T]:
    """Return the cases to run: those chosen, or all of them in `make soak`."""
    listed = list(cases)
    assert callable(chosen) or all(case in listed for case in chosen), "a chosen case does not exist"
    return [case for case in listed if SOAK or (chosen(case) if callable(chosen) else case in chosen)]
